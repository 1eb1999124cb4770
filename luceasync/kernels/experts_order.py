"""The order in which many rows meet their experts: choices sorted by expert, then by row, and tiles
of one expert that products process.

A counting sort in two launches: blocks of rows count their choices, then each finds where its own
begin. Only integers are counted, so the order is that of a stable sort.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.experts_routing import NO_MATRIX
from luceasync.kernels.kernel import kernel

BLOCK_ROWS, ROWS = 64, 16  # whose choices a program counts, and of these at once
COUNTED = 16  # blocks whose counts are read at once
LISTING = 16  # programs that list tiles


class ExpertTiles(NamedTuple):
    """Places in tiles of one expert.

    listed: int32 [.., 3], a matrix, NO_MATRIX if the tile is not used, and the places [begin, end)
    of its rows, as many as there could be; bounds: int32 [experts + 1], where the tiles of each
    expert begin.
    """

    listed: Tensor
    bounds: Tensor


class ExpertOrder(NamedTuple):
    """Choices in their order, int32, see Choice; and their tiles."""

    rows: Tensor
    places: Tensor
    bounds: Tensor
    tiles: ExpertTiles


def order(experts: Tensor, num_experts: int, tile_rows: int) -> ExpertOrder:
    """The order of int32 experts [n, k], all different in a row, in tiles of `tile_rows`."""
    (num_rows, num_chosen), num_places = experts.shape, experts.numel()
    num_blocks = triton.cdiv(num_rows, BLOCK_ROWS)
    counts = experts.new_empty(num_blocks, num_experts)
    rows, places = experts.new_empty(num_places), torch.empty_like(experts)
    bounds = experts.new_empty(num_experts + 1)
    tiles = _new_tiles(bounds, num_places, tile_rows)
    constants = {
        "NUM_CHOSEN": num_chosen,
        "WIDTH": triton.next_power_of_2(num_experts),
        "BLOCK_ROWS": BLOCK_ROWS,
        "ROWS": ROWS,
        "num_warps": 8,
    }
    sizes, grid = (num_rows, num_experts), (num_blocks, 1, 1)
    _count_choices_kernel.launch(grid, experts, counts, *sizes, **constants)
    constants |= {"COUNTED": COUNTED, "TILE": tile_rows, "NONE": NO_MATRIX}
    found = rows, places, bounds, *tiles
    _order_choices_kernel.launch(
        grid, experts, counts, *found, *sizes, len(tiles.listed), **constants
    )
    return ExpertOrder(rows, places, bounds, tiles)


def tiles_of(bounds: Tensor, num_places: int, tile_rows: int) -> ExpertTiles:
    """The tiles of `tile_rows` of sorted places. bounds: int32 [experts + 1], see Choice."""
    num_experts = len(bounds) - 1
    found = _new_tiles(bounds, num_places, tile_rows)
    _list_tiles_kernel.launch(
        (LISTING, 1, 1),
        bounds,
        *found,
        num_experts,
        len(found.listed),
        TILE=tile_rows,
        NONE=NO_MATRIX,
        WIDTH=triton.next_power_of_2(num_experts),
        num_warps=4,
    )
    return found


def _new_tiles(bounds: Tensor, num_places: int, tile_rows: int) -> ExpertTiles:
    most = min(num_places, num_places // tile_rows + len(bounds) - 1)
    return ExpertTiles(bounds.new_empty(most, 3), torch.empty_like(bounds))


@kernel(do_not_specialize=["num_rows"])
def _count_choices_kernel(
    experts,
    counts,
    num_rows,
    num_experts,
    NUM_CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """counts: int32 [blocks, experts]."""
    expert = tl.arange(0, WIDTH)
    num_of = tl.zeros([WIDTH], tl.int32)
    for first in range(0, BLOCK_ROWS, ROWS):
        row = tl.program_id(0) * BLOCK_ROWS + first + tl.arange(0, ROWS)
        is_chosen = _orders_of(experts, row, num_rows, NUM_CHOSEN, WIDTH, ROWS) >= 0
        num_of += tl.sum(is_chosen.to(tl.int32), 0)
    tl.store(counts + tl.program_id(0) * num_experts + expert, num_of, mask=expert < num_experts)


@kernel(do_not_specialize=["num_rows", "num_tiles"])
def _order_choices_kernel(
    experts,
    counts,
    rows,
    places,
    bounds,
    tiles,
    tile_bounds,
    num_rows,
    num_experts,
    num_tiles,
    COUNTED: tl.constexpr,
    TILE: tl.constexpr,
    NONE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    expert = tl.arange(0, WIDTH)
    expert_ok = expert < num_experts
    before = tl.zeros([WIDTH], tl.int32)  # choices of rows of earlier blocks
    num_of = tl.zeros([WIDTH], tl.int32)
    for first in range(0, num_programs, COUNTED):
        block = first + tl.arange(0, COUNTED)[:, None]
        ok = (block < num_programs) & expert_ok[None, :]
        each = tl.load(counts + block * num_experts + expert[None, :], mask=ok, other=0)
        num_of += tl.sum(each, 0)
        before += tl.sum(tl.where(block < program, each, 0), 0)
    ends = tl.cumsum(num_of, 0)
    begin = ends - num_of

    own = begin + before
    for first in range(0, BLOCK_ROWS, ROWS):
        row = program * BLOCK_ROWS + first + tl.arange(0, ROWS)
        choice = _orders_of(experts, row, num_rows, NUM_CHOSEN, WIDTH, ROWS)
        is_chosen = choice >= 0
        ones = is_chosen.to(tl.int32)
        place = own[None, :] + tl.cumsum(ones, 0) - ones
        tl.store(rows + place, row[:, None] + expert[None, :] * 0, mask=is_chosen)
        tl.store(places + row[:, None] * NUM_CHOSEN + choice, place, mask=is_chosen)
        own += tl.sum(ones, 0)

    if program == 0:
        tl.store(bounds, 0)
        tl.store(bounds + 1 + expert, ends, mask=expert_ok)
    _list_tiles(begin, ends, tiles, tile_bounds, num_experts, num_tiles, TILE, NONE, WIDTH)


@triton.jit
def _orders_of(
    experts, row, num_rows, NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """Which of a row's choices each expert is: [ROWS, WIDTH]; -1: none."""
    expert = tl.arange(0, WIDTH)[None, :]
    found = tl.full([ROWS, WIDTH], -1, tl.int32)
    for j in tl.static_range(NUM_CHOSEN):
        own = tl.load(experts + row * NUM_CHOSEN + j, mask=row < num_rows, other=-1)
        found = tl.where(own[:, None] == expert, j, found)
    return found


