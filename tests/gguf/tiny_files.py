"""Tiny models as GGUF files, written by the package `gguf` as llama.cpp's converter would, and the
same numbers in a Hugging Face directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from luceasync.gguf.vocabulary import QWEN2, QWEN35  # which are transformers': test_vocabulary
from tests.gguf.blocks import random_blocks
from tests.gguf.tiny_keys import GEMMA4, add_keys
from tests.speculation.mtp_models import add_mtp
from tests.tiny import CHATML, SPECIAL

if TYPE_CHECKING:  # else only tests that build a model pay for it
    from transformers import PreTrainedModel

VOCAB = 512
ARCHITECTURES = {
    "laguna": "laguna",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TEXTS = ["to be or not to be, that is the question 1234", "être ou ne pas être", "\u0915\u093f ok"]
# What a K-quant mix has: by the end of a tensor's name, the first that fits.
K_MIX = {
    "attn_v.weight": "Q6_K",
    "ffn_down.weight": "Q6_K",
    "ffn_down_exps.weight": "Q6_K",
    "attn_qkv.weight": "Q5_K",
    "ssm_alpha.weight": "F32",
    "ssm_beta.weight": "Q8_0",
    "token_embd.weight": "Q6_K",
    "": "Q4_K",
}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
QKV = ("attn_q.weight", "attn_k.weight", "attn_v.weight")
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    **{f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{n}_norm": f"attn_{n}_norm" for n in "qk"},
    **{f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")},
    "mlp.gate": "ffn_gate_inp",
    "self_attn.g_proj": "attn_gate",
    **{f"mlp.shared_experts.{n}_proj": f"ffn_{n}_shexp" for n in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{n}_proj": f"ffn_{n}_shexp" for n in ("gate", "up", "down")},
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "layer_scalar": "layer_output_scale",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    **{f"post_feedforward_layernorm_{i}": f"post_ffw_norm_{i}" for i in (1, 2)},
    "router.proj": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
SCALES = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
FLOATS = ("conv1d.weight", "norm.weight", "mlp.gate.weight", "router.proj.weight")  # as they are
PARTIAL = "partial_rotary_factor"
Numbers = np.ndarray


@dataclass(frozen=True)
class Tiny:
    """What a file is to be. `types`: as K_MIX; `value_heads`: of two key heads."""

    family: str = "qwen3"
    types: dict[str, str] = field(default_factory=lambda: {"": "F32"})
    tied: bool = False
    value_heads: int = 6
    head_dim: int = 128  # of linear layers
    mtp: bool = False
    nextn: bool = False  # with a head that drafts, all of it
    vision: bool = False
    # Query, key and value rows of attention in one matrix, and gates and ups of experts.
    fused: bool = False
    rope: dict[str, Any] | None = None  # rope_parameters
    tensors_a_part: int = 0  # 0: one file
    num_layers: int = 4
    dim: int = 256
    seed: int = 0
    experts: bool = False  # of Gemma 4, beside each network
    expert_dim: int = 0  # 0: dim
    inputs: int = 0  # numbers of the input of each layer; the last two then borrow keys

    @property
    def has_experts(self) -> bool:
        return "moe" in self.family or self.family == "laguna" or self.experts

    @property
    def is_hybrid(self) -> bool:
        return self.family.startswith("qwen3_5")


def build(tiny: Tiny) -> PreTrainedModel:
    """The model as transformers runs it, float32, with norms that are not all alike."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(tiny.seed)
    common = {
        "vocab_size": VOCAB,
        "hidden_size": tiny.dim,
        "intermediate_size": tiny.dim,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": tiny.dim // 4,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
        "initializer_range": 0.08,
        "tie_word_embeddings": tiny.tied,
    }
    if tiny.rope is not None:
        common["rope_parameters"] = {"rope_theta": 10000.0, **tiny.rope}
    if tiny.has_experts:
        size = tiny.expert_dim or tiny.dim
        common |= {"moe_intermediate_size": size, "num_experts": 8, "num_experts_per_tok": 3}
        common |= {"norm_topk_prob": True, "shared_expert_intermediate_size": tiny.dim}
    if not tiny.is_hybrid:
        fields = common | {"pad_token_id": 0}
        fields |= {"sliding_window": None} if tiny.family == "mistral" else {}
        if tiny.family == "laguna":
            kinds = ["full_attention", *["sliding_attention"] * 3]
            fields |= {"layer_types": kinds, "num_attention_heads_per_layer": [4, 8, 8, 8]}
            fields |= {"sliding_window": 24, "moe_routed_scaling_factor": 2.5}
            ropes = {"full_attention": 0.5, "sliding_attention": 1.0}
            plain = {"rope_type": "default", "rope_theta": 10000.0}
            fields["rope_parameters"] = {
                kind: plain | (tiny.rope or {} if share < 1 else {}) | {PARTIAL: share}
                for kind, share in ropes.items()
            }
        if tiny.family == "gemma3_text":
            whole = {"rope_type": "default", "rope_theta": 50000.0, **(tiny.rope or {})}
            fields |= {"sliding_window": 24, "query_pre_attn_scalar": common["head_dim"]}
            fields |= {"rope_parameters": {"full_attention": whole}}
        if tiny.family == "gemma4_text":
            kinds = ["sliding_attention"] * (tiny.num_layers - 1) + ["full_attention"]
            fields |= GEMMA4 | {"layer_types": kinds}
            fields |= {"enable_moe_block": True, "top_k_experts": 3} if tiny.experts else {}
            if tiny.inputs:
                fields |= {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
                fields |= {"layer_types": [kinds[0], kinds[-1]] * 2}
                fields |= {"hidden_size_per_layer_input": tiny.inputs}
                fields |= {"vocab_size_per_layer_input": VOCAB}
        config = AutoConfig.for_model(tiny.family, **fields)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        rope = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default"}
        config = AutoConfig.for_model(
            f"{tiny.family}_text",
            **common,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=tiny.head_dim,
            linear_value_head_dim=tiny.head_dim,
            linear_num_key_heads=2,
            linear_num_value_heads=tiny.value_heads,
            layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (tiny.num_layers // 4),
            rope_parameters=rope,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        own = (buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar"))
        for buffer in own:
            buffer *= 0.5 + torch.rand(1)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += (1 if "bias" in name else 0.1) * torch.randn_like(parameter)
            if name.endswith("conv1d.weight"):
                parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


def write(tiny: Tiny, folder: Path) -> tuple[Path, Path]:
    """(the GGUF file or its first part, the Hugging Face directory of the same numbers)."""
    plain = folder / "plain"
    model = build(tiny)
    arch = ARCHITECTURES[tiny.family]
    writer = gguf.GGUFWriter(
        folder / "model.gguf", arch, split_max_tensors=tiny.tensors_a_part, use_temp_file=False
    )
    add_keys(writer, arch, tiny, model.config)
    tokenizer = save_tokenizer(plain, QWEN35 if tiny.is_hybrid else QWEN2)
    add_tokenizer(writer, tokenizer, arch)
    state, parts = model.state_dict(), {}
    heads = _head(state, tiny) if tiny.nextn else {}
    state |= heads
    for number, (name, tensor) in enumerate(sorted(state.items())):
        if name == "lm_head.weight" and tiny.tied:
            continue
        if ".experts." in name:
            state[name] = _add_experts(writer, tiny, name, tensor.numpy(), seed=number)
            continue
        there, back = _conversions(name, tiny)
        own_name = gguf_name(name, arch)
        stored, kind = there(tensor.numpy()), _type(tiny, own_name)
        if stored.ndim == 1 or name.endswith(FLOATS):
            kind = "F32"
        data = encoded(stored, kind, seed=number)
        has_all = name.replace("k_proj", "v_proj").replace("q_proj", "v_proj") in state
        if tiny.fused and has_all and own_name.endswith(QKV):
            parts[own_name] = data
        else:
            writer.add_tensor(own_name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
        decoded = gguf.dequantize(data, gguf.GGMLQuantizationType[kind]).reshape(stored.shape)
        state[name] = torch.from_numpy(np.ascontiguousarray(back(decoded)))
    for block in {name.rpartition("attn_")[0] for name in parts}:
        data = np.concatenate([parts[block + end] for end in QKV])
        kind = gguf.GGMLQuantizationType[tiny.types[""]]
        writer.add_tensor(f"{block}attn_qkv.weight", data, raw_dtype=kind)
    if tiny.inputs:  # which converters keep, though no layer reads it
        unread = f"blk.{tiny.num_layers - 1}.attn_k.weight"
        writer.add_tensor(unread, np.ones((128, tiny.dim), np.float32))
    if tiny.mtp:
        for name in ("attn_norm", "nextn.eh_proj"):
            writer.add_tensor(f"blk.{tiny.num_layers}.{name}.weight", np.ones(8, np.float32))
    if tiny.vision:
        writer.add_tensor("v.patch_embd.weight", np.ones(8, np.float32))
        writer.add_tensor("mm.0.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if tiny.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    own = {name: state.pop(name) for name in heads}
    model.load_state_dict(state)
    model.save_pretrained(plain)
    if tiny.nextn:
        add_mtp(plain, {_in_directory(name): tensor for name, tensor in own.items()})
    return min(folder.glob("*.gguf")), plain


HEAD_NAMES = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}


def _head(state: Mapping[str, torch.Tensor], tiny: Tiny) -> dict[str, torch.Tensor]:
    """Random numbers of a head that drafts, the block behind the layers: as the last of these, and
    its own.
    """
    last, block = (f"model.layers.{tiny.num_layers - back}." for back in (1, 0))
    generator = torch.Generator().manual_seed(tiny.seed + 1)

    def numbers(*shape: int) -> torch.Tensor:
        scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
        return scale * torch.randn(shape, generator=generator)

    shapes = {
        block + name.removeprefix(last): tensor.shape
        for name, tensor in state.items()
        if name.startswith(last)
    }
    shapes |= {f"{block}{name}.weight": torch.Size([tiny.dim]) for name in HEAD_NAMES}
    shapes[f"{block}nextn.eh_proj.weight"] = torch.Size([tiny.dim, 2 * tiny.dim])
    return {name: numbers(*shape) for name, shape in shapes.items()}


def _in_directory(name: str) -> str:
    """What a checkpoint calls a tensor of that block."""
    rest = name.split(".", 3)[3]
    own = HEAD_NAMES.get(rest.removesuffix(".weight"))
    return f"mtp.layers.0.{rest}" if own is None else f"mtp.{own}.weight"


def _add_experts(
    writer: gguf.GGUFWriter, tiny: Tiny, name: str, numbers: Numbers, *, seed: int
) -> torch.Tensor:
    """Write the matrices of all experts, [experts, rows, columns]; the numbers that are read."""
    block = f"blk.{name.split('.')[2]}"
    if name.endswith("down_proj"):
        parts = {"ffn_down_exps": numbers}
    elif tiny.fused:
        parts = {"ffn_gate_up_exps": numbers}
    else:
        gates, ups = np.split(numbers, 2, axis=1)
        parts = {"ffn_gate_exps": gates, "ffn_up_exps": ups}
    found = []
    for i, (end, part) in enumerate(parts.items()):
        kind = _type(tiny, f"{block}.{end}.weight")
        data = encoded(part.reshape(-1, part.shape[-1]), kind, seed=seed + 1000 * i)
        raw, rows = gguf.GGMLQuantizationType[kind], part.shape[:2]
        writer.add_tensor(f"{block}.{end}.weight", data.reshape(*rows, -1), raw_dtype=raw)
        found.append(gguf.dequantize(data, raw).reshape(part.shape))
    return torch.from_numpy(np.concatenate(found, 1))


def gguf_name(name: str, arch: str) -> str:
    """What llama.cpp calls it."""
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    if rest == "linear_attn.A_log":
        return f"blk.{layer}.ssm_a"
    if rest == "linear_attn.dt_bias":
        return f"blk.{layer}.ssm_dt.bias"
    if rest in SCALES:
        return f"blk.{layer}.{SCALES[rest]}"
    stem = rest.removesuffix(".weight")
    if stem in HEAD_NAMES:
        return f"blk.{layer}.{rest}"
    if rest.endswith("e_score_correction_bias"):
        return f"blk.{layer}.exp_probs_b.bias"
    if rest.endswith(".bias"):
        return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.bias')]}.bias"
    if stem == "post_attention_layernorm":
        is_last = arch.startswith(("qwen35", "gemma"))
        own = "post_attention_norm" if is_last else "ffn_norm"
        return f"blk.{layer}.{own}.weight"
    return f"blk.{layer}.{LAYER_NAMES[stem]}.weight"


def encoded(numbers: Numbers, kind: str, *, seed: int) -> Numbers:
    """As the type stores them; K-quants, which nobody here makes, are random blocks."""
    if kind in ("F32", "F16"):
        return numbers.astype({"F32": np.float32, "F16": np.float16}[kind])
    try:
        return gguf.quantize(np.ascontiguousarray(numbers), gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        size = {"Q4_K": 8e-4, "Q5_K": 4e-4, "Q6_K": 4e-5, "Q2_K": 8e-3, "Q3_K": 2e-3}
        return random_blocks(kind, *numbers.shape, seed=seed, scale=size.get(kind, 4e-5))


def _type(tiny: Tiny, name: str) -> str:
    return next(kind for end, kind in tiny.types.items() if name.endswith(end))


def _conversions(
    name: str, tiny: Tiny
) -> tuple[Callable[[Numbers], Numbers], Callable[[Numbers], Numbers]]:
    """What the converter does to a tensor, and the way back."""
    rest = name.split(".", 3)[-1] if "layers" in name else name
    turns = ARCHITECTURES[tiny.family] in ("llama", "smollm3")
    if turns and rest.endswith(("q_proj.weight", "k_proj.weight")):
        return _turned(tiny.dim // 4)
    if rest == "mlp.shared_expert_gate.weight":
        return (lambda w: w[0]), (lambda w: w[None])
    if not tiny.is_hybrid and tiny.family != "gemma3_text":
        return _same, _same
    if rest.endswith("norm.weight") and "linear_attn" not in rest:
        return (lambda w: w + 1), (lambda w: w - 1)
    if rest == "linear_attn.conv1d.weight":
        there, back = _heads(tiny, tiny.head_dim, 4 * tiny.head_dim)
        return (lambda w: there(w[:, 0])), (lambda w: back(w)[:, None])
    if rest == "linear_attn.A_log":
        there, back = _heads(tiny, 1, 0)
        return (lambda w: there(-np.exp(w))), (lambda w: back(np.log(-w)))
    if rest == "linear_attn.out_proj.weight":
        there, back = _heads(tiny, tiny.head_dim, 0)
        return (lambda w: there(w.T).T), (lambda w: back(w.T).T)
    sizes = {
        "linear_attn.in_proj_qkv.weight": (tiny.head_dim, 4 * tiny.head_dim),
        "linear_attn.in_proj_z.weight": (tiny.head_dim, 0),
        "linear_attn.in_proj_b.weight": (1, 0),
        "linear_attn.in_proj_a.weight": (1, 0),
        "linear_attn.dt_bias": (1, 0),
    }
    return _heads(tiny, *sizes[rest]) if rest in sizes else (_same, _same)


def _same(w: Numbers) -> Numbers:
    return w


def _turned(head_dim: int):
    """Row i of a head's first half goes to 2 i, row i of its second half to 2 i + 1."""

    def there(w: Numbers) -> Numbers:
        heads = w.reshape(-1, 2, head_dim // 2, w.shape[-1])
        return heads.swapaxes(1, 2).reshape(w.shape)

    def back(w: Numbers) -> Numbers:
        heads = w.reshape(-1, head_dim // 2, 2, w.shape[-1])
        return heads.swapaxes(1, 2).reshape(w.shape)

    return there, back


def _heads(tiny: Tiny, dim: int, begin: int):
    """Value head g * r + j goes to place j * 2 + g, of rows from `begin` on."""
    r = tiny.value_heads // 2
    order = [g * r + j for j in range(r) for g in range(2)]
    rows = [begin + head * dim + i for head in order for i in range(dim)]
    places = np.array([*range(begin), *rows])
    return (lambda w: w[places]), (lambda w: w[np.argsort(places)])


def save_tokenizer(folder: Path, pattern: str) -> Tokenizer:
    """A small one such as the family has."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    return tokenizer


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, arch: str) -> None:
    """Write it as a converter does."""
    definition = json.loads(tokenizer.to_str())
    by_id = {i: token for token, i in tokenizer.get_vocab().items()}
    special = {token["id"]: token["special"] for token in definition["added_tokens"]}
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(VOCAB)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35" if arch.startswith("qwen35") else "qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [
            gguf.TokenType.UNUSED
            if i not in by_id
            else kinds[special[i]]
            if i in special
            else gguf.TokenType.NORMAL
            for i in range(VOCAB)
        ]
    )
    writer.add_token_merges([" ".join(pair) for pair in definition["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHATML)
