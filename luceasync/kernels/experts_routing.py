"""Routing of up to 64 rows to experts: the choice, and the list of tiles that products process.

Each row's experts are chosen by programs that see no other row, so its bits do not depend on
others. For few rows, the program that ends last lists the tiles; only integers are counted across
rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.experts_slots import SlotTable, matrices_of, table_state
from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import overlap_options, start_next, wait_for_inputs
from luceasync.kernels.quant_gemv_step import nothing

MAX_ROWS = 64
TILE_ROWS = 8  # of a tile, which has rows of one expert
NO_MATRIX = -1  # of a tile that is not used
LISTED_ROWS = 8  # up to this many rows, the last program that chooses also lists the tiles
LOWEST = tl.constexpr(-3e38)
TAKEN = tl.constexpr(-(1 << 31))  # less than LOWEST as an integer


def num_tiles(num_rows: int, num_chosen: int, num_experts: int) -> int:
    """The most tiles that this many rows can take."""
    num_places = num_rows * num_chosen
    distinct = min(num_places, num_experts)
    if num_rows <= TILE_ROWS:
        return distinct
    return (num_places + (TILE_ROWS - 1) * distinct) // TILE_ROWS


def choose(
    logits: Tensor,
    bias: Tensor | None,
    arrivals: Tensor,
    *,
    num_chosen: int,
    is_sigmoid: bool = False,
    is_normalised: bool = True,
    scale: float = 1.0,
    softcap: float = 0.0,
    has_shared: bool = False,
    table: SlotTable | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The experts of each row of float32 logits [n <= MAX_ROWS, experts], as
    luceasync.models.torch_experts.choose has them: weights, rows, places, bounds; tiles; and fills.

    tiles: int32 [num_tiles, 3]: a matrix, NO_MATRIX if the tile is not used, and the places [begin,
    end) of its rows. `has_shared`: one more matrix than there are experts has every row; its places
    follow all others. arrivals: int32 [1], which is 0. `table`: the experts are in host memory; for
    numbers of matrices and for fills see experts_slots.matrices_of; those in slots come first, then
    the shared one, number `slots`.
    """
    num_rows, num_experts = logits.shape
    assert num_rows <= MAX_ROWS, "few rows"
    logits = logits.contiguous()
    num_places = num_rows * num_chosen
    most = num_tiles(num_rows, num_chosen, num_experts)
    if has_shared:
        most += triton.cdiv(num_rows, TILE_ROWS)
    weights = torch.empty(num_rows, num_chosen, dtype=torch.float32, device=logits.device)
    places = torch.empty(num_rows, num_chosen, dtype=torch.int32, device=logits.device)
    orders = places.new_empty(num_rows, num_experts)
    rows = places.new_empty(num_places + (num_rows if has_shared else 0))
    bounds, tiles = places.new_empty(num_experts + 1), places.new_empty(most, 3)
    num_slots = 0 if table is None else len(table.expert_of)
    num_fills = min(num_places, num_experts, num_slots)
    fills = None if table is None else places.new_empty(num_fills, 2)
    slots: tuple[Tensor | None, ...] = (None,) * 6
    if table is not None:
        slots = table.slot_of, table.expert_of, table.used, table.clock, table.counts, table.shown
    constants = {
        "NUM_CHOSEN": num_chosen,
        "WIDTH": triton.next_power_of_2(num_experts),
        "ROWS": triton.next_power_of_2(num_rows),
        "TILE": TILE_ROWS,
        "TILES": triton.next_power_of_2(most),
        "NONE": NO_MATRIX,
        "SHARED": has_shared,
        "SLOTS": triton.next_power_of_2(num_slots) if num_slots else 0,
        "FILLS": triton.next_power_of_2(num_fills) if num_slots else 0,
    }
    sizes = num_rows, num_experts, most, num_slots, num_fills
    listed = (orders, rows, places, bounds, tiles, *slots, fills, *sizes)
    _choose_kernel[(num_rows,)](
        logits,
        bias,
        weights,
        None,
        arrivals,
        *listed,
        float(scale),
        float(softcap),
        SIGMOID=is_sigmoid,
        NORMALISED=is_normalised,
        CAPPED=softcap != 0,
        LISTS=num_rows <= LISTED_ROWS,
        num_warps=1,  # the order of sums depends on it
        **constants,
        **overlap_options(logits),
    )
    if num_rows > LISTED_ROWS:
        _list_kernel[(1,)](*listed, num_warps=8, **constants, **overlap_options(logits))
    return weights, rows, places, bounds, tiles, fills


