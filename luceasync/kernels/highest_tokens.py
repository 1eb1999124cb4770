"""The highest logits of every row in order, and the total mass of the row: four small kernels,
where torch needs a dozen large ones. The first two find a bound that slightly more logits reach
than are wanted; the third collects these and sums the mass; the fourth sorts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import overlap_options, start_next, wait_for_inputs

# A row is divided into groups. At least n logits reach the n-th highest of the group maxima, so
# that is a lower bound of the n highest logits. If many more than n logits exceed it, the kernels
# take longer, and stay exact.
MOST_MEMBERS = 64  # of a group
MOST_GROUPS = 16384  # held by one program
STRETCH = 2048  # logits per program
NUM_RANKERS = 128  # programs that sort a row

# In float32, as in luceasync.ranking.local: the integer that stands for a weight of 1 in sums.
_ONE = tl.constexpr(2.0**42)
_NOTHING = tl.constexpr(-(2**63))  # sorts after every logit
_LOWEST = tl.constexpr(-(2**31))  # its upper half

# The words behind the groups in the scratch of a row.
_NUM_FOUND, _MASS, _PEAK, _BOUND = (tl.constexpr(i) for i in range(4))
_NUM_WORDS = tl.constexpr(4)


def highest_tokens(
    logits: Tensor,
    carry: Tensor | None,
    num_ranked: int,
    mass_at: Sequence[float],
    no_token: int,
) -> Tensor:
    """The highest tokens of each row, as luceasync.ranking.local.HighestTokens describes them.

    logits: float [rows, vocab], rows contiguous; carry: int64 [rows, n];
    mass_at: float32 numbers. Returns float64 [rows, n + 2 + 2 * min(num_ranked, vocab)].
    """
    num_rows, num_vocab = logits.shape
    num_ranked = min(num_ranked, num_vocab)
    num_members, num_groups = groups_of(num_vocab, num_ranked)
    device = logits.device
    # Per row: the groups, a few words, the logits that equal the bound, and those above it.
    pitch = num_groups + _NUM_WORDS.value + num_ranked + num_vocab
    scratch = torch.empty(num_rows, pitch, dtype=torch.int64, device=device)
    num_carried = 0 if carry is None else carry.shape[1]
    width = num_carried + 2 + 2 * num_ranked
    packed = torch.empty(num_rows, width, dtype=torch.float64, device=device)
    temperature, temperatures = _temperatures(mass_at, device)
    sizes, options = (num_vocab, num_groups, num_ranked), overlap_options(logits)
    _find_bounds(logits, scratch, num_members, sizes, options)
    _collect_kernel[(triton.cdiv(num_vocab, STRETCH), num_rows)](
        logits,
        scratch,
        temperatures,
        temperature,
        logits.stride(0),
        *sizes,
        STRETCH=STRETCH,
        num_warps=4,
        **options,
    )
    _order_kernel[(NUM_RANKERS, num_rows)](
        scratch,
        None if carry is None else carry.contiguous(),
        packed,
        *sizes,
        num_carried,
        MINE=16,
        OTHERS=512,
        BLOCK_CARRIED=triton.next_power_of_2(max(num_carried, 1)),
        NO_TOKEN=no_token,
        num_warps=4,
        **options,
    )
    return packed


def _find_bounds(
    logits: Tensor,
    scratch: Tensor,
    num_members: int,
    sizes: tuple[int, int, int],
    options: dict[str, Any],
) -> None:
    """`sizes`: of a row, of its groups, and the number wanted."""
    num_rows, num_groups = len(logits), sizes[1]
    width = STRETCH // num_members
    _groups_kernel[(triton.cdiv(num_groups, width), num_rows)](
        logits,
        scratch,
        logits.stride(0),
        *sizes,
        MEMBERS=num_members,
        WIDTH=width,
        num_warps=4,
        **options,
    )
    block = triton.next_power_of_2(num_groups)
    num_warps = min(max(block // 512, 1), 16)
    _bound_kernel[(num_rows,)](scratch, *sizes, BLOCK=block, num_warps=num_warps, **options)


def groups_of(num_vocab: int, num_ranked: int) -> tuple[int, int]:
    """(logits of a group, a power of 2; number of groups). There are at least twice as many groups
    as logits are wanted, if the row has as many, so that few more exceed the bound.
    """
    num_members = MOST_MEMBERS
    while num_members > 1 and num_vocab < 2 * num_ranked * num_members:
        num_members //= 2
    while num_vocab > MOST_GROUPS * num_members:
        num_members *= 2
    # Whole memory lines. Adjacent logits, which may be high together, are in different groups.
    return num_members, triton.cdiv(triton.cdiv(num_vocab, num_members), 32) * 32


def _temperatures(mass_at: Sequence[float], device: torch.device) -> tuple[float, Tensor | None]:
    """One value for all rows (0: no mass is wanted), or one for each."""
    if len(set(mass_at)) < 2:
        return next(iter(mass_at), 0.0), None
    values = torch.tensor(mass_at, dtype=torch.float32)
    return 0.0, values.to(device, non_blocking=True)


@triton.jit
def _ordered(value, token, is_token):
    """An int64 sort key, highest first: by value, NaN first, zeros equal; then by token."""
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(key == -1, 0, key)  # -0.0
    key = tl.where(value == value, key, 0x7FFFFFFF)
    both = (key.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    return tl.where(is_token, both, _NOTHING)


@triton.jit
def _value_of(place):
    key = (place >> 32).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _token_of(place):
    return 0x7FFFFFFF - (place & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _row_of(scratch, row, num_vocab, num_groups, num_ranked):
    """Pointers to a row's groups, words, logits that equal the bound, and logits above it."""
    pitch = num_groups + _NUM_WORDS + num_ranked + num_vocab
    groups = scratch + row.to(tl.int64) * pitch
    words = groups + num_groups
    return groups, words, words + _NUM_WORDS, words + _NUM_WORDS + num_ranked


