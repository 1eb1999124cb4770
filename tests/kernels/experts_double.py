"""Experts of a GPU on a CPU without its kernels: torch multiplies with what tiles name, in slots or
in host memory, and slots hold what the slow truth says. Whole engines run with it in little time;
tests.kernels.test_experts_slots compares it with the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.kernels import experts_order, experts_product, experts_routing, experts_rows
from luceasync.kernels.experts_order import ExpertOrder, ExpertTiles
from luceasync.kernels.experts_routing import NO_MATRIX, TILE_ROWS
from luceasync.kernels.experts_slots import COUNTS, NO_SLOT, SlotCopies, SlotTable
from luceasync.models import torch_experts
from luceasync.models.expert_slots import SlottedOps
from luceasync.models.ops import OpsWithSlots, TorchOps
from luceasync.models.weights import Choice, Routing
from luceasync.pipeline.cpu_platform import CpuPlatform
from luceasync.pipeline.offer import DecodeRule, Offer
from tests.reference.slots import LruSlots


class SlottedTorchOps(SlottedOps):
    """SlottedOps whose other operations are torch's."""

    pack = TorchOps.pack
    table = TorchOps.table
    quantised = TorchOps.quantised
    stacked = TorchOps.stacked
    gated = TorchOps.gated
    float_matrix = TorchOps.float_matrix
    norm = TorchOps.norm
    add_norm = TorchOps.add_norm
    norm_values = TorchOps.norm_values
    geglu = TorchOps.geglu
    row_indices = TorchOps.row_indices
    trees = TorchOps.trees
    pick = TorchOps.pick


class SlottedPlatform(CpuPlatform):
    """A CPU that offers slots as a GPU does."""

    def offer(self, share: int = 1) -> Offer:
        found = super().offer(share)
        return replace(found, runs_async=True, decode=DecodeRule(doubles=True))

    def slotted_ops(self, num_slots: int) -> OpsWithSlots:
        return SlottedTorchOps(num_slots, self)

    def hold(self, tensor: Tensor) -> Tensor:
        """See luceasync.models.expert_slots.ExpertHost."""
        return tensor.clone()

    def close(self) -> None:
        """Nothing more is held."""


def replace_kernels(patch: pytest.MonkeyPatch) -> None:
    """Put this module's functions where the kernels of experts are."""
    for module, functions in (
        (experts_routing, (choose, choose_alone)),
        (experts_order, (order, tiles_of)),
        (experts_product, (linear, swiglu, many)),
        (experts_rows, (scores, add_weighted)),
    ):
        for function in functions:
            patch.setattr(module, function.__name__, function)
    patch.setattr(SlotCopies, "__init__", _keep_pairs)
    patch.setattr(SlotCopies, "run", _copy)


def _keep_pairs(self: SlotCopies, pairs: Sequence[tuple[Tensor, Tensor]], device: object) -> None:
    self._kept = pairs


def _copy(self: SlotCopies, fills: Tensor) -> None:
    for expert, slot in fills.tolist():
        for host, slots in self._kept if slot != NO_SLOT else ():
            slots[slot] = host[expert]


def _choice(logits: Tensor, bias: Tensor | None, options: dict[str, Any]) -> tuple[Choice, Tensor]:
    """The choice, and the expert of each place."""
    scores = "sigmoid" if options.pop("is_sigmoid", False) else "softmax"
    choice = torch_experts.choose(logits, bias, Routing(scores=scores, **options))
    numbers = torch.arange(len(choice.rows))
    return choice, torch.searchsorted(choice.bounds[1:].contiguous(), numbers, right=True)


