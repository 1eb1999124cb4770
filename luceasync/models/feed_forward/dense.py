"""SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020): every row meets every weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from luceasync.models.feed_forward.feed_forward import Shape

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.layer_reader import LayerReader
    from luceasync.models.ops import Norm
    from luceasync.models.weights import SwiGLU, Weight


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A FeedForward of `inner_size` numbers in the middle."""

    inner_size: int

    @property
    def width(self) -> int:
        return 2 * self.inner_size

    def tensors(self, hidden_size: int) -> dict[str, Shape]:
        """See FeedForward."""
        return {
            "post_attention_layernorm.weight": (hidden_size,),
            "mlp.gate_proj.weight": (self.inner_size, hidden_size),
            "mlp.up_proj.weight": (self.inner_size, hidden_size),
            "mlp.down_proj.weight": (hidden_size, self.inner_size),
        }

    def load(self, reader: LayerReader) -> DenseLayer:
        """See FeedForward."""
        norm = reader.norm("post_attention_layernorm.weight")
        gate_up = reader.matrix("mlp.gate_proj.weight", "mlp.up_proj.weight")
        down = reader.matrix("mlp.down_proj.weight")
        return DenseLayer(norm, reader.ops.gated(gate_up, down))


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A FeedForwardLayer."""

    norm: Norm
    network: SwiGLU

    @property
    def num_bytes(self) -> int:
        return self.norm.num_bytes + self.network.num_bytes

    def link(self, mixed: Weight | None, following: Norm | None) -> None:
        """See FeedForwardLayer."""
        if mixed is not None:
            self.norm.follow(mixed)
        if following is not None:
            following.follow(self.network.down)

    def forward(self, x: Tensor) -> Tensor:
        """See FeedForwardLayer."""
        return self.network.add_to(x, self.norm)
