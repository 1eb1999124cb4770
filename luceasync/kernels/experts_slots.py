"""Slots on a device for experts in host memory: which experts have slots, which are evicted, and
copies of those that are loaded, all decided on the device, so that a captured pass need not wait
for the host.

Of a pass's experts without a slot, the lowest number comes first; they get free slots, then the
least recently used ones. Experts for which no slot is left are read from host memory in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import (
    num_multiprocessors,
    overlap_options,
    start_next,
    wait_for_inputs,
)

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
        """An empty table: no expert has a slot. `hold`: a copy in host memory that kernels can
        write."""
        slot_of = torch.full((num_experts,), NO_SLOT, dtype=torch.int32, device=device)
        used = torch.full((num_slots,), -1, dtype=torch.int64, device=device)
        clock, counts = used.new_zeros(1), used.new_zeros(len(COUNTS))
        expert_of = slot_of.new_full((num_slots,), NO_SLOT)
        return cls(slot_of, expert_of, used, clock, counts, hold(counts))


@triton.jit
def table_state(slot_of, clock, counts, num_experts, EXPERTS: tl.constexpr):
    """What `matrices_of` reads first. Only the kernel that calls it writes a table, so this may be
    loaded before other kernels of a pass have ended.
    """
    expert = tl.arange(0, EXPERTS)
    slot = tl.load(slot_of + expert, mask=expert < num_experts, other=-1)
    return slot, tl.load(clock), tl.load(counts), tl.load(counts + 1), tl.load(counts + 2)


@triton.jit
def matrices_of(
    is_needed,
    state,
    slot_of,
    expert_of,
    used,
    clock,
    counts,
    shown,
    fills,
    num_experts,
    num_slots,
    most,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    FILLS: tl.constexpr,
):
    """Give slots to the experts of a pass, and return where the matrix of each is, [EXPERTS]: a
    slot, or slots + 1 + e for expert e in host memory.

    fills: int32 [most, 2], which expert is to be copied to which slot, NO_SLOT if there is none.
    """
    NONE: tl.constexpr = -1
    LAST: tl.constexpr = (1 << 63) - 1
    expert = tl.arange(0, EXPERTS)
    slot, now, num_hit, num_copied, num_read = state
    is_hit, is_missed = is_needed & (slot >= 0), is_needed & (slot < 0)
    tl.store(used + slot, now + 0 * slot, mask=is_hit)
    num_hits, num_missed = tl.sum(is_hit.to(tl.int32), 0), tl.sum(is_missed.to(tl.int32), 0)
    num_filled = num_missed * 0
    if num_missed > 0:
        tl.debug_barrier()  # the hits' slots are read by other threads
        own = tl.arange(0, SLOTS)
        own_used = tl.load(used + own, mask=own < num_slots, other=0)
        is_free = (own < num_slots) & (own_used < now)
        key = tl.where(is_free, own_used << 20 | own, LAST)
        number = tl.cumsum(is_missed.to(tl.int32), 0) - 1
        for i in range(num_missed):
            least = tl.min(key, 0)
            if least < LAST:
                victim = (least & 0xFFFFF).to(tl.int32)
                here = is_missed & (number == i)
                coming = tl.sum(tl.where(here, expert, 0), 0)
                leaving = tl.load(expert_of + victim)
                if leaving >= 0:
                    tl.store(slot_of + leaving, NONE)
                tl.store(slot_of + coming, victim)
                tl.store(expert_of + victim, coming)
                tl.store(used + victim, now)
                tl.store(fills + 2 * i, coming)
                tl.store(fills + 2 * i + 1, victim)
                slot = tl.where(here, victim, slot)
                key = tl.where(own == victim, LAST, key)
                num_filled += 1
    fill = tl.arange(0, FILLS)
    tl.store(fills + 2 * fill + 1, NONE + 0 * fill, mask=(fill >= num_filled) & (fill < most))
    num_hits += num_hit
    num_copied += num_filled
    num_read += num_missed - num_filled
    tl.store(clock, now + 1)
    tl.store(counts, num_hits)
    tl.store(counts + 1, num_copied)
    tl.store(counts + 2, num_read)
    tl.store(shown, num_hits)
    tl.store(shown + 1, num_copied)
    tl.store(shown + 2, num_read)
    return tl.where(slot >= 0, slot, num_slots + 1 + expert)


class SlotCopies:
    """Copies whole experts to slots from host memory that the device can read: the tensors of all
    their matrices in one launch."""

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
        self._kept = pairs  # the kernel receives addresses only
        self._table = torch.tensor(table, dtype=torch.int64).to(device)
        self._chunks = torch.tensor(chunks, dtype=torch.int32).to(device)

    def run(self, fills: Tensor) -> None:
        """Copy the experts listed in `fills`, see experts_routing.choose. Programs take chunk after
        chunk, so few of them have to start if there is nothing to copy."""
        num_chunks = len(self._chunks)
        num_programs = min(num_chunks, 2 * num_multiprocessors(fills))
        _fill_kernel[(num_programs,)](
            self._table,
            self._chunks,
            fills,
            num_chunks,
            len(fills),
            FILLS=triton.next_power_of_2(len(fills)),
            BLOCK=COPY_WORDS,
            num_warps=8,
            **overlap_options(fills),
        )


@kernel(do_not_specialize=["num_fills"])
def _fill_kernel(
    table,
    chunks,
    fills,
    num_chunks,
    num_fills,
    FILLS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    fill = tl.arange(0, FILLS)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)  # products of what is in slots wait for the choice alone
    slots = tl.load(fills + 2 * fill + 1, mask=fill < num_fills, other=-1)
    for number in range(tl.sum((slots >= 0).to(tl.int32), 0)):  # these come first
        slot = tl.load(fills + 2 * number + 1).to(tl.int64)
        expert = tl.load(fills + 2 * number).to(tl.int64)
        for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
            at_pair = table + 3 * tl.load(chunks + 2 * chunk)
            size = tl.load(at_pair + 2)
            word = tl.load(chunks + 2 * chunk + 1) + tl.arange(0, BLOCK)
            source = tl.load(at_pair).to(tl.pointer_type(tl.int32)) + expert * size
            target = tl.load(at_pair + 1).to(tl.pointer_type(tl.int32)) + slot * size
            ok = word < size
            tl.store(target + word, tl.load(source + word, mask=ok, other=0), mask=ok)
