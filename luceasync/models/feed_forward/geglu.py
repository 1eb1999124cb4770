"""GeGLU (Shazeer, "GLU Variants Improve Transformer", 2020) between two norms, as Gemma has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from luceasync.models.feed_forward.feed_forward import Shape

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.layer_reader import LayerReader
    from luceasync.models.ops import Norm
    from luceasync.models.pass_rows import Handed
    from luceasync.models.weights import Weight

SCALE = "layer_scalar"
INPUT_GATE, INPUT_PROJECTION = "per_layer_input_gate.weight", "per_layer_projection.weight"
INPUT_NORM = "post_per_layer_input_norm.weight"


@dataclass(frozen=True, slots=True)
class GegluSpec:
    """A FeedForward of `inner_size` numbers in the middle, whose output is normed before it is
    added to the residual stream. `scales_layer`: a number multiplies what the layer gives.
    `input_size`: numbers of an input of its own, which is added after the network; 0: none.
    """

    inner_size: int
    scales_layer: bool = False
    input_size: int = 0

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
            **input_tensors(self.input_size, hidden_size),
        }

    def load(self, reader: LayerReader) -> GegluLayer:
        """See FeedForward."""
        return GegluLayer(
            norm=reader.norm("pre_feedforward_layernorm.weight"),
            gate_up=reader.matrix("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            down=reader.matrix("mlp.down_proj.weight"),
            output_norm=reader.norm("post_feedforward_layernorm.weight"),
            scale=reader.vector(SCALE) if self.scales_layer else None,
            own_input=load_input(reader) if self.input_size else None,
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
    own_input: OwnInput | None = None

    @property
    def num_bytes(self) -> int:
        parts = (self.norm, self.gate_up, self.down, self.output_norm)
        scale_bytes = 0 if self.scale is None else self.scale.nbytes
        input_bytes = 0 if self.own_input is None else self.own_input.num_bytes
        return sum(part.num_bytes for part in parts) + scale_bytes + input_bytes

    def link(self, mixed: Weight | None, following: Norm | None) -> None:
        """See FeedForwardLayer: its norms have no part in products."""

    def forward(self, x: Tensor) -> Tensor:
        """See FeedForwardLayer."""
        inner = self.output_norm.ops.geglu(self.gate_up.linear(x, self.norm))
        added = self.down.linear(inner)
        if self.own_input is None:
            return self.output_norm.add_to(x, added, self.scale)
        return self.own_input.add_to(self.output_norm.add_to(x, added), self.scale)


def input_tensors(input_size: int, hidden_size: int) -> dict[str, Shape]:
    """Tensors of a layer that has an input of its own; none if it has 0 numbers."""
    if not input_size:
        return {}
    return {
        INPUT_GATE: (input_size, hidden_size),
        INPUT_PROJECTION: (hidden_size, input_size),
        INPUT_NORM: (hidden_size,),
    }


def load_input(reader: LayerReader) -> OwnInput:
    """What adds a layer's own input."""
    gate, projection = reader.matrix(INPUT_GATE), reader.matrix(INPUT_PROJECTION)
    return OwnInput(reader.layer, reader.handed, gate, projection, reader.norm(INPUT_NORM))


@dataclass(frozen=True, slots=True)
class OwnInput:
    """Adds the input of layer `layer`, weighed by a gate of each row, to the residual stream."""

    layer: int
    handed: Handed
    gate: Weight
    projection: Weight
    norm: Norm

    @property
    def num_bytes(self) -> int:
        return self.gate.num_bytes + self.projection.num_bytes + self.norm.num_bytes

    def add_to(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """x: [entries, rows, hidden]. The sum is multiplied by `scale`, float32 [1]."""
        from torch.nn.functional import gelu

        assert self.handed.inputs is not None, "the ends hand on inputs before the first layer"
        weighed = gelu(self.gate.linear(x), approximate="tanh")
        weighed = weighed * self.handed.inputs[..., self.layer, :]
        return self.norm.add_to(x, self.projection.linear(weighed), scale)
