"""What a drafter is, except its weights: its layers, and names and shapes of its tensors.

Pure: no torch, no devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal

from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.spec import ModelSpec, Shape

RING_STEP = 64  # capacities are multiples of it
STACKED = ("self_attn.k_proj.weight", "self_attn.v_proj.weight")
MASK_EMBEDDING = "mask_embedding"  # a tensor that may replace the mask token's embedding

MatrixBytes = Callable[[str, Shape], int]  # of a matrix on a device, by its name


@dataclass(frozen=True, slots=True)
class DraftLayerSpec:
    """What a row of the block attends to: all context, or positions less than `window` away;
    `is_causal` hides later rows of the block.
    """

    window: int | None
    is_causal: bool


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """Convolutions over a block's rows, before and after each half of a layer: a row is mixed with
    the `num_taps - 1` rows before it, by kernels of which `group_size` columns share a part.
    """

    num_taps: int
    group_size: int


@dataclass(frozen=True, slots=True)
class SelectorSpec:
    """How tokens are chosen: of the `num_candidates` best of the head at each slot, whose logits x
    become cap tanh(scale x / cap), by what follows what: `rank` numbers for each of `num_vocab`
    tokens.
    """

    num_vocab: int
    rank: int
    num_candidates: int
    scale: float = 1.0
    cap: float | None = None


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """Everything about a drafter except its weights.

    `block` counts the rows of a proposal, its known first token included; `trained_block` is what
    it was trained with. `taps`: target layers whose output it reads, in the order of its input.
    `ctx_max_tokens` limits the context that any layer sees. `gate`: a layer's attention is
    multiplied by softplus of g_proj's product, of which each head, or each "element", has a number.
    `norms_context`: each tap's rows have a norm, and context goes through each layer's own.
    `convolution`, `selector`: of DFlash2; `embedding_scale` multiplies rows of the target's
    embedding.
    """

    hidden_size: int
    intermediate_size: int
    norm_eps: float
    attention: AttentionSpec
    layers: tuple[DraftLayerSpec, ...]
    taps: tuple[int, ...]
    mask_token: int
    block: int
    trained_block: int
    ctx_max_tokens: int | None = None
    gate: Literal["", "head", "element"] = ""
    norms_context: bool = False
    convolution: ConvolutionSpec | None = None
    selector: SelectorSpec | None = None
    embedding_scale: float = 1.0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def feature_size(self) -> int:
        """Numbers in one row of features: the outputs of all tapped layers side by side."""
        return len(self.taps) * self.hidden_size

    def capacity(self, layer: int, max_ctx_tokens: int) -> int:
        """Rows of context that `layer` keeps of a lane: what its window, `ctx_max_tokens` and the
        lane allow, rounded up.
        """
        window = self.layers[layer].window
        limits = (max_ctx_tokens, self.ctx_max_tokens, window and window - 1)
        rows = min(limit for limit in limits if limit is not None)
        return -(-max(rows, 1) // RING_STEP) * RING_STEP

    def weight_bytes(self, element_bytes: int, matrix_bytes: MatrixBytes | None = None) -> int:
        """Bytes of the weights in the network: norms in float32, head norms repeated for each head,
        and a second, stacked copy of the key and value projections of all layers. `matrix_bytes`:
        of a matrix, None: plain numbers.
        """
        attention = self.attention
        once = {name: shape for name, shape in self.shapes.items() if name != MASK_EMBEDDING}

        def bytes_of(name: str) -> int:
            shape = once[name]
            if len(shape) == 2 and matrix_bytes is not None:
                return matrix_bytes(name, shape)
            return prod(shape) * (4 if len(shape) == 1 else element_bytes)

        num_bytes = sum(map(bytes_of, once))
        num_bytes += sum(bytes_of(name) for name in once if name.endswith(STACKED))
        # q_norm and k_norm are in `once` already; keys of the context have a k_norm of their own.
        num_norms = (attention.num_heads - 1) + (attention.num_kv_heads - 1) + 1
        num_bytes += self.hidden_size * 4 if self.norms_context else 0  # a norm without a weight
        return num_bytes + self.num_layers * num_norms * attention.head_dim * 4

    def selector_bytes(self, element_bytes: int, matrix_bytes: MatrixBytes | None = None) -> int:
        """Bytes of what chooses tokens."""
        if matrix_bytes is not None:
            return sum(matrix_bytes(name, shape) for name, shape in self.selector_shapes.items())
        return sum(map(prod, self.selector_shapes.values())) * element_bytes

    @property
    def selector_shapes(self) -> dict[str, Shape]:
        """Published names and shapes of what chooses tokens."""
        if (selector := self.selector) is None:
            return {}
        return {
            f"{SELECTOR}hidden_projection.weight": (selector.rank, self.hidden_size),
            f"{SELECTOR}predecessor_codebook": (selector.num_vocab, selector.rank),
            f"{SELECTOR}successor_codebook": (selector.num_vocab, selector.rank),
        }

    @property
    def shapes(self) -> dict[str, Shape]:
        """Published names and shapes of the network's tensors; `mask_embedding` is optional."""
        hidden = self.hidden_size
        layers = {
            f"layers.{layer}.{name}": shape
            for layer in range(self.num_layers)
            for name, shape in _layer_shapes(self).items()
        }
        norms = [aux_norm(tap) for tap in range(len(self.taps) if self.norms_context else 0)]
        return layers | {
            **dict.fromkeys(norms, (hidden,)),
            "fc.weight": (hidden, self.feature_size),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
            MASK_EMBEDDING: (hidden,),
        }

    @property
    def num_parameters(self) -> int:
        return sum(prod(shape) for name, shape in self.shapes.items() if name != MASK_EMBEDDING)


