"""Slots on a device for experts in host memory: which are there, which have to leave, and copies of
those that come, all decided on the device, so that a captured pass need not wait for the host.

Of a pass's experts that have no slot, the lowest number comes first, into free slots and then into
those that were used least recently. What finds no slot is read from host memory where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.experts_routing import NO_MATRIX
from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import overlap_options, start_next, wait_for_inputs

NO_SLOT = -1
COPY_WORDS = 2048  # of 4 bytes, that a program copies
COUNTS = ("hits", "misses", "read through")


@dataclass(frozen=True, slots=True)
class SlotTable:
    """The slots of one layer. slot_of: int32 [experts]; expert_of: int32 [slots]; used: int64
    [slots], the pass that used each last; clock: int64 [1], the number of passes; counts: int64
    [len(COUNTS)], experts so far; shown: the same in memory that the host reads without waiting.
    """

    slot_of: Tensor
    expert_of: Tensor
    used: Tensor
    clock: Tensor
    counts: Tensor
    shown: Tensor

    @classmethod
    def empty(
        cls,
        num_experts: int,
        num_slots: int,
        device: torch.device,
        hold: Callable[[Tensor], Tensor] = torch.clone,
    ) -> SlotTable:
        """No expert is there. `hold`: a copy in host memory that kernels can write."""
        slot_of = torch.full((num_experts,), NO_SLOT, dtype=torch.int32, device=device)
        used = torch.full((num_slots,), -1, dtype=torch.int64, device=device)
        clock, counts = used.new_zeros(1), used.new_zeros(len(COUNTS))
        expert_of = slot_of.new_full((num_slots,), NO_SLOT)
        return cls(slot_of, expert_of, used, clock, counts, hold(counts))


def assign(table: SlotTable, bounds: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Give slots to the experts of a pass, and say where each tile's matrix is.

    bounds, tiles: see experts_routing.choose. Returns tiles of which those in slots come first, and
    fills, int32 [most, 2]: which expert to copy to which slot, NO_SLOT for those that are not used.
    Matrix `slots` of a tile is the shared expert, and slots + 1 + e is expert e in host memory.
    """
    num_experts, num_slots = len(table.slot_of), len(table.expert_of)
    most = min(len(tiles), num_slots, num_experts)
    moved, fills = torch.empty_like(tiles), tiles.new_empty(most, 2)
    _assign_kernel[(1,)](
        table.slot_of,
        table.expert_of,
        table.used,
        table.clock,
        table.counts,
        table.shown,
        bounds,
        tiles,
        moved,
        fills,
        table.slot_of.new_empty(num_slots),
        num_experts,
        num_slots,
        len(tiles),
        most,
        EXPERTS=triton.next_power_of_2(num_experts),
        SLOTS=triton.next_power_of_2(num_slots),
        STEP=min(16, triton.next_power_of_2(num_slots)),
        TILES=triton.next_power_of_2(len(tiles)),
        NONE=NO_SLOT,
        UNUSED=NO_MATRIX,
        num_warps=8,
        **overlap_options(tiles),
    )
    return moved, fills


