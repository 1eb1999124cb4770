"""The positions of a Hugging Face checkpoint's tensors in a GGUF file, and their row order."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from luceasync.errors import ModelError
from luceasync.gguf.config import (
    DIVISORS,
    EMBEDDING,
    EXPERTS,
    HEAD,
    MTP_LAYERS,
    SCALE,
    SIZE,
    ArchitectureKeys,
    Config,
    common_config,
    experts_config,
)
from luceasync.gguf.model import GgufModel


@dataclass(frozen=True, slots=True)
class AxisSwap:
    """How to undo a converter's reordering: from index `begin` on, view the stored rows (or
    columns) as `shape` and swap `axis` with the next one.
    """

    begin: int
    shape: tuple[int, int, int]
    axis: int


@dataclass(frozen=True, slots=True)
class AxisSwaps:
    """The swaps for the rows and the columns of one matrix; None: already in order."""

    rows: AxisSwap | None = None
    columns: AxisSwap | None = None


AS_STORED = AxisSwaps()


def llama_orders(config: dict[str, Any]) -> dict[str, AxisSwaps]:
    """Undo the reordering of query and key rows. ggml rotates neighbouring rows of a head, other
    libraries its two halves: the converter stores row i of the first half at 2 i, and row i of the
    second half at 2 i + 1.
    """
    half, orders = config["head_dim"] // 2, {}
    for name, number in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        rows = AxisSwap(0, (config[number], half, 2), 1)
        orders[f"self_attn.{name}_proj.weight"] = AxisSwaps(rows=rows)
    return orders


RECURRENT = "attention.recurrent_layers"
WINDOW, LOGIT_CAP = "attention.sliding_window", "final_logit_softcapping"
FULL, SLIDING = "full_attention", "sliding_attention"


def smollm3_config(keys: ArchitectureKeys) -> Config:
    """The config of a SmolLM3. The file does not state which layers have no RoPE: it is every
    fourth. Raises ModelError.
    """
    return whole_heads_config(keys) | {"no_rope_layer_interval": 4}


def gemma3_config(keys: ArchitectureKeys) -> Config:
    """The config of a Gemma 3. The file states which layers have windows only if that differs from
    the default, all but every sixth. It does not state the divisor of scores either: the root of
    the head size, or, in the model with 62 layers, of a head's share of the hidden size. Raises
    ModelError.
    """
    config = whole_heads_config(keys, (WINDOW, LOGIT_CAP))
    window, num_layers = keys.integer(WINDOW, 0), keys.num_layers
    scalar = config["head_dim"]
    if num_layers == 62:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    theta = keys.metadata.real(keys.name("rope.freq_base_swa"), 10000.0)
    local = {"rope_type": "default", "rope_theta": theta}
    del config["hidden_act"]
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "rope_parameters": {FULL: config["rope_parameters"], SLIDING: local},
        "final_logit_softcapping": keys.metadata.real(keys.name(LOGIT_CAP), 0.0) or None,
        "sliding_window": window or None,
        "layer_types": _windowed_layers(keys, 6) if window else [FULL] * num_layers,
    }


def _windowed_layers(keys: ArchitectureKeys, usual: int) -> list[str]:
    """The type of each layer, given per layer or as the interval of layers without a window, which
    is `usual` if the file has neither. Raises ModelError.
    """
    name, num_layers = keys.name(f"{WINDOW}_pattern"), keys.num_layers
    if name in keys.metadata and keys.metadata.is_array(name):
        flags = keys.metadata.integers(name)[:num_layers]
        return [SLIDING if flag else FULL for flag in flags]
    interval = keys.integer(f"{WINDOW}_pattern", usual)
    if interval < 1:
        raise ModelError(f"{name} = {interval}: expected 1 or more")
    return [SLIDING if (layer + 1) % interval else FULL for layer in range(num_layers)]


def gemma4_config(keys: ArchitectureKeys) -> Config:
    """The config of a Gemma 4. Layers with full attention have their own head size, and their own
    value projections if the file has any. Raises ModelError.
    """
    num_kv_heads = keys.of_layers("attention.head_count_kv")
    computed = (WINDOW, LOGIT_CAP, EXPERTS, SIZE)
    config = common_config(keys, computed, num_kv_heads=max(num_kv_heads))
    kinds, local = _windowed_layers(keys, 6), _local_head_dim(keys)
    full = config["rope_parameters"]
    if config.pop("partial_rotary_factor") != 1.0:
        raise ModelError(f"{keys.name('rope.dimension_count')}: expected the whole head")
    theta = keys.metadata.real(keys.name("rope.freq_base_swa"), 10000.0)
    dims = {FULL: config["head_dim"], SLIDING: local}
    sizes = {
        str(layer): {"head_dim": dims[kind], "num_key_value_heads": num}
        for layer, (kind, num) in enumerate(zip(kinds, num_kv_heads, strict=True))
    }
    blocks = [f"blk.{layer}.attn_" for layer, kind in enumerate(kinds) if kind == FULL]
    values = [f"{block}{end}" for block in blocks for end in ("v.weight", "qkv.weight")]
    del config["hidden_act"]
    if keys.integer(EXPERTS, 0):
        experts = experts_config(keys)
        experts["top_k_experts"] = experts.pop("num_experts_per_tok")
        config |= experts | {"enable_moe_block": True}
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": theta}},
        "final_logit_softcapping": keys.metadata.real(keys.name(LOGIT_CAP), 0.0) or None,
        "sliding_window": keys.integer(WINDOW),
        "layer_types": kinds,
        "per_layer_config": sizes,
        "attention_k_eq_v": not any(name in keys.model.tensors for name in values),
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"],
        **_borrowing(keys),
    }


def _borrowing(keys: ArchitectureKeys) -> Config:
    """How many layers reuse the keys of earlier ones, and whether their networks are twice as wide.
    Raises ModelError.
    """
    num_borrowing = keys.integer("attention.shared_kv_layers", 0)
    sizes = keys.of_layers(SIZE)
    num_own = max(keys.num_layers - num_borrowing, 0)
    size = sizes[0]
    is_wide = num_borrowing > 0 and sizes[-1] == 2 * size
    if sizes != [size] * num_own + [2 * size if is_wide else size] * (len(sizes) - num_own):
        raise ModelError(
            f"{keys.name(SIZE)}: expected {size} in all layers, or twice as much in those without "
            "keys"
        )
    fields = {"intermediate_size": size, "use_double_wide_mlp": is_wide}
    return fields | {"num_kv_shared_layers": num_borrowing}


def _local_head_dim(keys: ArchitectureKeys) -> int:
    """The head size of layers with a window, which rotate whole heads. Raises ModelError."""
    head_dim = keys.integer("attention.key_length_swa")
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if (value := keys.integer(key, head_dim)) != head_dim:
            raise ModelError(f"{keys.name(key)} = {value}: expected {head_dim}, as key_length_swa")
    return head_dim


MAGNITUDE = "yarn_attn_factor"
SIGMOID = 2  # a value of expert_gating_func


def laguna_config(keys: ArchitectureKeys) -> Config:
    """The config of a Laguna. The file does not state the kind of a layer's gates: it follows from
    the number of rows of their tensor. Without a list, every fourth layer has full attention,
    beginning with the first. Raises ModelError.
    """
    heads, num_layers = keys.of_layers("attention.head_count"), keys.num_layers
    config = common_config(keys, (EXPERTS, WINDOW, MAGNITUDE), max(heads))
    full = config["rope_parameters"]
    full["partial_rotary_factor"] = config.pop("partial_rotary_factor")
    if (name := keys.name(f"rope.scaling.{MAGNITUDE}")) in keys.metadata:
        full["attention_factor"] = keys.metadata.real(name)
    theta = keys.metadata.real(keys.name("rope.freq_base_swa"), full["rope_theta"])
    rotated = keys.integer("rope.dimension_count_swa", config["head_dim"])
    local = {"rope_theta": theta, "partial_rotary_factor": rotated / config["head_dim"]}
    window, dense = keys.integer(WINDOW, 0), keys.integer("leading_dense_block_count", 0)
    usual = [FULL if layer % 4 == 0 else SLIDING for layer in range(num_layers)]
    has_list = keys.name(f"{WINDOW}_pattern") in keys.metadata
    for key, only in (("expert_gating_func", SIGMOID), ("expert_shared_count", 1)):
        if (value := keys.integer(key, only)) != only:
            raise ModelError(f"{keys.name(key)} = {value} is not supported; expected {only}")
    return {
        **config,
        **experts_config(keys, [SCALE]),
        "shared_expert_intermediate_size": keys.layered("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": keys.metadata.real(keys.name(SCALE), 1.0) or 1.0,
        "num_attention_heads_per_layer": heads,
        "gating_types": [_gate_of(keys, layer, number) for layer, number in enumerate(heads)],
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (num_layers - dense),
        "rope_parameters": {FULL: full, SLIDING: {"rope_type": "default", **local}},
        "sliding_window": window or None,
        "layer_types": (_windowed_layers(keys, 4) if has_list else usual)
        if window
        else [FULL] * num_layers,
    }


def _gate_of(keys: ArchitectureKeys, layer: int, num_heads: int) -> str:
    found = keys.model.tensors.get(f"blk.{layer}.attn_gate.weight")
    is_per_head = found is None or found[1].shape[0] == num_heads  # refused later
    return "per-head" if is_per_head else "per-element"


def qwen3moe_config(keys: ArchitectureKeys) -> Config:
    """The config of a Qwen3 with experts. Raises ModelError."""
    return whole_heads_config(keys, [EXPERTS]) | experts_config(keys)


def whole_heads_config(keys: ArchitectureKeys, computed: Sequence[str] = ()) -> Config:
    """The common fields of a model that rotates whole heads. Raises ModelError."""
    config = common_config(keys, computed)
    if config.pop("partial_rotary_factor") != 1.0:
        raise ModelError(f"{keys.name('rope.dimension_count')}: expected the whole head")
    return config


def qwen35moe_config(keys: ArchitectureKeys) -> Config:
    """The config of a Qwen3.5 with experts. Raises ModelError."""
    shared = keys.layered("expert_shared_feed_forward_length")
    config = qwen35_config(keys, [EXPERTS]) | experts_config(keys)
    return config | {"shared_expert_intermediate_size": shared}


def qwen35_config(keys: ArchitectureKeys, computed: Sequence[str] = ()) -> Config:
    """The config of a Qwen3.5. Raises ModelError."""
    key_heads, value_heads = keys.integer("ssm.group_count"), keys.integer("ssm.time_step_rank")
    head_dim, inner = keys.integer("ssm.state_size"), keys.integer("ssm.inner_size")
    if inner != value_heads * head_dim:
        raise ModelError(
            f"{keys.name('ssm.inner_size')} = {inner}: {value_heads} value heads of {head_dim} "
            f"are {value_heads * head_dim}"
        )
    return common_config(keys, computed) | {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        **_layer_types(keys),
        "mtp_num_hidden_layers": keys.integer(MTP_LAYERS, 0),
        "mtp_use_dedicated_embeddings": any(
            f"blk.{keys.num_layers}.nextn.{name}.weight" in keys.model.tensors
            for name in ("embed_tokens", "shared_head_head")
        ),
    }


def _layer_types(keys: ArchitectureKeys) -> Config:
    """The type of each layer: given per layer, or as the interval of attention layers."""
    name = keys.name(RECURRENT)
    if name not in keys.metadata:
        return {"full_attention_interval": keys.integer("full_attention_interval", 4)}
    flags = keys.metadata.integers(name)[: keys.num_layers]
    return {"layer_types": ["linear_attention" if flag else "full_attention" for flag in flags]}


def qwen35_orders(config: dict[str, Any]) -> dict[str, AxisSwaps]:
    """Undo the reordering of value heads: head j of the r value heads of key head g (of K) belongs
    at g * r + j, but the converter stores it at j * K + g. By names below `layers.N.`; all other
    tensors are in order.
    """
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if num_keys < 1 or num_values % num_keys or num_values == num_keys:
        return {}  # already in order, or refused by the family
    key_rows = 2 * num_keys * config["linear_key_head_dim"]

    def heads(begin: int, dim: int) -> AxisSwap:
        return AxisSwap(begin, (num_values // num_keys, num_keys, dim), 0)

    dim = config["linear_value_head_dim"]
    moved = {
        "in_proj_qkv.weight": AxisSwaps(rows=heads(key_rows, dim)),
        "in_proj_z.weight": AxisSwaps(rows=heads(0, dim)),
        "in_proj_b.weight": AxisSwaps(rows=heads(0, 1)),
        "in_proj_a.weight": AxisSwaps(rows=heads(0, 1)),
        "conv1d.weight": AxisSwaps(rows=heads(key_rows, dim)),
        "A_log": AxisSwaps(rows=heads(0, 1)),
        "dt_bias": AxisSwaps(rows=heads(0, 1)),
        "out_proj.weight": AxisSwaps(columns=heads(0, dim)),
    }
    return {f"linear_attn.{name}": orders for name, orders in moved.items()}


FFN = ("gate", "up", "down")
ENDS = {
    "embed_tokens.weight": EMBEDDING,
    "norm.weight": "output_norm.weight",
    "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
ATTENTION = {
    "input_layernorm.weight": "attn_norm.weight",
    **{f"self_attn.{n}_proj.weight": f"attn_{n}.weight" for n in "qkv"},
    "self_attn.o_proj.weight": "attn_output.weight",
    **{f"self_attn.{n}_proj.bias": f"attn_{n}.bias" for n in "qkv"},
    **{f"self_attn.{n}_norm.weight": f"attn_{n}_norm.weight" for n in "qk"},
    **{f"mlp.{n}_proj.weight": f"ffn_{n}.weight" for n in FFN},
}
DELTA = {
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
# Experts are one tensor [experts, rows, columns] of each kind, or one of gates and ups together.
ROUTED = {
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    **{f"mlp.shared_expert.{n}_proj.weight": f"ffn_{n}_shexp.weight" for n in FFN},
}
GATED = {
    "self_attn.g_proj.weight": "attn_gate.weight",
    "mlp.experts.e_score_correction_bias": "exp_probs_b.bias",
}
EXPERT = re.compile(r"(?:mlp\.)?experts\.(\d+)\.(gate|up|down)_proj\.weight")
GATES_AND_UPS = "ffn_gate_up_exps.weight"
MTP = "mtp."  # prefix of the tensors of a draft head, the block after the layers
NEXTN = {
    "fc.weight": "nextn.eh_proj.weight",
    "pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "norm.weight": "nextn.shared_head_norm.weight",  # if missing, the model's final norm
}
ALIASES = {"ssm_dt.bias": "ssm_dt"}  # some files use the other name
FUSED = "attn_qkv.weight"  # query, key and value rows of an attention layer, in some files
IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
IN_BLOCK = re.compile(r"blk\.(\d+)\..+")
OTHER_PARTS = ("v.", "mm.")  # of a vision model


@dataclass(frozen=True, slots=True)
class Architecture:
    """One `general.architecture`: how to read its config, its tensor names, and which rows and
    columns are reordered. The latter two are by names below `layers.N.` of a checkpoint.
    """

    config: Callable[[ArchitectureKeys], Config]
    names: Mapping[str, str]
    orders: Callable[[dict[str, Any]], dict[str, AxisSwaps]] = lambda config: {}


HYBRID = ATTENTION | DELTA | {"post_attention_layernorm.weight": "post_attention_norm.weight"}
DENSE = ATTENTION | {"post_attention_layernorm.weight": "ffn_norm.weight"}
BETWEEN_NORMS = ATTENTION | {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
SCALED = BETWEEN_NORMS | {
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
}
BESIDE_EXPERTS = {
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
ARCHITECTURES = {
    "gemma3": Architecture(gemma3_config, BETWEEN_NORMS),
    "gemma4": Architecture(gemma4_config, SCALED | BESIDE_EXPERTS),
    "llama": Architecture(whole_heads_config, DENSE, llama_orders),
    "qwen2": Architecture(whole_heads_config, DENSE),
    "qwen3": Architecture(whole_heads_config, DENSE),
    "smollm3": Architecture(smollm3_config, DENSE, llama_orders),
    "laguna": Architecture(laguna_config, DENSE | ROUTED | GATED),
    "qwen3moe": Architecture(qwen3moe_config, DENSE | ROUTED),
    "qwen35": Architecture(qwen35_config, HYBRID, qwen35_orders),
    "qwen35moe": Architecture(qwen35moe_config, HYBRID | ROUTED, qwen35_orders),
}


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Rows of the stored tensor `name`, from `begin` on. If that tensor holds the matrices of all
    experts, `expert` is the index of one, and `num_parts` the number of such matrices per expert.
    """

    name: str
    begin: int = 0
    orders: AxisSwaps = AS_STORED
    expert: int | None = None
    num_parts: int = 1


