"""Routed experts in plain torch, for any device: the reference for faster bodies.

Shapes depend on the number of rows alone and nothing waits for the device, so that it can be
captured as a CUDA graph: each expert's rows are padded to tiles, of which there are as many as
there could be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.models.quant.packed import Packed, dequantise, table_of
from luceasync.models.weights import Choice, Routing

FEW_ROWS, MANY_ROWS = 8, 64  # of a tile, of which each multiplies with one expert
MANY_PER_EXPERT = 32  # rows of an expert, on average, from which on tiles have many rows
Product = Callable[[Tensor, Tensor], Tensor]  # [n, dim], [out, dim] -> [n, out]


def scores_of(logits: Tensor, routing: Routing) -> Tensor:
    """The scores of all experts: float32 [n, experts] -> the same."""
    if routing.softcap:
        logits = (logits / routing.softcap).tanh() * routing.softcap
    return logits.sigmoid() if routing.scores == "sigmoid" else logits.softmax(-1)


def choose(logits: Tensor, bias: Tensor | None, routing: Routing) -> Choice:
    """The experts of each row of float32 logits [n, experts]. `bias`: float32 [experts], which is
    added to the scores for the choice alone.
    """
    scores, num_chosen = scores_of(logits, routing), routing.num_chosen
    ranks = scores if bias is None else scores + bias
    # A stable sort: topk does not say which of equal scores it takes.
    experts = ranks.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    weights = scores.gather(-1, experts)
    if routing.is_normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return sorted_choice(experts, weights * routing.scale, logits.shape[1])


def sorted_choice(experts: Tensor, weights: Tensor, num_experts: int) -> Choice:
    """The choice of experts [n, k], integers, with these weights."""
    in_order, order = experts.flatten().sort(stable=True)
    ends = torch.arange(num_experts + 1, device=experts.device, dtype=experts.dtype)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=experts.device)
    bounds = torch.searchsorted(in_order, ends)
    return Choice(weights, order // experts.shape[1], places.view(experts.shape), bounds)


def add_weighted(results: Tensor, choice: Choice, base: Tensor) -> Tensor:
    """base + the sum of each row's results by its weights, rounded once. results: [places, dim];
    base: [n, dim].
    """
    sums = base.float()
    for weights, places in zip(choice.weights.unbind(1), choice.places.unbind(1), strict=True):
        sums = sums + weights[:, None] * results[places].float()
    return sums.to(base.dtype)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Places laid out in tiles of equally many rows, each of one expert."""

    num_rows: int
    experts: Tensor  # [tiles]
    slots: Tensor  # [places], where among all tiles' rows each place lies

    @classmethod
    def of(cls, choice: Choice) -> Tiles:
        """The tiles of a choice."""
        num_places, num_experts = len(choice.rows), len(choice.bounds) - 1
        is_many = num_places >= MANY_PER_EXPERT * num_experts
        num_rows = MANY_ROWS if is_many else FEW_ROWS
        most = min(num_places, num_places // num_rows + num_experts)
        begins, counts = choice.bounds[:-1], choice.bounds.diff()
        ends = ((counts + num_rows - 1) // num_rows).cumsum(0)  # of each expert's tiles
        numbers = torch.arange(num_places, device=ends.device)
        expert = torch.searchsorted(choice.bounds[1:].contiguous(), numbers, right=True)
        first = torch.where(expert > 0, ends[expert - 1], 0)
        slots = first * num_rows + numbers - begins[expert]
        tiles = torch.arange(most, device=ends.device)
        experts = torch.searchsorted(ends, tiles, right=True).clamp(max=num_experts - 1)
        return cls(num_rows, experts, slots)

    def product(self, x: Tensor, matrix_of: Callable[[Tensor], Tensor], product: Product) -> Tensor:
        """x: [places, dim]. `matrix_of` returns the matrix [out, dim] of an expert, int64 [1]."""
        padded = x.new_zeros(len(self.experts) * self.num_rows, x.shape[1])
        padded[self.slots] = x
        each = zip(padded.split(self.num_rows), self.experts.split(1), strict=True)
        return torch.cat([product(rows, matrix_of(expert)) for rows, expert in each])[self.slots]


class TorchExperts:
    """ExpertWeights of matrices that `matrix_of` returns, each in the dtype of `product`. Gates and
    ups are halves of one matrix.
    """

    def __init__(
        self,
        num_bytes: int,
        matrix_of: Callable[[Tensor], Tensor],
        product: Product = F.linear,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype`: that of the matrices, if it is not the one of x."""
        self.num_bytes = num_bytes
        self._matrix_of = matrix_of
        self._product = product
        self._dtype = dtype

    def linear(self, x: Tensor, choice: Choice) -> Tensor:
        rows = x if self._dtype is None else x.to(self._dtype)
        return Tiles.of(choice).product(rows, self._matrix_of, self._product).to(x.dtype)

    def swiglu(self, x: Tensor, choice: Choice) -> Tensor:
        gate, up = self.linear(x[choice.rows], choice).chunk(2, -1)
        return F.silu(gate) * up


def plain_experts(rows: Tensor, num_experts: int, num_parts: int) -> TorchExperts:
    """The experts of plain rows [parts * experts * out, dim]: all gates, then all ups, or one part
    alone.
    """
    each = rows.view(num_parts, num_experts, -1, rows.shape[1])
    return TorchExperts(rows.nbytes, lambda expert: each.index_select(1, expert).flatten(0, 2))


def quantised_experts(
    packed: Packed, num_experts: int, num_parts: int, product: Product = F.linear
) -> TorchExperts:
    """`plain_experts` of quantised rows."""
    table = table_of(packed)
    height = packed.shape[0] // (num_parts * num_experts)
    parts = torch.arange(num_parts, device=packed.codes.device)[:, None] * (num_experts * height)
    ids = (parts + torch.arange(height, device=packed.codes.device)).flatten()  # of expert 0

    def matrix_of(expert: Tensor) -> Tensor:
        return dequantise(packed.select(ids + expert * height), table)

    return TorchExperts(packed.num_bytes, matrix_of, product, torch.float32)