@kernel(do_not_specialize=["num_tiles", "most"])
def _assign_kernel(
    slot_of,
    expert_of,
    used,
    clock,
    counts,
    shown,
    bounds,
    tiles,
    moved,
    fills,
    victims,
    num_experts,
    num_slots,
    num_tiles,
    most,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    STEP: tl.constexpr,
    TILES: tl.constexpr,
    NONE: tl.constexpr,
    UNUSED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    now = tl.load(clock)
    expert = tl.arange(0, EXPERTS)
    expert_ok = expert < num_experts
    first = tl.load(bounds + expert, mask=expert_ok, other=0)
    is_needed = tl.load(bounds + expert + 1, mask=expert_ok, other=0) > first
    slot = tl.load(slot_of + expert, mask=expert_ok, other=NONE)
    is_hit = is_needed & (slot >= 0)
    is_missed = is_needed & (slot < 0)
    tl.store(used + slot, now + 0 * slot, mask=is_hit)
    tl.debug_barrier()  # the hits' slots are read below

    # The rank of each slot by its last use: what this pass has hit is the newest and stays.
    own = tl.arange(0, SLOTS)
    own_ok = own < num_slots
    own_used = tl.load(used + own, mask=own_ok, other=0)
    rank = tl.zeros([SLOTS], tl.int32)
    for begin in range(0, num_slots, STEP):
        other = begin + tl.arange(0, STEP)
        other_used = tl.load(used + other, mask=other < num_slots, other=0)
        is_older = other_used[None, :] < own_used[:, None]
        is_older |= (other_used[None, :] == own_used[:, None]) & (other[None, :] < own[:, None])
        is_older &= (other < num_slots)[None, :]
        rank += tl.sum(is_older.to(tl.int32), 1)
    is_free = own_ok & (own_used < now)
    tl.store(victims + rank, own, mask=own_ok)
    tl.debug_barrier()
    num_free = tl.sum(is_free.to(tl.int32), 0)
    num_missed = tl.sum(is_missed.to(tl.int32), 0)
    num_filled = tl.minimum(num_missed, num_free)

    number = tl.cumsum(is_missed.to(tl.int32), 0) - 1  # of a missed expert
    gets = is_missed & (number < num_filled)
    victim = tl.load(victims + number, mask=gets, other=0)
    leaving = tl.load(expert_of + victim, mask=gets, other=NONE)
    tl.store(slot_of + leaving, NONE + 0 * leaving, mask=gets & (leaving >= 0))
    tl.debug_barrier()
    tl.store(slot_of + expert, victim, mask=gets)
    tl.store(expert_of + victim, expert, mask=gets)
    tl.store(used + victim, now + 0 * victim, mask=gets)
    tl.store(fills + 2 * number, expert, mask=gets)
    tl.store(fills + 2 * number + 1, victim, mask=gets)
    for begin in range(0, most, STEP):
        at = begin + tl.arange(0, STEP)
        tl.store(fills + 2 * at + 1, NONE + 0 * at, mask=(at >= num_filled) & (at < most))
    tl.store(clock, now + 1)
    num_hits = tl.sum(is_hit.to(tl.int32), 0)
    num_hits += tl.load(counts)
    num_copied = tl.load(counts + 1) + num_filled
    num_read = tl.load(counts + 2) + num_missed - num_filled
    tl.store(counts, num_hits)
    tl.store(counts + 1, num_copied)
    tl.store(counts + 2, num_read)
    tl.store(shown, num_hits)
    tl.store(shown + 1, num_copied)
    tl.store(shown + 2, num_read)
    tl.debug_barrier()  # slots are read below

    tile = tl.arange(0, TILES)
    tile_ok = tile < num_tiles
    matrix = tl.load(tiles + 3 * tile, mask=tile_ok, other=UNUSED)
    is_expert = (matrix >= 0) & (matrix < num_experts)
    place = tl.load(slot_of + matrix, mask=is_expert, other=num_slots)
    place = tl.where(is_expert & (place < 0), num_slots + 1 + matrix, place)
    is_near = (matrix >= 0) & (place <= num_slots)
    is_far = (matrix >= 0) & (place > num_slots)
    at = tl.cumsum(is_near.to(tl.int32), 0) - 1
    num_near = tl.sum(is_near.to(tl.int32), 0)
    at = tl.where(is_far, num_near + tl.cumsum(is_far.to(tl.int32), 0) - 1, at)
    at = tl.where(matrix < 0, tile, at)  # those come last already
    tl.store(moved + 3 * at, tl.where(matrix < 0, UNUSED, place), mask=tile_ok)
    for i in tl.static_range(1, 3):
        bound = tl.load(tiles + 3 * tile + i, mask=tile_ok, other=0)
        tl.store(moved + 3 * at + i, bound, mask=tile_ok)


class SlotCopies:
    """Copies of whole experts from host memory that the device can read to slots: the tensors of
    all their matrices in one launch.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
        """pairs: (in host memory, in slots) of each tensor: [experts, ..] and [slots, ..] of whole
        words of 4 bytes each, contiguous.
        """
        table, chunks = [], []
        for number, (host, slots) in enumerate(pairs):
            num_words = host[0].nbytes // 4
            assert host[0].nbytes % 4 == 0 and host[0].nbytes == slots[0].nbytes
            table.append([host.data_ptr(), slots.data_ptr(), num_words])
            chunks += [[number, begin] for begin in range(0, num_words, COPY_WORDS)]
        self._kept = pairs  # the kernel knows addresses alone
        self._table = torch.tensor(table, dtype=torch.int64).to(device)
        self._chunks = torch.tensor(chunks, dtype=torch.int32).to(device)

    def run(self, fills: Tensor) -> None:
        """Copy as `assign` says."""
        _fill_kernel[(len(self._chunks), len(fills))](
            self._table,
            self._chunks,
            fills,
            BLOCK=COPY_WORDS,
            num_warps=8,
            **overlap_options(fills),
        )


@kernel()
def _fill_kernel(table, chunks, fills, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    at_fill = fills + 2 * tl.program_id(1)
    slot = tl.load(at_fill + 1).to(tl.int64)
    if slot >= 0:
        expert = tl.load(at_fill).to(tl.int64)
        at_chunk = chunks + 2 * tl.program_id(0)
        at_pair = table + 3 * tl.load(at_chunk)
        size = tl.load(at_pair + 2)
        word = tl.load(at_chunk + 1) + tl.arange(0, BLOCK)
        source = tl.load(at_pair).to(tl.pointer_type(tl.int32)) + expert * size
        target = tl.load(at_pair + 1).to(tl.pointer_type(tl.int32)) + slot * size
        ok = word < size
        tl.store(target + word, tl.load(source + word, mask=ok, other=0), mask=ok)