@kernel(do_not_specialize=["num_ranked"])
def _groups_kernel(
    logits,
    scratch,
    stride,
    num_vocab,
    num_groups,
    num_ranked,
    MEMBERS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The maximum of each group; token t is in group t % num_groups."""
    start_next(OVERLAP)
    row = tl.program_id(1)
    groups, _, _, _ = _row_of(scratch, row, num_vocab, num_groups, num_ranked)
    group = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    token = tl.arange(0, MEMBERS)[:, None] * num_groups + group[None, :]
    is_token = (group < num_groups)[None, :] & (token < num_vocab)
    wait_for_inputs(OVERLAP)
    at = logits + row.to(tl.int64) * stride + token
    value = tl.load(at, mask=is_token, other=float("-inf")).to(tl.float32)
    highest = tl.max(_ordered(value, token, is_token), 0)
    tl.store(groups + group, highest, mask=group < num_groups)


@kernel(do_not_specialize=["num_ranked"])
def _bound_kernel(
    scratch, num_vocab, num_groups, num_ranked, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Find the bound: the maxima of enough groups reach it, and of few more; with many equal ones,
    the highest such number. _LOWEST if there are fewer groups.
    """
    start_next(OVERLAP)
    row = tl.program_id(0)
    groups, words, _, _ = _row_of(scratch, row, num_vocab, num_groups, num_ranked)
    group = tl.arange(0, BLOCK)
    wait_for_inputs(OVERLAP)
    highest = tl.load(groups + group, mask=group < num_groups, other=_NOTHING)
    key, is_group = (highest >> 32).to(tl.int32), highest != _NOTHING
    # `num_reaching` groups reach `bound`; fewer than wanted reach `missed`.
    num_reaching, most = tl.sum(is_group.to(tl.int32), 0), num_ranked + num_ranked // 8
    bound = tl.min(tl.where(is_group, key, 0x7FFFFFFF), 0).to(tl.int64)
    bound = tl.where(num_reaching >= num_ranked, bound, _LOWEST)
    missed = tl.max(key, 0).to(tl.int64) + 1
    while (num_reaching > most) & (missed - bound > 1):
        middle = (bound + missed) >> 1
        num_higher = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 0)
        is_reached = num_higher >= num_ranked
        bound = tl.where(is_reached, middle, bound)
        missed = tl.where(is_reached, missed, middle)
        num_reaching = tl.where(is_reached, num_higher, num_reaching)
    tl.store(words + _NUM_FOUND, tl.zeros((), tl.int64))
    tl.store(words + _MASS, tl.zeros((), tl.int64))
    tl.store(words + _PEAK, tl.max(highest, 0))
    tl.store(words + _BOUND, bound)


