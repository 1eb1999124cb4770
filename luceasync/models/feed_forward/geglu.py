"""GeGLU (Shazeer, "GLU Variants Improve Transformer", 2020) between two norms, as Gemma has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from luceasync.models.feed_forward.feed_forward import Shape

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.layer_reader import LayerReader
    from luceasync.models.ops import Norm
    from luceasync.models.weights import Weight

SCALE = "layer_scalar"


@dataclass(frozen=True, slots=True)
class GegluSpec:
    """A FeedForward of `inner_size` numbers in the middle, whose output is normed before it is
    added to the residual stream. `scales_layer`: a number multiplies what the layer gives.
    """

    inner_size: int
    scales_layer: bool = False

    @property
    def width(self) -> int:
        return 3 * self.inner_size

    def tensors(self, hidden_size: int) -> dict[str, Shape]:
        """See FeedForward."""
        return {
            "pre_feedforward_layernorm.weight": (hidden_size,),
            "mlp.gate_proj.weight": (self.inner_size, hidden_size),
            "mlp.up_proj.weight": (self.inner_size, hidden_size),
            "mlp.down_proj.weight": (hidden_size, self.inner_size),
            "post_feedforward_layernorm.weight": (hidden_size,),
            **({SCALE: (1,)} if self.scales_layer else {}),
        }

    def load(self, reader: LayerReader) -> GegluLayer:
        """See FeedForward."""
        return GegluLayer(
            norm=reader.norm("pre_feedforward_layernorm.weight"),
            gate_up=reader.matrix("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            down=reader.matrix("mlp.down_proj.weight"),
            output_norm=reader.norm("post_feedforward_layernorm.weight"),
            scale=reader.vector(SCALE) if self.scales_layer else None,
        )


@dataclass(frozen=True, slots=True)
class GegluLayer:
    """A FeedForwardLayer. gate_up: rows of the gate, then of the values that it multiplies. scale:
    float32 [1].
    """

    norm: Norm
    gate_up: Weight
    down: Weight
    output_norm: Norm
    scale: Tensor | None

    @property
    def num_bytes(self) -> int:
        parts = (self.norm, self.gate_up, self.down, self.output_norm)
        scale_bytes = 0 if self.scale is None else self.scale.nbytes
        return sum(part.num_bytes for part in parts) + scale_bytes

    def forward(self, x: Tensor) -> Tensor:
        """See FeedForwardLayer."""
        x = x + self.output_norm(self.down.linear(geglu(self.gate_up.linear(x, self.norm))))
        return x if self.scale is None else x * self.scale.to(x.dtype)


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, the halves of `gate_up` in this order: [..., 2 * inner] -> [..., inner]."""
    from torch.nn.functional import gelu

    gate, up = gate_up.chunk(2, -1)
    return gelu(gate, approximate="tanh") * up
