"""The fields of a model's config.json that the loader needs, from the metadata of a GGUF header.

Refuses keys that would change the computation and are not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from struct import error as StructError
from struct import unpack
from typing import Any

from luceasync.errors import ModelError
from luceasync.gguf.header import agreed
from luceasync.gguf.model import GgufModel

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
MTP_LAYERS = "nextn_predict_layers"
# Keys below the architecture's name that change the computation unless their value is zero.
NOT_COMPUTED = (
    *("expert_count", "attention.sliding_window", "attention.scale", "attention.max_alibi_bias"),
    *("attention.clamp_kqv", "attn_logit_softcapping", "final_logit_softcapping", "logit_scale"),
    *("embedding_scale", "residual_scale", "rope.scale_linear"),
)
# Tensors of numbers that RoPE frequencies are divided by: one, or two to choose from by the length
# of the text.
DIVISORS = "rope_freqs.weight"
NOT_CHOSEN = ("rope_factors_long.weight", "rope_factors_short.weight")
# Keys below rope.scaling for which only one value is supported.
FIXED_SCALING = {
    "attn_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
    "yarn_log_multiplier": 0.0,
}

Config = dict[str, Any]


class ArchitectureKeys:
    """The metadata of a model below its architecture's name."""

    def __init__(self, model: GgufModel) -> None:
        self.model = model
        self.metadata = model.metadata
        self.prefix = model.architecture
        self.num_layers = self._num_layers()

    def name(self, key: str) -> str:
        """The full name of a key."""
        return f"{self.prefix}.{key}"

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer, 0 or more."""
        return self.metadata.integer(self.name(key), default)

    def layered(self, key: str, layers: Callable[[int], bool] = bool) -> int:
        """A positive integer, given once or per layer; all values that `layers` accepts must be
        equal.
        """
        name = self.name(key)
        number = agreed(self.metadata, name, self.num_layers, layers)
        if number is None:
            raise ModelError(f"{name} is 0 in all layers")
        return number

    def of_layers(self, key: str) -> list[int]:
        """A positive integer for each layer, which a file may give once for all layers."""
        name = self.name(key)
        if not self.metadata.is_array(name):
            return [self.layered(key)] * self.num_layers
        numbers = [*self.metadata.integers(name)[: self.num_layers]]
        if len(numbers) < self.num_layers or min(numbers) < 1:
            raise ModelError(f"{name}: expected {self.num_layers} positive integers")
        return numbers

    def _num_layers(self) -> int:
        """The number of layers, without draft layers. It cannot exceed the number of tensors."""
        blocks = self.integer("block_count")
        drafting = self.integer(MTP_LAYERS, 0)
        layers, tensors = blocks - drafting, len(self.model.tensors)
        if not 0 < layers <= tensors:
            raise ModelError(
                f"{self.name('block_count')} = {blocks} with {self.name(MTP_LAYERS)} = {drafting}: "
                f"expected 1 to {tensors} layers, as there are {tensors} tensors"
            )
        return layers


EXPERTS, SIZE = "expert_count", "feed_forward_length"


def common_config(
    keys: ArchitectureKeys,
    computed: Sequence[str] = (),
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
) -> Config:
    """The fields that all architectures have. `computed` are keys of NOT_COMPUTED or SIZE that this
    architecture reads itself. `num_heads` and `num_kv_heads` are passed if layers differ in them.
    Raises ModelError.
    """
    _refuse_what_is_not_computed(keys, computed)
    metadata, name, model = keys.metadata, keys.name, keys.model
    head_dim = keys.integer("attention.key_length", 0)
    num_heads = num_heads or keys.layered("attention.head_count")
    hidden = keys.integer("embedding_length")
    if not head_dim and hidden % num_heads:
        raise ModelError(
            f"{name('embedding_length')} = {hidden} is not a multiple of "
            f"{name('attention.head_count')} = {num_heads}, and there is no key_length"
        )
    head_dim = head_dim or hidden // num_heads
    if (value_dim := keys.integer("attention.value_length", head_dim)) != head_dim:
        raise ModelError(
            f"{name('attention.value_length')} = {value_dim}: expected {head_dim}, as key_length"
        )
    rotated = keys.integer("rope.dimension_count", head_dim)
    theta = metadata.real(name("rope.freq_base"), 10000.0)
    if num_kv_heads is None and name("attention.head_count_kv") in metadata:
        num_kv_heads = keys.layered("attention.head_count_kv")
    return {
        "hidden_act": "silu",
        "hidden_size": hidden,
        "vocab_size": _vocab_size(model),
        "num_hidden_layers": keys.num_layers,
        **({} if SIZE in computed else _dense_size(keys, is_needed=EXPERTS not in computed)),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads or num_heads,
        "head_dim": head_dim,
        "rms_norm_eps": metadata.real(name("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(keys, rotated, computed) | {"rope_theta": theta},
        "partial_rotary_factor": rotated / head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "tie_word_embeddings": HEAD not in model.tensors,
        "eos_token_id": metadata.integer("tokenizer.ggml.eos_token_id"),
    }


def _vocab_size(model: GgufModel) -> int:
    """The number of rows of the embedding, which may exceed the number of tokens."""
    found = model.tensors.get(EMBEDDING)
    if found is None:
        raise ModelError(f"there is no tensor {EMBEDDING!r}")
    return found[1].shape[0]


SCALE = "expert_weights_scale"


def experts_config(keys: ArchitectureKeys, computed: Sequence[str] = ()) -> Config:
    """The fields of routed experts. Raises ModelError."""
    if SCALE not in computed and (value := keys.metadata.real(keys.name(SCALE), 1.0)) not in (0, 1):
        raise ModelError(f"{keys.name(SCALE)} = {value:g} is not supported; expected 1")
    return {
        "num_experts": keys.integer(EXPERTS),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.layered("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _dense_size(keys: ArchitectureKeys, *, is_needed: bool) -> Config:
    """The size of dense feed-forward networks, which models with experts may omit."""
    is_given = keys.name(SIZE) in keys.metadata
    return {"intermediate_size": keys.layered(SIZE)} if is_given or is_needed else {}


def _refuse_what_is_not_computed(keys: ArchitectureKeys, computed: Sequence[str]) -> None:
    metadata = keys.metadata
    for key in (keys.name(key) for key in NOT_COMPUTED if key not in computed):
        if key in metadata and (value := metadata.real(key)):
            raise ModelError(f"{key} = {value:g} is not supported")
    for tensor in NOT_CHOSEN:
        if tensor in keys.model.tensors:
            raise ModelError(f"the tensor {tensor!r} scales rope, which is not supported")


def _rope(keys: ArchitectureKeys, rotated: int, computed: Sequence[str]) -> Config:
    """The scaling of RoPE in the form of a config. Raises ModelError."""
    metadata, name = keys.metadata, keys.name("rope.scaling.type")
    factor = metadata.real(keys.name("rope.scaling.factor"), 1.0) or 1.0
    unnamed = "none" if factor == 1 else "linear"
    kind = metadata.word(name) if name in metadata else unnamed
    for key, only in FIXED_SCALING.items():
        if key in computed:
            continue
        key = keys.name(f"rope.scaling.{key}")
        if (value := metadata.real(key, only)) != only:
            raise ModelError(f"{key} = {value:g} is not supported; expected {only:g}")
    if DIVISORS in keys.model.tensors:
        if kind != "none":
            raise ModelError(f"{name} = {kind!r} beside the tensor {DIVISORS!r} is not supported")
        return {"rope_type": "divided", "divisors": _divisors(keys.model, rotated // 2)}
    if kind == "none" and factor == 1:
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise ModelError(
            f"{name} = {kind!r} with factor {factor:g} is not supported; expected linear or yarn"
        )
    scaling: Config = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = keys.name("rope.scaling.original_context_length")
        if original in metadata:
            scaling["original_max_position_embeddings"] = metadata.integer(original)
        for beta in ("beta_fast", "beta_slow"):
            if (key := keys.name(f"rope.scaling.yarn_{beta}")) in metadata:
                scaling[beta] = metadata.real(key)
    return scaling


def _divisors(model: GgufModel, num: int) -> list[float]:
    """The numbers in the tensor that divides RoPE frequencies. Raises ModelError."""
    path, tensor = model.tensors[DIVISORS]
    if tensor.shape != (num,) or tensor.type.name != "F32":
        raise ModelError(
            f"{DIVISORS!r} has shape {tensor.shape} and is stored as {tensor.type.name}; expected "
            f"{(num,)} as F32"
        )
    try:
        with path.open("rb") as file:
            file.seek(tensor.begin)
            numbers = unpack(f"<{num}f", file.read(tensor.num_bytes))
    except (OSError, StructError) as error:
        raise ModelError(f"{DIVISORS!r} cannot be read: {error}") from None
    if not all(isfinite(number) and number > 0 for number in numbers):
        raise ModelError(f"{DIVISORS!r} has a number that is not positive and finite")
    return list(numbers)