def convolution_names(layer: int, half: Literal["attention", "mlp"]) -> tuple[str, str]:
    """The names of the fixed kernels of a half of a layer, and of what makes a row's own."""
    prefix = f"layers.{layer}.{half}_conv."
    return f"{prefix}base_kernel", f"{prefix}kernel_projection.weight"


def aux_norm(tap: int) -> str:
    """The name of the norm of a tap's rows."""
    return f"aux_hidden_norms.{tap}.weight"


# Matrices that some checkpoints store as one, in this order.
FUSED = {
    "self_attn.qkv_proj.weight": [f"self_attn.{name}_proj.weight" for name in "qkv"],
    "mlp.gate_up_proj.weight": [f"mlp.{name}_proj.weight" for name in ("gate", "up")],
}
GATE = "self_attn.g_proj.weight"
SELECTOR = "candidate_selector."


def _layer_shapes(spec: DraftSpec) -> dict[str, Shape]:
    hidden, inner, attention = spec.hidden_size, spec.intermediate_size, spec.attention
    gate_rows = {"": 0, "head": attention.num_heads, "element": attention.query_dim}[spec.gate]
    return {
        **({GATE: (gate_rows, hidden)} if spec.gate else {}),
        **_convolution_shapes(spec),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (attention.query_dim, hidden),
        "self_attn.k_proj.weight": (attention.kv_dim, hidden),
        "self_attn.v_proj.weight": (attention.kv_dim, hidden),
        "self_attn.o_proj.weight": (hidden, attention.query_dim),
        "self_attn.q_norm.weight": (attention.head_dim,),
        "self_attn.k_norm.weight": (attention.head_dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def _convolution_shapes(spec: DraftSpec) -> dict[str, Shape]:
    if (mixing := spec.convolution) is None:
        return {}
    num_rows = 2 * mixing.num_taps * spec.hidden_size // mixing.group_size
    shapes = ((2, mixing.num_taps, spec.hidden_size), (num_rows, spec.hidden_size))
    halves: tuple[Literal["attention", "mlp"], ...] = ("attention", "mlp")
    names = (convolution_names(0, half) for half in halves)
    return {
        name.removeprefix("layers.0."): shape
        for pair in names
        for name, shape in zip(pair, shapes, strict=True)
    }


def spec_of_layer(target: ModelSpec, window_tokens: int) -> DraftSpec:
    """The layer of the head that a model brings to draft with, as a drafter of rows that come one
    after the other and see so many tokens. It reads what the model's last layer has left.
    """
    assert target.mtp is not None and isinstance(target.mtp.mixer, AttentionSpec)
    return DraftSpec(
        hidden_size=target.hidden_size,
        intermediate_size=0,
        norm_eps=target.norm_eps,
        attention=target.mtp.mixer,
        layers=(DraftLayerSpec(window_tokens, is_causal=True),),
        taps=(target.num_layers - 1,),
        mask_token=0,
        block=1,
        trained_block=1,
    )