@kernel(do_not_specialize=["num_tiles"])
def _list_tiles_kernel(
    bounds,
    tiles,
    tile_bounds,
    num_experts,
    num_tiles,
    TILE: tl.constexpr,
    NONE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    expert = tl.arange(0, WIDTH)
    ok = expert < num_experts
    begin = tl.load(bounds + expert, mask=ok, other=0)
    end = tl.load(bounds + expert + 1, mask=ok, other=0)
    _list_tiles(begin, end, tiles, tile_bounds, num_experts, num_tiles, TILE, NONE, WIDTH)


@triton.jit
def _list_tiles(
    begin,
    end,
    tiles,
    tile_bounds,
    num_experts,
    num_tiles,
    TILE: tl.constexpr,
    NONE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Every program writes some of each expert's tiles, and of those that are not used."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    expert = tl.arange(0, WIDTH)
    count = (end - begin + TILE - 1) // TILE
    last = tl.cumsum(count, 0)
    if program == 0:
        tl.store(tile_bounds, 0)
        tl.store(tile_bounds + 1 + expert, last, mask=expert < num_experts)
    for i in range(program, tl.max(count, 0), num_programs):
        at, is_own = tiles + 3 * (last - count + i), i < count
        tl.store(at, expert, mask=is_own)
        tl.store(at + 1, begin + TILE * i, mask=is_own)
        tl.store(at + 2, tl.minimum(begin + TILE * (i + 1), end), mask=is_own)
    for first in range(program * WIDTH, num_tiles, num_programs * WIDTH):
        number = first + expert
        is_unused = (number >= tl.sum(count, 0)) & (number < num_tiles)
        tl.store(tiles + 3 * number, NONE + number * 0, mask=is_unused)