def choose_alone(logits: Tensor, bias: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """See experts_routing."""
    choice, experts = _choice(logits, bias, options)
    return choice.weights, experts[choice.places].int()


def order(experts: Tensor, num_experts: int, tile_rows: int) -> ExpertOrder:
    """See experts_order."""
    found = torch_experts.sorted_choice(experts.long(), torch.empty(0), num_experts)
    tiles = tiles_of(found.bounds, len(found.rows), tile_rows)
    return ExpertOrder(found.rows.int(), found.places.int(), found.bounds.int(), tiles)


def tiles_of(bounds: Tensor, num_places: int, tile_rows: int) -> ExpertTiles:
    """See experts_order."""
    tiles, tile_bounds = [], [0]
    for expert, (begin, end) in enumerate(pairwise(bounds.tolist())):
        tiles += [[expert, at, min(at + tile_rows, end)] for at in range(begin, end, tile_rows)]
        tile_bounds.append(len(tiles))
    return ExpertTiles(torch.tensor(tiles, dtype=torch.int32), torch.tensor(tile_bounds))


def choose(
    logits: Tensor,
    bias: Tensor | None,
    arrivals: Tensor,
    *,
    has_shared: bool = False,
    table: SlotTable | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """See experts_routing."""
    choice, experts = _choice(logits, bias, options)
    (num_rows, num_experts), num_places = logits.shape, len(choice.rows)
    bounds, rows, fills = choice.bounds.tolist(), choice.rows, None
    matrix_of, shared = {expert: expert for expert in range(num_experts)}, num_experts
    if table is not None:
        shared = len(table.expert_of)
        slots, fills = _take(table, experts.tolist())
        matrix_of = {e: slots.get(e, shared + 1 + e) for e in range(num_experts)}
    tiles = [
        [matrix_of[expert], begin, min(begin + TILE_ROWS, bounds[expert + 1])]
        for expert in range(num_experts)
        for begin in range(bounds[expert], bounds[expert + 1], TILE_ROWS)
    ]
    if has_shared:
        rows, end = torch.cat([rows, torch.arange(num_rows)]), num_places + num_rows
        begins = range(num_places, end, TILE_ROWS)
        tiles += [[shared, begin, min(begin + TILE_ROWS, end)] for begin in begins]
    unused = [NO_MATRIX, 0, 0]
    listed = torch.tensor([*tiles, unused], dtype=torch.int32)
    integers = (each.int() for each in (rows, choice.places, choice.bounds))
    return choice.weights, *integers, listed, fills


def _take(table: SlotTable, experts: Sequence[int]) -> tuple[dict[int, int], Tensor]:
    truth = LruSlots(len(table.expert_of))
    truth.expert_of = [None if e == NO_SLOT else e for e in table.expert_of.tolist()]
    truth._used, truth._now = table.used.tolist(), int(table.clock)
    slots, fills = truth.take(experts)
    table.expert_of.copy_(torch.tensor([NO_SLOT if e is None else e for e in truth.expert_of]))
    table.used.copy_(torch.tensor(truth._used))
    table.clock.add_(1)
    table.counts.add_(torch.tensor([truth.counts[name] for name in COUNTS]))
    table.shown.copy_(table.counts)
    return slots, torch.tensor(fills, dtype=torch.int32).view(-1, 2)


def linear(
    x: Tensor,
    matrices: Tensor,
    tiles: Tensor,
    num_places: int,
    *,
    rows: Tensor | None = None,
    shared: Tensor | None = None,
    far: Tensor | None = None,
    is_listed: bool = False,
) -> Tensor:
    """See experts_product."""
    out, num_near = x.new_full((num_places, matrices.shape[1]), torch.nan), len(matrices)
    for matrix, begin, end in tiles.tolist():
        if matrix == NO_MATRIX:
            continue
        own = x[begin:end] if rows is None else x[rows[begin:end].long()]
        if matrix < num_near:
            out[begin:end] = F.linear(own, matrices[matrix])
        elif matrix == num_near:
            assert shared is not None
            out[begin:end] = F.linear(own, shared)
        else:
            assert far is not None
            out[begin:end] = F.linear(own, far[matrix - num_near - 1])
    return out


def swiglu(
    x: Tensor,
    matrices: Tensor,
    tiles: Tensor,
    rows: Tensor,
    *,
    shared: Tensor | None = None,
    far: Tensor | None = None,
    fills: Tensor | None = None,
) -> Tensor:
    """See experts_product."""
    gates, ups = (
        linear(
            x,
            matrices[part],
            tiles,
            len(rows),
            rows=rows,
            shared=None if shared is None else shared.chunk(2)[part],
            far=None if far is None else far[part],
        )
        for part in range(2)
    )
    return F.silu(gates) * ups


def many(
    x: Tensor,
    matrices: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    tile_rows: int,
    rows: Tensor | None = None,
    first: int = 0,
) -> None:
    """See experts_product."""
    for matrix, begin, end in tiles.tolist():
        if not 0 <= matrix - first < matrices.shape[1]:
            continue
        own = x[begin:end] if rows is None else x[rows[begin:end].long()]
        found = F.linear(own, matrices[0, matrix - first])
        if len(matrices) == 2:
            found = F.silu(found) * F.linear(own, matrices[1, matrix - first])
        out[begin:end] = found


def scores(
    x: Tensor, norm: tuple[Tensor, float], router: Tensor, gate: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """See experts_rows."""
    normed = F.rms_norm(x.float(), norm[0].shape, *norm)
    gates = None if gate is None else F.linear(normed, gate)[:, 0].sigmoid()
    return normed.to(x.dtype), F.linear(normed, router), torch.zeros(1).int(), gates


def add_weighted(
    results: Tensor,
    weights: Tensor,
    places: Tensor,
    base: Tensor,
    shared: Tensor | None = None,
    gates: Tensor | None = None,
    is_chosen: bool = False,
) -> Tensor:
    """See experts_rows."""
    total = base.float() + (weights[..., None] * results[places.long()].float()).sum(1)
    if shared is not None:
        total = total + (shared.float() if gates is None else shared.float() * gates[:, None])
    return total.to(base.dtype)
