"""Routed experts: of many small SwiGLUs a router chooses a few for each row; all rows may share one
more (Qwen3-MoE, Qwen3.5-MoE, Laguna).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from luceasync.models.encodings import FloatMatrix
from luceasync.models.feed_forward.feed_forward import Shape
from luceasync.models.weights import Router, Routing

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.layer_reader import LayerReader
    from luceasync.models.ops import Norm, RoutedExperts
    from luceasync.models.weights import Weight

NORM = "post_attention_layernorm.weight"
ROUTER, BIAS = "mlp.gate.weight", "mlp.experts.e_score_correction_bias"
SHARED_GATE = "mlp.shared_expert_gate.weight"


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A FeedForward of `num_experts` experts with `inner_size` numbers in the middle, and a shared
    one of `shared_size`, 0 for none.

    `has_shared_gate`: a number of each row weighs the shared expert. `has_bias`: the router's
    scores have a bias, for the choice alone.
    """

    num_experts: int
    inner_size: int
    routing: Routing
    shared_size: int = 0
    has_shared_gate: bool = False
    has_bias: bool = False

    @property
    def width(self) -> int:
        return 2 * (self.routing.num_chosen * self.inner_size + self.shared_size)

    def tensors(self, hidden_size: int) -> dict[str, Shape]:
        """See FeedForward."""
        found: dict[str, Shape] = {
            NORM: (hidden_size,),
            ROUTER: FloatMatrix((self.num_experts, hidden_size)),
        }
        found |= self.expert_tensors(hidden_size)
        if self.has_bias:
            found[BIAS] = (self.num_experts,)
        if self.shared_size:
            inner, outer = (self.shared_size, hidden_size), (hidden_size, self.shared_size)
            found |= {_shared("gate"): inner, _shared("up"): inner, _shared("down"): outer}
        if self.has_shared_gate:
            found[SHARED_GATE] = FloatMatrix((1, hidden_size))
        return found

    @property
    def num_chosen(self) -> int:
        return self.routing.num_chosen

    def expert_tensors(self, hidden_size: int) -> dict[str, Shape]:
        """See RoutedFeedForward."""
        inner, outer = (self.inner_size, hidden_size), (hidden_size, self.inner_size)
        kinds = (("gate", inner), ("up", inner), ("down", outer))
        return {name: shape for kind, shape in kinds for name in self._names(kind)}

    def load(self, reader: LayerReader) -> ExpertsLayer:
        """See FeedForward."""
        shared = gate = None
        if self.shared_size:
            both = reader.matrix(_shared("gate"), _shared("up"))
            shared = reader.ops.gated(both, reader.matrix(_shared("down")))
        if self.has_shared_gate:
            gate = reader.float_matrix(SHARED_GATE)
        norm = reader.norm(NORM)
        router = Router(
            self.routing,
            norm,
            reader.float_matrix(ROUTER),
            reader.vector(BIAS) if self.has_bias else None,
            gate,
        )
        gate_up = reader.experts(self._names("gate"), self._names("up"))
        down = reader.experts(self._names("down"))
        return ExpertsLayer(norm, reader.ops.routed(router, gate_up, down, shared))

    def _names(self, kind: str) -> list[str]:
        return [f"mlp.experts.{i}.{kind}_proj.weight" for i in range(self.num_experts)]


def _shared(kind: str) -> str:
    return f"mlp.shared_expert.{kind}_proj.weight"


@dataclass(frozen=True, slots=True)
class ExpertsLayer:
    """A FeedForwardLayer."""

    norm: Norm
    experts: RoutedExperts

    @property
    def num_bytes(self) -> int:
        return self.norm.num_bytes + self.experts.num_bytes

    def link(self, mixed: Weight | None, following: Norm | None) -> None:
        """See FeedForwardLayer: its norms have no part in products."""

    def forward(self, x: Tensor) -> Tensor:
        """See FeedForwardLayer."""
        return self.experts.add_to(x.reshape(-1, x.shape[-1])).view(x.shape)