@kernel(do_not_specialize=["num_ranked"])
def _collect_kernel(
    logits,
    scratch,
    temperatures,
    temperature,
    stride,
    num_vocab,
    num_groups,
    num_ranked,
    STRETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    row = tl.program_id(1)
    _, words, equals, aboves = _row_of(scratch, row, num_vocab, num_groups, num_ranked)
    token = tl.program_id(0) * STRETCH + tl.arange(0, STRETCH)
    is_token = token < num_vocab
    wait_for_inputs(OVERLAP)
    at = logits + row.to(tl.int64) * stride + token
    value = tl.load(at, mask=is_token, other=float("-inf")).to(tl.float32)
    bound = tl.load(words + _BOUND).to(tl.int32)
    ordered = _ordered(value, token, is_token)
    key = (ordered >> 32).to(tl.int32)
    is_above, is_equal = key > bound, (key == bound) & is_token
    # One atomic number counts both, so the order of programs does not matter.
    each = is_above.to(tl.int64) + (is_equal.to(tl.int64) << 32)
    before = tl.atomic_add(words + _NUM_FOUND, tl.sum(each, 0), sem="relaxed")
    place = before + tl.cumsum(each, 0) - each
    num_equal = place >> 32
    tl.store(aboves + (place & 0x7FFFFFFF), ordered, mask=is_above)
    tl.store(equals + num_equal, ordered, mask=is_equal & (num_equal < num_ranked))
    if temperatures is not None:
        temperature = tl.load(temperatures + row)
    if temperature > 0:
        below = value - _value_of(tl.load(words + _PEAK))
        weight = tl.exp(tl.div_rn(below, tl.zeros_like(below) + temperature))
        mass = tl.sum((weight * _ONE).to(tl.int64), 0)
        tl.atomic_add(words + _MASS, mass, sem="relaxed")


@kernel(do_not_specialize=["num_ranked", "num_carried"])
def _order_kernel(
    scratch,
    carry,
    packed,
    num_vocab,
    num_groups,
    num_ranked,
    num_carried,
    MINE: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK_CARRIED: tl.constexpr,
    NO_TOKEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    part, row = tl.program_id(0), tl.program_id(1)
    _, words, equals, aboves = _row_of(scratch, row, num_vocab, num_groups, num_ranked)
    packed += row.to(tl.int64) * (num_carried + 2 + 2 * num_ranked)
    values = packed + num_carried + 2
    ids = values + num_ranked
    wait_for_inputs(OVERLAP)
    num_found = tl.load(words + _NUM_FOUND)
    num_above, num_equal = (num_found & 0x7FFFFFFF).to(tl.int32), (num_found >> 32).to(tl.int32)
    # A logit above the bound: its place is the number of those before it.
    for begin in range(part * MINE, num_above, tl.num_programs(0) * MINE):
        at = begin + tl.arange(0, MINE)
        mine = tl.load(aboves + at, mask=at < num_above, other=_NOTHING)
        counts = tl.zeros((MINE, OTHERS), tl.int32)
        for other in range(0, num_above, OTHERS):
            others = other + tl.arange(0, OTHERS)
            others = tl.load(aboves + others, mask=others < num_above, other=_NOTHING)
            counts += (others[None, :] > mine[:, None]).to(tl.int32)
        place = tl.sum(counts, 1)
        ok = (at < num_above) & (place < num_ranked)
        tl.store(values + place, _value_of(mine).to(tl.float64), mask=ok)
        tl.store(ids + place, _token_of(mine).to(tl.float64), mask=ok)
    # Of those that equal it, as many as are missing, in any order.
    num_missing = tl.minimum(num_equal, num_ranked - num_above)
    for begin in range(part * OTHERS, num_missing, tl.num_programs(0) * OTHERS):
        at = begin + tl.arange(0, OTHERS)
        mine = tl.load(equals + at, mask=at < num_missing, other=0)
        place, ok = num_above + at, at < num_missing
        tl.store(values + place, _value_of(mine).to(tl.float64), mask=ok)
        tl.store(ids + place, _token_of(mine).to(tl.float64), mask=ok)
    if part == 0:
        peak = tl.load(words + _PEAK)
        is_number = tl.abs(_value_of(peak)) < float("inf")
        best = tl.where(is_number, _token_of(peak), NO_TOKEN)
        mass = tl.load(words + _MASS).to(tl.float64) * (1 / _ONE)
        tl.store(packed + num_carried, best.to(tl.float64))
        tl.store(packed + num_carried + 1, mass)
        if carry is not None:
            column = tl.arange(0, BLOCK_CARRIED)
            ok = column < num_carried
            carried = tl.load(carry + row * num_carried + column, mask=ok)
            tl.store(packed + column, carried.to(tl.float64), mask=ok)
