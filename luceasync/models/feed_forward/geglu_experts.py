"""GeGLU and routed experts side by side, each between norms of its own (Gemma 4 26B-A4B)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from luceasync.models.encodings import FloatMatrix
from luceasync.models.feed_forward.feed_forward import Shape
from luceasync.models.feed_forward.geglu import SCALE, input_tensors, load_input
from luceasync.models.weights import Choice, Routing

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.feed_forward.geglu import OwnInput
    from luceasync.models.layer_reader import LayerReader
    from luceasync.models.ops import ExpertGroup, Norm, Ops
    from luceasync.models.weights import Weight

# Before the network and the experts, after each, and after their sum.
NORM, NORM_2 = "pre_feedforward_layernorm.weight", "pre_feedforward_layernorm_2.weight"
OUTPUT_NORMS = tuple(f"post_feedforward_layernorm{end}.weight" for end in ("_1", "_2", ""))
KINDS = ("gate", "up", "down")  # of an expert's matrices
ROUTER, ROUTER_NORM, EXPERT_SCALES = "router.proj.weight", "router.scale", "router.per_expert_scale"


@dataclass(frozen=True, slots=True)
class GegluExpertsSpec:
    """A FeedForward of a network with `inner_size` numbers in the middle beside `num_experts`
    experts with `expert_size`. `input_size`: see GegluSpec.
    """

    inner_size: int
    num_experts: int
    expert_size: int
    routing: Routing
    input_size: int = 0

    @property
    def width(self) -> int:
        return 3 * (self.inner_size + self.routing.num_chosen * self.expert_size)

    def tensors(self, hidden_size: int) -> dict[str, Shape]:
        """See FeedForward."""
        return {
            **dict.fromkeys((NORM, NORM_2, *OUTPUT_NORMS, ROUTER_NORM), (hidden_size,)),
            "mlp.gate_proj.weight": (self.inner_size, hidden_size),
            "mlp.up_proj.weight": (self.inner_size, hidden_size),
            "mlp.down_proj.weight": (hidden_size, self.inner_size),
            ROUTER: FloatMatrix((self.num_experts, hidden_size)),
            EXPERT_SCALES: (self.num_experts,),
            **self.expert_tensors(hidden_size),
            SCALE: (1,),
            **input_tensors(self.input_size, hidden_size),
        }

    @property
    def num_chosen(self) -> int:
        return self.routing.num_chosen

    def expert_tensors(self, hidden_size: int) -> dict[str, Shape]:
        """See RoutedFeedForward."""
        inner, outer = (self.expert_size, hidden_size), (hidden_size, self.expert_size)
        kinds = zip(KINDS, (inner, inner, outer), strict=True)
        return {name: shape for kind, shape in kinds for name in self._names(kind)}

    def load(self, reader: LayerReader) -> GegluExpertsLayer:
        """See FeedForward."""
        from luceasync.models.ops import Norm

        ops, weight = reader.ops, reader.vector(ROUTER_NORM)
        router = GegluRouter(
            ops,
            self.routing,
            # The rows' norm is divided by the root of their size once more.
            Norm(ops, weight * weight.shape[0] ** -0.5, reader.norm_eps),
            reader.float_matrix(ROUTER),
            reader.vector(EXPERT_SCALES),
        )
        return GegluExpertsLayer(
            norms=(reader.norm(NORM), reader.norm(NORM_2)),
            gate_up=reader.matrix("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            down=reader.matrix("mlp.down_proj.weight"),
            router=router,
            # Apart: products of gates and ups together end with another activation.
            experts=ops.grouped(*(reader.experts(self._names(kind)) for kind in KINDS)),
            output_norms=tuple(reader.norm(name) for name in OUTPUT_NORMS),
            scale=reader.vector(SCALE),
            own_input=load_input(reader) if self.input_size else None,
        )

    def _names(self, kind: str) -> list[str]:
        return [f"experts.{i}.{kind}_proj.weight" for i in range(self.num_experts)]


@dataclass(frozen=True, slots=True)
class GegluRouter:
    """Chooses experts of rows, which it norms for itself. expert_scales: float32 [experts], by
    which the weights of chosen experts are multiplied.
    """

    ops: Ops
    routing: Routing
    norm: Norm
    weight: Weight
    expert_scales: Tensor

    @property
    def num_bytes(self) -> int:
        return self.norm.num_bytes + self.weight.num_bytes + self.expert_scales.nbytes

    def choose(self, x: Tensor, experts: ExpertGroup) -> Choice:
        """x: [rows, hidden]. Indices are kept within bounds: where kernels are only compiled they
        are any numbers.
        """
        import torch

        choice = experts.choose(self.weight.linear(self.norm(x).float()), self.routing)
        shape, num_places = choice.places.shape, choice.places.numel()
        bounds = choice.bounds[1:].contiguous()
        chosen = torch.bucketize(choice.places.flatten(), bounds, right=True)
        scales = self.expert_scales[chosen.clamp_(0, len(self.expert_scales) - 1)].view(shape)
        rows = choice.rows[:num_places].clamp(0, len(x) - 1)
        return replace(choice, weights=choice.weights * scales, rows=rows)


@dataclass(frozen=True, slots=True)
class GegluExpertsLayer:
    """A FeedForwardLayer. scale: float32 [1], by which what the layer gives is multiplied."""

    norms: tuple[Norm, Norm]
    gate_up: Weight
    down: Weight
    router: GegluRouter
    experts: ExpertGroup
    output_norms: tuple[Norm, ...]
    scale: Tensor
    own_input: OwnInput | None = None

    @property
    def num_bytes(self) -> int:
        network = self.gate_up.num_bytes + self.down.num_bytes + self.router.num_bytes
        norms = sum(norm.num_bytes for norm in (*self.norms, *self.output_norms))
        input_bytes = 0 if self.own_input is None else self.own_input.num_bytes
        return self.experts.num_bytes + network + norms + input_bytes + self.scale.nbytes

    def link(self, mixed: Weight | None, following: Norm | None) -> None:
        """See FeedForwardLayer: its norms have no part in products."""

    def forward(self, x: Tensor) -> Tensor:
        """See FeedForwardLayer."""
        rows = x.reshape(-1, x.shape[-1])
        norm, expert_norm, norm_of_sum = self.output_norms
        inner = self.router.ops.geglu(self.gate_up.linear(rows, self.norms[0]))
        both = expert_norm.add_to(norm(self.down.linear(inner)), self._experts(rows))
        if self.own_input is None:
            return norm_of_sum.add_to(rows, both, self.scale).view(x.shape)
        return self.own_input.add_to(norm_of_sum.add_to(rows, both).view(x.shape), self.scale)

    def _experts(self, rows: Tensor) -> Tensor:
        import torch

        choice = self.router.choose(rows, self.experts)
        gates, ups, downs = self.experts.weights(choice)
        gathered = self.norms[1](rows).index_select(0, choice.rows)
        pair = (weights.linear(gathered, choice) for weights in (gates, ups))
        ops = self.router.ops
        results = downs.linear(ops.geglu(torch.cat([*pair], -1)), choice)
        return ops.add_weighted(results, choice, torch.zeros_like(rows))