class GgufLayout:
    """Maps the tensor names of a checkpoint to those of a GGUF model."""

    def __init__(self, model: GgufModel) -> None:
        """Raises ModelError for a model that is not supported."""
        self.model = model
        try:
            own = ARCHITECTURES.get(model.architecture)
            if own is None:
                raise ModelError(
                    f"general.architecture {model.architecture!r} is not supported; "
                    f"supported: {', '.join(sorted(ARCHITECTURES))}"
                )
            keys = ArchitectureKeys(model)
            self.config = own.config(keys)
        except ModelError as error:
            raise ModelError(f"{model.path}: {error}") from None
        self.num_layers = keys.num_layers
        self._names = own.names
        self._orders = own.orders(self.config)

    def where(self, name: str) -> TensorLocation:
        """The location at which the tensor `name` is stored, or would be if the file had it."""
        if name.startswith(MTP):
            return self._of_mtp(name.removeprefix(MTP))
        below = name.removeprefix("model.")
        in_layer = IN_LAYER.fullmatch(below)
        if in_layer is None:
            return TensorLocation(HEAD if name == "lm_head.weight" else ENDS[below])
        layer, rest = in_layer[1], in_layer[2]
        if (expert := EXPERT.fullmatch(rest)) is not None:
            return self._of_expert(layer, int(expert[1]), expert[2])
        stored = f"blk.{layer}.{self._names[rest]}"
        orders = self._orders.get(rest, AS_STORED)
        if stored in self.model.tensors:
            return TensorLocation(stored, 0, orders)
        fused = self.model.tensors.get(f"blk.{layer}.{FUSED}")
        if fused is not None and rest in (begins := self._begins(layer, fused[1].shape[0])):
            return TensorLocation(fused[1].name, begins[rest], orders)
        other = ALIASES.get(self._names[rest])
        return TensorLocation(f"blk.{layer}.{other}" if other else stored, 0, orders)

    def _of_mtp(self, below: str) -> TensorLocation:
        if below in NEXTN:
            stored = f"blk.{self.num_layers}.{NEXTN[below]}"
            is_last = below in ENDS and stored not in self.model.tensors
            return TensorLocation(ENDS[below] if is_last else stored)
        in_layer = IN_LAYER.fullmatch(below)
        assert in_layer is not None, "other tensors are of the layer"
        return self.where(f"layers.{self.num_layers}.{in_layer[2]}")

    def _of_expert(self, layer: str, expert: int, kind: str) -> TensorLocation:
        both = f"blk.{layer}.{GATES_AND_UPS}"
        is_both = kind != "down" and both in self.model.tensors
        name = both if is_both else f"blk.{layer}.ffn_{kind}_exps.weight"
        num_parts = 2 if is_both else 1
        found = self.model.tensors.get(name)
        height = found[1].shape[1] if found and len(found[1].shape) == 3 else 0
        begin = expert * height + (height // 2 if is_both and kind == "up" else 0)
        return TensorLocation(name, begin, AS_STORED, expert, num_parts)

    def is_for_others(self, name: str) -> bool:
        """Whether the stored tensor `name` belongs to the config or to a part that is not loaded
        here, the draft layers or the vision tower.
        """
        if name == DIVISORS:
            return True
        in_block = IN_BLOCK.fullmatch(name)
        return name.startswith(OTHER_PARTS) or (
            in_block is not None and int(in_block[1]) >= self.num_layers
        )

    def _begins(self, layer: str, num_rows: int) -> dict[str, int]:
        """The first query, key and value rows in a fused matrix. A query may include a gate."""
        own = self.config.get("per_layer_config", {}).get(layer, self.config)
        kv = own["num_key_value_heads"] * own["head_dim"]
        begins = (0, num_rows - 2 * kv, num_rows - kv)
        return {f"self_attn.{n}_proj.weight": b for n, b in zip("qkv", begins, strict=True)}
