"""The highest logit of every row: two small kernels, where torch needs six.

The first reduces stretches of each row in parallel, the second their results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import overlap_options, start_next, wait_for_inputs

STRETCH = 4096  # logits per program


def best_tokens(logits: Tensor, carry: Tensor | None, no_token: int) -> Tensor:
    """Each row's carry, then the lowest id of its highest logit; `no_token` if that logit is not
    finite.

    logits: float [rows, vocab], rows contiguous; carry: int64 [rows, n].
    Returns int64 [rows, n + 1].
    """
    num_carried = 0 if carry is None else carry.shape[1]
    packed = torch.empty(len(logits), num_carried + 1, dtype=torch.int64, device=logits.device)
    _launch(logits, None if carry is None else carry.contiguous(), packed, None, None, no_token)
    return packed


def feed_best(logits: Tensor, given: Tensor, place: Tensor, found: Tensor, no_token: int) -> None:
    """As `best_tokens`, and also write the tokens where the next step reads them.

    logits: float [entries, vocab], rows contiguous; given: int64 [entries,
    1]; place: int32 [2, entries]; found: int64 [entries].
    """
    _launch(logits, None, found[:, None], given, place, no_token)


def accept_best(
    logits: Tensor,
    proposed: Tensor,
    place: Tensor,
    stops: Tensor,
    anchors: Tensor,
    path: Tensor,
    found: Tensor,
    no_token: int,
) -> None:
    """Accept the chain of each entry as far as the best token of each row is the next row's token;
    see luceasync.pipeline.captured_round.Accept.

    logits: float [entries * rows, vocab], rows contiguous; proposed: int64 [entries, rows]; place,
    path: int32 [3, entries]; stops: int64 [entries, stops]; anchors: int64 [entries]; found: int64
    [entries, 1 + rows].
    """
    num_entries, num_rows = proposed.shape
    peaks, ids = _reduce_stretches(logits)
    num_stretches = peaks.shape[1]
    _entries_kernel[(num_entries,)](
        peaks,
        ids,
        proposed,
        place,
        stops,
        anchors,
        path,
        found,
        num_rows,
        num_stretches,
        STOPS=stops.shape[1],
        ROWS=triton.next_power_of_2(num_rows),
        BLOCK=triton.next_power_of_2(num_stretches),
        NO_TOKEN=no_token,
        num_warps=4,
        **overlap_options(logits),
    )


def _reduce_stretches(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The highest logit of each stretch of each row, and its lowest id: [rows, stretches] each."""
    num_rows, num_vocab = logits.shape
    num_stretches = triton.cdiv(num_vocab, STRETCH)
    peaks = torch.empty(num_rows, num_stretches, device=logits.device)
    ids = torch.empty(num_rows, num_stretches, dtype=torch.int32, device=logits.device)
    _stretches_kernel[(num_stretches, num_rows)](
        logits,
        peaks,
        ids,
        logits.stride(0),
        num_vocab,
        STRETCH=STRETCH,
        num_warps=8,
        **overlap_options(logits),
    )
    return peaks, ids


def _launch(
    logits: Tensor,
    carry: Tensor | None,
    packed: Tensor,
    given: Tensor | None,
    place: Tensor | None,
    no_token: int,
) -> None:
    """Launch both kernels. `given`, `place`: None if no tokens are fed."""
    peaks, ids = _reduce_stretches(logits)
    num_stretches, num_carried = peaks.shape[1], packed.shape[1] - 1
    _rows_kernel[(len(logits),)](
        peaks,
        ids,
        carry,
        packed,
        given,
        place,
        num_stretches,
        num_carried,
        BLOCK=triton.next_power_of_2(num_stretches),
        BLOCK_CARRIED=triton.next_power_of_2(max(num_carried, 1)),
        NO_TOKEN=no_token,
        num_warps=1,
        **overlap_options(logits),
    )


@triton.jit
def _highest(values, ids):
    """The highest value, and the lowest id among equals."""
    peak = tl.max(values, 0)
    return peak, tl.min(tl.where(values == peak, ids, 0x7FFFFFFF), 0)


