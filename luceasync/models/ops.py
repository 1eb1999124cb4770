"""The operations that layers are made of, and their implementations in torch, for any device.

They are split so that fusing each of them is worthwhile: models.triton_ops has kernels for GPUs,
and these are the reference. Weights are tensors; does not know state or kinds of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.models import torch_experts
from luceasync.models.quant.packed import Packed
from luceasync.models.quant.torch_weight import TorchQuantWeight
from luceasync.models.trees import Trees, torch_trees
from luceasync.models.weights import (
    Choice,
    EmbeddingTable,
    ExpertWeights,
    InputNorm,
    Router,
    Routing,
    RowsAhead,
    StackedWeight,
    SwiGLU,
    Weight,
    as_float,
)

T = TypeVar("T")


class Ops(Protocol):
    """The operations of a device. Methods that take a tensor as a weight take over its memory."""

    def pack(self, rows: Tensor) -> Weight:
        """A matrix [out, dim] in the layout that the operations need."""
        ...

    def table(self, rows: Tensor) -> EmbeddingTable:
        """A matrix [out, dim] whose rows can also be looked up."""
        ...

    def quantised(self, packed: Packed, dtype: torch.dtype) -> EmbeddingTable:
        """A quantised matrix; looked-up rows have `dtype`."""
        ...

    def stacked(self, segments: Sequence[Weight]) -> Weight:
        """Weights of different encodings, stacked along their rows."""
        ...

    def gated(self, gate_up: Weight, down: Weight) -> SwiGLU:
        """A gated feed-forward network of two of these weights."""
        ...

    def follow(self, weight: Weight, norm: InputNorm) -> None:
        """`norm` comes after every `weight.linear_add`, which may prepare its result."""
        ...

    def float_matrix(self, rows: Tensor) -> Weight:
        """A float32 matrix [out, dim] for float32 rows, whatever the model's dtype. A row's bits do
        not depend on other rows in a decode step."""
        ...

    def experts(self, rows: Tensor, num_experts: int, num_parts: int) -> ExpertWeights:
        """The matrices of experts: [experts * out, dim]; with two parts all gates come first, then
        all ups."""
        ...

    def quantised_experts(
        self, packed: Packed, num_experts: int, num_parts: int, dtype: torch.dtype
    ) -> ExpertWeights:
        """`experts` of a quantised matrix, for rows of `dtype`."""
        ...

    def routed(
        self, router: Router, gate_up: ExpertWeights, down: ExpertWeights, shared: SwiGLU | None
    ) -> RoutedExperts:
        """The experts with their router, and a shared expert beside them."""
        ...

    def grouped(self, *experts: ExpertWeights) -> ExpertGroup:
        """The experts of a layer, each of which has a matrix in all of these weights."""
        ...

    def choose(self, logits: Tensor, bias: Tensor | None, routing: Routing) -> Choice:
        """The experts of each row of float32 logits [n, experts], see models.torch_experts."""
        ...

    def add_weighted(self, results: Tensor, choice: Choice, base: Tensor) -> Tensor:
        """base [n, dim] + the sum of each row's results [places, dim] by its weights, in float32
        and in the order of the row's choice.
        """
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension, computed in float32; x's dtype; weight float32."""
        ...

    def add_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, factor: Tensor | None = None
    ) -> Tensor:
        """residual + `norm` of x, times `factor` if given, float32 [1]."""
        ...

    def norm_values(
        self, projected: Tensor, begin: int, end: int, head_dim: int, eps: float
    ) -> Tensor:
        """The columns before `end` of [..., width], and behind them the heads of those from `begin`
        on, each over its rms: [..., end + width - begin].
        """
        ...

    def geglu(self, gate_up: Tensor) -> Tensor:
        """gelu(gate) * up, the halves of the last dimension in this order."""
        ...

    def row_indices(self, positions: Tensor, lanes: Tensor, absent: Tensor) -> Tensor:
        """Row indices of `positions`, int32 [entries, rows]: each minus `absent`, int32 [lanes +
        1], of its lane in `lanes`, int32 [entries]. NO_LANE is the last one.
        """
        ...

    def trees(self, parents: Tensor, reach: int) -> Trees:
        """What rows of trees see, see models.trees.torch_trees."""
        ...

    def pick(
        self,
        torch_body: Callable[[], T],
        triton_body: Callable[[], T],
        compiled_body: Callable[[], T],
    ) -> T:
        """Make the implementation for this device, out of several with the same meaning."""
        ...


class OpsWithSlots(Ops, Protocol):
    """Ops of a device that has slots for the experts of each layer, which are in host memory."""

    def allocate(self) -> None:
        """Allocate what layers share, once all layers are read."""
        ...

    def counts(self) -> dict[str, int]:
        """Counts of experts in all passes so far, by how they were found, and bytes. May be called
        from any thread."""
        ...