def choose_alone(
    logits: Tensor,
    bias: Tensor | None,
    *,
    num_chosen: int,
    is_sigmoid: bool = False,
    is_normalised: bool = True,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The weights and int32 experts [n, k] of any number of rows, as in `choose`."""
    num_rows, num_experts = logits.shape
    weights = torch.empty(num_rows, num_chosen, dtype=torch.float32, device=logits.device)
    experts = torch.empty(num_rows, num_chosen, dtype=torch.int32, device=logits.device)
    _choose_kernel.launch(
        (num_rows, 1, 1),
        logits.contiguous(),
        bias,
        weights,
        experts,
        *(None,) * 13,
        num_rows,
        num_experts,
        0,
        0,
        0,
        float(scale),
        float(softcap),
        NUM_CHOSEN=num_chosen,
        WIDTH=triton.next_power_of_2(num_experts),
        ROWS=0,
        TILE=TILE_ROWS,
        TILES=0,
        NONE=NO_MATRIX,
        SIGMOID=is_sigmoid,
        NORMALISED=is_normalised,
        CAPPED=softcap != 0,
        SHARED=False,
        SLOTS=0,
        FILLS=0,
        LISTS=False,
        num_warps=1,
        **overlap_options(logits),
    )
    return weights, experts


@kernel(do_not_specialize=["num_rows", "num_tiles", "num_slots", "num_fills"])
def _choose_kernel(
    logits,
    bias,
    weights,
    experts,
    arrivals,
    orders,
    rows,
    places,
    bounds,
    tiles,
    slot_of,
    expert_of,
    used,
    clock,
    counts,
    shown,
    fills,
    num_rows,
    num_experts,
    num_tiles,
    num_slots,
    num_fills,
    scale,
    softcap,
    NUM_CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    NONE: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    CAPPED: tl.constexpr,
    SHARED: tl.constexpr,
    SLOTS: tl.constexpr,
    FILLS: tl.constexpr,
    LISTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """orders: int32 [rows, experts], which of a row's choices each expert is; -1: none."""
    start_next(OVERLAP)
    row = tl.program_id(0)
    expert = tl.arange(0, WIDTH)
    ok = expert < num_experts
    state = nothing()
    if SLOTS > 0:
        state = table_state(slot_of, clock, counts, num_experts, WIDTH)
    added = tl.zeros([WIDTH], tl.float32)
    if bias is not None:
        added = tl.load(bias + expert, mask=ok, other=0.0)
    wait_for_inputs(OVERLAP)
    score = tl.load(logits + row * num_experts + expert, mask=ok, other=float("-inf"))
    if CAPPED:  # tanh, also of infinity
        size = tl.exp(-2.0 * tl.abs(score / softcap))
        size = softcap * (1.0 - size) / (1.0 + size)
        score = tl.where(ok, tl.where(score < 0, -size, size), float("-inf"))
    if SIGMOID:
        score = tl.sigmoid(score)
    else:
        score = tl.exp(score - tl.max(score, 0))
        score = score / tl.sum(score, 0)
    # Integers that are in the order of the numbers.
    rank = score + added
    rank = tl.where(rank > LOWEST, rank, LOWEST) + 0.0  # NaN comes last; no -0
    bits = rank.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(ok, bits, TAKEN)
    order = tl.full([WIDTH], -1, tl.int32)
    for j in tl.static_range(NUM_CHOSEN):
        # Words of 4 bytes have the largest of a warp's in one instruction.
        here = expert == tl.min(tl.where(key == tl.max(key, 0), expert, WIDTH), 0)
        order = tl.where(here, j, order)
        key = tl.where(here, TAKEN, key)
    is_own = order >= 0
    if NORMALISED:
        score = score / tl.sum(tl.where(is_own, score, 0.0), 0)
    tl.store(weights + row * NUM_CHOSEN + order, score * scale, mask=is_own)
    if experts is not None:
        tl.store(experts + row * NUM_CHOSEN + order, expert, mask=is_own)
    elif ROWS == 1:
        _list_tiles(
            order[None, :],
            state,
            rows,
            places,
            bounds,
            tiles,
            slot_of,
            expert_of,
            used,
            clock,
            counts,
            shown,
            fills,
            num_rows,
            num_experts,
            num_tiles,
            num_slots,
            num_fills,
            NUM_CHOSEN,
            WIDTH,
            ROWS,
            TILE,
            TILES,
            NONE,
            SHARED,
            SLOTS,
            FILLS,
        )
    else:
        tl.store(orders + row * num_experts + expert, order, mask=ok)
        if LISTS:
            tl.debug_barrier()  # every thread has stored
            if tl.atomic_add(arrivals, 1, sem="acq_rel") == num_rows - 1:
                tl.store(arrivals, 0)
                _list_tiles(
                    _orders_of(orders, num_rows, num_experts, WIDTH, ROWS),
                    state,
                    rows,
                    places,
                    bounds,
                    tiles,
                    slot_of,
                    expert_of,
                    used,
                    clock,
                    counts,
                    shown,
                    fills,
                    num_rows,
                    num_experts,
                    num_tiles,
                    num_slots,
                    num_fills,
                    NUM_CHOSEN,
                    WIDTH,
                    ROWS,
                    TILE,
                    TILES,
                    NONE,
                    SHARED,
                    SLOTS,
                    FILLS,
                )


@kernel(do_not_specialize=["num_rows", "num_tiles", "num_slots", "num_fills"])
def _list_kernel(
    orders,
    rows,
    places,
    bounds,
    tiles,
    slot_of,
    expert_of,
    used,
    clock,
    counts,
    shown,
    fills,
    num_rows,
    num_experts,
    num_tiles,
    num_slots,
    num_fills,
    NUM_CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    NONE: tl.constexpr,
    SHARED: tl.constexpr,
    SLOTS: tl.constexpr,
    FILLS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    state = nothing()
    if SLOTS > 0:
        state = table_state(slot_of, clock, counts, num_experts, WIDTH)
    wait_for_inputs(OVERLAP)
    _list_tiles(
        _orders_of(orders, num_rows, num_experts, WIDTH, ROWS),
        state,
        rows,
        places,
        bounds,
        tiles,
        slot_of,
        expert_of,
        used,
        clock,
        counts,
        shown,
        fills,
        num_rows,
        num_experts,
        num_tiles,
        num_slots,
        num_fills,
        NUM_CHOSEN,
        WIDTH,
        ROWS,
        TILE,
        TILES,
        NONE,
        SHARED,
        SLOTS,
        FILLS,
    )


@triton.jit
def _orders_of(orders, num_rows, num_experts, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """The orders, including what other programs have stored."""
    row, expert = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    ok = (row < num_rows) & (expert < num_experts)
    at = orders + row * num_experts + expert
    return tl.load(at, mask=ok, other=-1, cache_modifier=".cg")


@triton.jit
def _list_tiles(
    order,
    state,
    rows,
    places,
    bounds,
    tiles,
    slot_of,
    expert_of,
    used,
    clock,
    counts,
    shown,
    fills,
    num_rows,
    num_experts,
    num_tiles,
    num_slots,
    num_fills,
    NUM_CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    NONE: tl.constexpr,
    SHARED: tl.constexpr,
    SLOTS: tl.constexpr,
    FILLS: tl.constexpr,
):
    """Sort all rows' choices by expert, and divide each expert's rows into tiles. order: int32
    [ROWS, WIDTH], see _choose_kernel.
    """
    expert, row = tl.arange(0, WIDTH), tl.arange(0, ROWS)
    row_ok = row < num_rows
    is_chosen = order >= 0
    ones = is_chosen.to(tl.int32)
    num_of = tl.sum(ones, 0)
    ends = tl.cumsum(num_of, 0)
    begin = ends - num_of
    place = begin[None, :] + tl.cumsum(ones, 0) - ones
    tl.store(rows + place, row[:, None] + expert[None, :] * 0, mask=is_chosen)
    tl.store(places + row[:, None] * NUM_CHOSEN + order, place, mask=is_chosen)
    tl.store(bounds, 0)
    tl.store(bounds + 1 + expert, ends, mask=expert < num_experts)

    matrix, last, is_far = expert, num_experts, expert < 0
    if SLOTS > 0:
        matrix = matrices_of(
            num_of > 0,
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
            num_fills,
            WIDTH,
            SLOTS,
            FILLS,
        )
        last, is_far = num_slots, matrix > num_slots
    count = (num_of + TILE - 1) // TILE
    near = tl.where(is_far, 0, count)
    if ROWS == 1 and SLOTS == 0:
        first, num_used = begin, NUM_CHOSEN  # each expert that is chosen has a place and a tile
    else:
        first, num_used = tl.cumsum(near, 0) - near, tl.sum(near, 0)
    number = tl.arange(0, TILES)
    if SHARED:
        num_places = num_rows * NUM_CHOSEN
        tl.store(rows + num_places + row, row, mask=row_ok)
        own = number - num_used
        ok = (own >= 0) & (own * TILE < num_rows)
        at = tiles + 3 * number
        tl.store(at, last + own * 0, mask=ok)
        tl.store(at + 1, num_places + own * TILE, mask=ok)
        tl.store(at + 2, num_places + tl.minimum(own * TILE + TILE, num_rows), mask=ok)
        num_used += (num_rows + TILE - 1) // TILE
    if SLOTS > 0:
        far = count - near
        first = tl.where(is_far, num_used + tl.cumsum(far, 0) - far, first)
        num_used += tl.sum(far, 0)
    for i in tl.static_range((ROWS + TILE - 1) // TILE):
        at, ok = tiles + 3 * (first + i), i < count
        tl.store(at, matrix, mask=ok)
        tl.store(at + 1, begin + TILE * i, mask=ok)
        tl.store(at + 2, tl.minimum(begin + TILE * (i + 1), ends), mask=ok)
    unused = (number >= num_used) & (number < num_tiles)
    tl.store(tiles + 3 * number, NONE + number * 0, mask=unused)