@kernel()
def _stretches_kernel(
    logits, peaks, ids, stride, num_vocab, STRETCH: tl.constexpr, OVERLAP: tl.constexpr
):
    start_next(OVERLAP)
    stretch, row = tl.program_id(0), tl.program_id(1)
    token = stretch * STRETCH + tl.arange(0, STRETCH)
    wait_for_inputs(OVERLAP)
    at = logits + row.to(tl.int64) * stride + token
    value = tl.load(at, mask=token < num_vocab, other=float("-inf")).to(tl.float32)
    # Comparisons with NaN are false: a row of NaNs has no token.
    peak, best = _highest(tl.where(value == value, value, float("inf")), token)
    place = row * tl.num_programs(0) + stretch
    tl.store(peaks + place, peak)
    tl.store(ids + place, best)


@kernel()
def _rows_kernel(
    peaks,
    ids,
    carry,
    packed,
    given,
    place,
    num_stretches,
    num_carried,
    BLOCK: tl.constexpr,
    BLOCK_CARRIED: tl.constexpr,
    NO_TOKEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    row = tl.program_id(0)
    stretch, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK_CARRIED)
    ok, found = stretch < num_stretches, row * num_stretches + stretch
    wait_for_inputs(OVERLAP)
    peak = tl.load(peaks + found, mask=ok, other=float("-inf"))
    peak, best = _highest(peak, tl.load(ids + found, mask=ok, other=0x7FFFFFFF))
    is_number = (peak > float("-inf")) & (peak < float("inf"))
    packed += row * (num_carried + 1)
    best = tl.where(is_number, best, NO_TOKEN).to(tl.int64)
    if place is not None:
        is_lane = tl.load(place + row) >= 0
        position = place + tl.num_programs(0) + row
        tl.store(position, tl.load(position) + 1, mask=is_lane)
        tl.store(given + row, tl.maximum(best, 0), mask=is_lane)
        best = tl.where(is_lane, best, 0)
    tl.store(packed + num_carried, best)
    if carry is not None:
        ok = column < num_carried
        carried = tl.load(carry + row * num_carried + column, mask=ok)
        tl.store(packed + column, carried, mask=ok)


@kernel()
def _entries_kernel(
    peaks,
    ids,
    proposed,
    place,
    stops,
    anchors,
    path,
    found,
    num_rows,
    num_stretches,
    STOPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NO_TOKEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    entry, num_entries = tl.program_id(0), tl.num_programs(0)
    r, stretch = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    first = entry * num_rows
    at = (first + r)[:, None] * num_stretches + stretch[None, :]
    ok = (r < num_rows)[:, None] & (stretch < num_stretches)[None, :]
    wait_for_inputs(OVERLAP)
    peak = tl.load(peaks + at, mask=ok, other=float("-inf"))
    id = tl.load(ids + at, mask=ok, other=0x7FFFFFFF)
    highest = tl.max(peak, 1)
    best = tl.min(tl.where(peak == highest[:, None], id, 0x7FFFFFFF), 1).to(tl.int64)
    is_number = (highest > float("-inf")) & (highest < float("inf"))
    best = tl.where(is_number, best, NO_TOKEN)
    following = tl.load(proposed + first + r + 1, mask=r + 1 < num_rows, other=NO_TOKEN)
    lane = tl.load(place + entry)
    begin = tl.load(place + num_entries + entry)
    num_left = tl.load(place + 2 * num_entries + entry)
    stop = tl.load(stops + entry * STOPS + tl.arange(0, STOPS))
    ends = (tl.max((best[:, None] == stop[None, :]).to(tl.int32), 1) > 0) | (best == NO_TOKEN)
    ends |= r + 1 >= num_left
    is_last = (r < num_rows) & (ends | (best != following) | (r + 1 == num_rows))
    count = tl.min(tl.where(is_last, r, ROWS), 0) + 1
    last = tl.sum(tl.where(r == count - 1, best, 0), 0)
    has_ended = tl.sum(tl.where(r == count - 1, ends.to(tl.int32), 0), 0) > 0
    is_lane = lane >= 0
    count = tl.where(is_lane, count, 0)
    tl.store(path + entry, lane)
    tl.store(path + num_entries + entry, begin)
    tl.store(path + 2 * num_entries + entry, count)
    tl.store(place + entry, -1, mask=has_ended)
    tl.store(place + num_entries + entry, begin + count)
    tl.store(place + 2 * num_entries + entry, num_left - count)
    tl.store(anchors + entry, tl.maximum(last, 0), mask=is_lane)
    found += entry * (num_rows + 1)
    tl.store(found, count.to(tl.int64))
    tl.store(found + 1 + r, best, mask=r < num_rows)