class TorchOps:
    """Ops as plain torch."""

    def pack(self, rows: Tensor) -> Weight:
        return TorchTable(rows)

    def table(self, rows: Tensor) -> EmbeddingTable:
        return TorchTable(rows)

    def quantised(self, packed: Packed, dtype: torch.dtype) -> EmbeddingTable:
        return TorchQuantWeight(packed, dtype)

    def stacked(self, segments: Sequence[Weight]) -> Weight:
        return StackedWeight(segments)

    def gated(self, gate_up: Weight, down: Weight) -> SwiGLU:
        return SwiGLU(gate_up, down)

    def follow(self, weight: Weight, norm: InputNorm) -> None:
        pass

    def float_matrix(self, rows: Tensor) -> Weight:
        return self.pack(rows)

    def experts(self, rows: Tensor, num_experts: int, num_parts: int) -> ExpertWeights:
        return torch_experts.plain_experts(rows, num_experts, num_parts)

    def quantised_experts(
        self, packed: Packed, num_experts: int, num_parts: int, dtype: torch.dtype
    ) -> ExpertWeights:
        return torch_experts.quantised_experts(packed, num_experts, num_parts)

    def routed(
        self, router: Router, gate_up: ExpertWeights, down: ExpertWeights, shared: SwiGLU | None
    ) -> RoutedExperts:
        return RoutedExperts(self, router, gate_up, down, shared)

    def grouped(self, *experts: ExpertWeights) -> ExpertGroup:
        return ExpertGroup(self, experts)

    def choose(self, logits: Tensor, bias: Tensor | None, routing: Routing) -> Choice:
        return torch_experts.choose(logits, bias, routing)

    def add_weighted(self, results: Tensor, choice: Choice, base: Tensor) -> Tensor:
        return torch_experts.add_weighted(results, choice, base)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, factor: Tensor | None = None
    ) -> Tensor:
        added = residual + self.norm(x, weight, eps)
        return added if factor is None else added * factor.to(added.dtype)

    def norm_values(
        self, projected: Tensor, begin: int, end: int, head_dim: int, eps: float
    ) -> Tensor:
        heads = projected[..., begin:].unflatten(-1, (-1, head_dim)).contiguous()
        values = self.norm(heads, torch.ones(head_dim, device=heads.device), eps)
        return torch.cat([projected[..., :end], values.flatten(-2)], -1)

    def geglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up

    def row_indices(self, positions: Tensor, lanes: Tensor, absent: Tensor) -> Tensor:
        return positions - absent[lanes.long()][:, None]

    def trees(self, parents: Tensor, reach: int) -> Trees:
        return torch_trees(parents, reach)

    def pick(
        self,
        torch_body: Callable[[], T],
        triton_body: Callable[[], T],
        compiled_body: Callable[[], T],
    ) -> T:
        return torch_body()


class RoutedExperts:
    """Experts with their router, and a shared expert beside them, made of `ops`."""

    def __init__(
        self,
        ops: Ops,
        router: Router,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        shared: SwiGLU | None,
    ) -> None:
        self.ops = ops
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.shared = shared

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights except the norm's."""
        router = self.router
        parts = (router.weight, router.shared_gate, self.gate_up, self.down, self.shared)
        bias_bytes = 0 if router.bias is None else router.bias.nbytes
        return bias_bytes + sum(part.num_bytes for part in parts if part is not None)

    def add_to(self, x: Tensor) -> Tensor:
        """The sum of x and the experts' results for each row of norm(x): [rows, dim]."""
        return self._add(x, self.gate_up, self.down)

    def _add(self, x: Tensor, gate_up: ExpertWeights, down: ExpertWeights) -> Tensor:
        router = self.router
        normed = router.norm(x)
        exact = normed.float()
        choice = self.ops.choose(router.weight.linear(exact), router.bias, router.routing)
        results = down.linear(gate_up.swiglu(normed, choice), choice)
        return self.ops.add_weighted(results, choice, self._with_shared(x, normed, exact))

    def _with_shared(self, x: Tensor, normed: Tensor, exact: Tensor) -> Tensor:
        """The rows with the result of the shared expert added. `exact`: `normed` in float32."""
        if self.shared is None:
            return x
        inner = self.shared.gate_up.swiglu(normed)
        if (gate := self.router.shared_gate) is not None:
            inner = inner * gate.linear(exact).sigmoid().to(inner.dtype)
        return self.shared.down.linear_add(inner, x)


class ExpertGroup:
    """The experts of a layer, multiplied one by one."""

    def __init__(self, ops: Ops, experts: Sequence[ExpertWeights]) -> None:
        self._ops = ops
        self._experts = tuple(experts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weights.num_bytes for weights in self._experts)

    def choose(self, logits: Tensor, routing: Routing) -> Choice:
        """See Ops."""
        return self._ops.choose(logits, None, routing)

    def weights(self, choice: Choice) -> Sequence[ExpertWeights]:
        """The weights with which the rows of a pass are multiplied, once its experts are chosen."""
        return self._experts


class TorchTable:
    """A table of plain rows; base of other devices' tables."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows  # [out, dim]

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    def linear(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        return F.linear(x if norm is None else norm(x), self.rows)

    def linear_float(
        self, x: Tensor, norm: InputNorm | None = None, out: Tensor | None = None
    ) -> Tensor:
        return as_float(self.linear(x, norm), out)

    def linear_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self.linear(x)

    def swiglu(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        gate, up = self.linear(x, norm).chunk(2, -1)
        return F.silu(gate) * up

    def lookup(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.rows)


@dataclass(frozen=True, slots=True)
class Norm:
    """An InputNorm. weight: float32 [dim], with the family's offset added."""

    ops: Ops
    weight: Tensor
    eps: float
    ahead: RowsAhead = field(default_factory=RowsAhead, repr=False, compare=False)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., dim]. Returns x's dtype."""
        return self.ops.norm(x, self.weight, self.eps)

    def add_to(self, residual: Tensor, x: Tensor, factor: Tensor | None = None) -> Tensor:
        """residual + norm(x): [..., dim], times `factor` if given, float32 [1]."""
        return self.ops.add_norm(residual, x, self.weight, self.eps, factor)

    def follow(self, weight: Weight) -> None:
        """`weight.linear_add` may prepare its result for this norm."""
        self.ops.follow(weight, self)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32, in x's dtype."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
