"""Routed experts on CPUs: each expert's rows are multiplied where they lie, by the kernels of
luceasync.cyext or by oneDNN, and summed in one go.

Knows no router; luceasync.models.torch_experts is its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.cyext import experts as compiled
from luceasync.cyext.quantised import TILE
from luceasync.models.quant.cpu import matrix_of
from luceasync.models.quant.packed import Packed
from luceasync.models.torch_experts import scores_of
from luceasync.models.weights import Choice, Routing
from luceasync.process_memory import into_large_pages

Product = Callable[[Tensor, Tensor], Tensor]


def choose(logits: Tensor, bias: Tensor | None, routing: Routing) -> Choice:
    """See torch_experts.choose."""
    scores, num_chosen = scores_of(logits, routing).contiguous(), routing.num_chosen
    num_rows, num_experts = scores.shape
    count = num_rows * num_chosen
    found = torch.empty(3 * count + num_experts + 1, dtype=torch.int32)
    experts, rows, places, bounds = found.split([count, count, count, num_experts + 1])
    weights = torch.empty(num_rows, num_chosen)
    compiled.choose(
        scores.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        (num_rows, num_experts, num_chosen),
        routing.is_normalised,
        routing.scale,
        weights.data_ptr(),
        (experts.data_ptr(), rows.data_ptr(), places.data_ptr(), bounds.data_ptr()),
    )
    return Choice(weights, rows, places.view(num_rows, num_chosen), bounds)


def add_weighted(results: Tensor, choice: Choice, base: Tensor) -> Tensor:
    """See torch_experts.add_weighted."""
    results, base = results.contiguous(), base.contiguous()
    out = torch.empty_like(base)
    compiled.add_weighted(
        results.data_ptr(),
        base.data_ptr(),
        choice.places.data_ptr(),
        choice.weights.data_ptr(),
        out.data_ptr(),
        (*choice.places.shape, base.shape[1]),
        base.dtype is torch.bfloat16,
    )
    return out


class PackedExperts:
    """ExpertWeights of matrices that oneDNN multiplies with, gates and ups as one."""

    def __init__(self, matrices: Sequence[Tensor], num_bytes: int, product: Product) -> None:
        """`product`: (rows [n, dim], matrix) -> [n, out]; a row's bits do not depend on n."""
        self.num_bytes = num_bytes
        self._matrices = matrices
        self._product = product

    def linear(self, x: Tensor, choice: Choice) -> Tensor:
        return self._each(x.split(choice.bounds.diff().tolist()))

    def swiglu(self, x: Tensor, choice: Choice) -> Tensor:
        ends = choice.bounds.tolist()
        places = choice.rows.long()
        gate, up = self._each([x[places[begin:end]] for begin, end in pairwise(ends)]).chunk(2, -1)
        return F.silu(gate) * up

    def _each(self, rows: Sequence[Tensor]) -> Tensor:
        pairs = zip(rows, self._matrices, strict=True)
        return torch.cat([self._product(own, matrix) for own, matrix in pairs if len(own)])


def can_compile(num_rows: int, num_experts: int, num_parts: int) -> bool:
    """Whether each expert's part of `num_rows` rows is whole tiles."""
    return num_rows % (num_experts * num_parts * TILE) == 0


class CompiledExperts:
    """ExpertWeights of quantised rows, rearranged as tiles in place. Sums are float32, rounded once
    to the dtype of x. The bits of a row do not depend on other rows of x.
    """

    def __init__(self, packed: Packed, num_experts: int, kernel: str) -> None:
        """Takes over the memory of `packed`: [experts * out] rows, or all gates, then all ups."""
        self._packed = packed.contiguous()
        self._num_experts = num_experts
        self._kernel = kernel
        self._matrix = matrix_of(self._packed)
        self._matrix.interleave()
        for tensor in self._packed.tensors.values():
            into_large_pages(tensor.data_ptr(), tensor.nbytes)

    @property
    def num_bytes(self) -> int:
        return self._packed.num_bytes

    def linear(self, x: Tensor, choice: Choice) -> Tensor:
        return self._product(x, choice, 0, self._packed.shape[0] // self._num_experts)

    def swiglu(self, x: Tensor, choice: Choice) -> Tensor:
        height = self._packed.shape[0] // (2 * self._num_experts)
        return self._product(x, choice, choice.rows.data_ptr(), height)

    def _product(self, x: Tensor, choice: Choice, rows: int, height: int) -> Tensor:
        """`rows`: the address of the row of each place; 0: of each its own, and no gates."""
        assert x.dtype in (torch.float32, torch.bfloat16), x.dtype
        x, num_places = x.contiguous(), len(choice.rows)
        out = x.new_empty(num_places, height)
        self._matrix.multiply_experts(
            x.data_ptr(),
            rows,
            choice.bounds.data_ptr(),
            (num_places, self._num_experts),
            rows != 0,
            x.dtype is torch.bfloat16,
            out.data_ptr(),
            self._kernel,
        )
        return out
