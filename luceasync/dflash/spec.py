"""What a DFlash drafter is. Pure: no torch, no weights, no devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from luceasync.errors import ConfigError
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.spec import Shape

RING_STEP = 64  # capacities are multiples of it
MASK_EMBEDDING = "mask_embedding"  # a tensor that may stand for the mask token's embedding


@dataclass(frozen=True, slots=True)
class DraftLayerSpec:
    """What a row of the block sees: `window` None is all context, else positions less than
    `window` away; `is_causal` hides the rows of the block behind it.
    """

    window: int | None
    is_causal: bool


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """Everything about a drafter except its weights.

    `block` counts the rows of a proposal, its known first token included; `trained_block` is what
    it was trained with. `taps`: target layers whose output it reads, in the order of its input.
    `ctx_max_tokens` limits the context that any layer sees.
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

    def weight_bytes(self, element_bytes: int) -> int:
        """Bytes of the weights as the network holds them: norms in float32, those of heads once for
        each head, and the key and value projections of all layers once more, stacked.
        """
        attention = self.attention
        once = [shape for name, shape in self.shapes.items() if name != MASK_EMBEDDING]
        num_bytes = sum(prod(shape) * (element_bytes if len(shape) == 2 else 4) for shape in once)
        # q_norm and k_norm are in `once` already; the keys of the context have k_norm of their own.
        num_norms = (attention.num_heads - 1) + (attention.num_kv_heads - 1) + 1
        stacked = 2 * attention.kv_dim * self.hidden_size * element_bytes
        return num_bytes + self.num_layers * (num_norms * attention.head_dim * 4 + stacked)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Public names of all tensors and their shapes; only `mask_embedding` may be absent."""
        hidden = self.hidden_size
        layers = {
            f"layers.{layer}.{name}": shape
            for layer in range(self.num_layers)
            for name, shape in _layer_shapes(self).items()
        }
        return layers | {
            "fc.weight": (hidden, self.feature_size),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
            MASK_EMBEDDING: (hidden,),
        }

    @property
    def num_parameters(self) -> int:
        return sum(prod(shape) for name, shape in self.shapes.items() if name != MASK_EMBEDDING)


def _layer_shapes(spec: DraftSpec) -> dict[str, Shape]:
    hidden, inner, attention = spec.hidden_size, spec.intermediate_size, spec.attention
    return {
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


def default_taps(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Target layers from the second to the last but two, evenly: as many as the drafter has layers
    (the published drafters' rule).
    """
    if num_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_layers))


def adjusted(
    spec: DraftSpec,
    *,
    block: int | None = None,
    swa_window_tokens: int | None = None,
    ctx_max_tokens: int | None = None,
) -> DraftSpec:
    """The drafter as the user wants it; None leaves what it was trained with. Raises ConfigError
    naming the flag.
    """
    if block is not None:
        if not 2 <= block <= spec.trained_block:
            raise ConfigError(
                f"--draft-block {block}: this drafter proposes blocks of 2 to {spec.trained_block}"
            )
        spec = replace(spec, block=block)
    if swa_window_tokens is not None:
        if all(layer.window is None for layer in spec.layers):
            raise ConfigError(
                f"--draft-swa-window {swa_window_tokens}: this drafter has no sliding layers"
            )
        layers = (
            layer if layer.window is None else replace(layer, window=swa_window_tokens)
            for layer in spec.layers
        )
        spec = replace(spec, layers=tuple(layers))
    if ctx_max_tokens is not None:
        spec = replace(spec, ctx_max_tokens=ctx_max_tokens)
    return spec
