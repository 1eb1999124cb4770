"""Quantised matrices as read by GPU kernels: the same bytes, in blocks of 16 rows and 64 columns,
so that what a lane of a tensor core multiplies is one load. Moves bits only."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from luceasync.kernels.quant_decode import Codes, Coding
from luceasync.kernels.quant_tiles import BLOCK_COLUMNS, BLOCK_ROWS, TiledMatrix
from luceasync.models.quant.ggml import FLOAT_4
from luceasync.models.quant.layout import QuantLayout
from luceasync.models.quant.packed import Packed

SLICE_BYTES = 1 << 26  # moved at once


def can_tile(layout: QuantLayout, num_rows: int, num_columns: int) -> bool:
    """Whether the matrix is whole blocks, each of whole groups or within one group."""
    widths = (layout.group or BLOCK_COLUMNS, layout.supergroup or BLOCK_COLUMNS)
    fits = all(width in (16, 32) or width % BLOCK_COLUMNS == 0 for width in widths)
    fits = fits and (layout.bits in (4, 8) or num_columns % (2 * BLOCK_COLUMNS) == 0)
    return fits and num_rows % BLOCK_ROWS == 0 and num_columns % BLOCK_COLUMNS == 0


def tile(packed: Packed) -> TiledMatrix:
    """Rearrange `packed` in its own memory, with at most SLICE_BYTES of scratch."""
    layout, (num_rows, num_columns) = packed.layout, packed.shape
    assert can_tile(layout, num_rows, num_columns), (
        f"{num_rows} x {num_columns} is not whole blocks"
    )
    coding = coding_of(layout)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    parts = BLOCK_COLUMNS // coding.group if coding.group in (16, 32) else 1

    def small(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return _of_lanes(tensor.view(torch.uint8), parts).view(words[parts])

    def supers(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else _of_lanes(tensor, 1)

    scales = supers(packed.scales)
    assert scales is not None
    return TiledMatrix(
        coding,
        num_rows,
        num_columns,
        _move(packed.codes.view(torch.uint8), _codes_of_8 if layout.bits == 8 else _codes_of_4)
        .flatten()
        .view(torch.int16)
        if layout.codes != "int8"
        else _biased(packed.codes).flatten().view(torch.int16),
        scales,
        None if packed.planes is None else _planes(packed.planes),
        small(packed.small_scales),
        supers(packed.minimums),
        small(packed.small_minimums),
    )


def coding_of(layout: QuantLayout) -> Coding:
    """The coding of a tiled matrix: int8 codes are biased to uint8, a table is words of four."""
    codes: Codes = "uint"
    table: tuple[int, ...] = ()
    if layout.table:
        codes = "e2m1" if layout.table == FLOAT_4 else "table"
        numbers = bytes(number + 128 for number in layout.table)
        table = struct.unpack("<4i", numbers)
    elif layout.codes != "uint":
        codes = "biased" if layout.codes == "int8" else "e4m3"
    return Coding(
        bits=layout.bits,
        codes=codes,
        zero=layout.zero if layout.bits < 8 else 0,
        group=layout.group or 0,
        supergroup=layout.supergroup or 0,
        is_e8m0=layout.scale == "e8m0",
        small=layout.small or "none",
        minimum=layout.minimum,
        has_small_minimums=layout.has_small_minimums,
        divides=layout.divides,
        table=table if codes == "table" else (),
    )


def _move(tensor: Tensor, moved: Callable[[Tensor], Tensor]) -> Tensor:
    """Rearrange row blocks of `tensor` in place, as many at a time as fit into a slice."""
    step = max(1, SLICE_BYTES // (tensor[0].nbytes * BLOCK_ROWS)) * BLOCK_ROWS
    for begin in range(0, len(tensor), step):
        rows = tensor[begin : begin + step]
        rows.view(-1).copy_(moved(rows).reshape(-1))
    return tensor


def _permuted(rows: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    return rows.reshape(-1, *shape).permute(0, *(1 + axis for axis in order))


# The 16 rows of a block are [far, near], 2 x 8; 16 columns each are [pair, eight, column], 4 x 2
# x 2, so that the numbers of x that a lane multiplies lie together.


def _codes_of_4(rows: Tensor) -> Tensor:
    """Of 64 columns 16 t + i, low halves of t = 0 and 1 share a byte, and those of t = 2 and 3."""
    blocks = rows.shape[1] * 2 // BLOCK_COLUMNS
    return _permuted(rows, (2, 8, blocks, 2, 4, 2, 2), (2, 1, 4, 5, 0, 6, 3))


def _codes_of_8(rows: Tensor) -> Tensor:
    """Like `_codes_of_4`, in two words: one of t = 0 and 1, one of t = 2 and 3."""
    blocks = rows.shape[1] // BLOCK_COLUMNS
    return _permuted(rows, (2, 8, blocks, 2, 2, 4, 2, 2), (2, 3, 1, 5, 6, 0, 7, 4))


def _biased(codes: Tensor) -> Tensor:
    rows = codes.view(torch.uint8)
    return _move(rows.bitwise_xor_(128), _codes_of_8)


def _of_lanes(tensor: Tensor, parts: int) -> Tensor:
    """[rows, parts of blocks] -> [row blocks, blocks, near, far, parts], in its own memory."""
    blocks = tensor.shape[1] // parts
    return _move(tensor, lambda rows: _permuted(rows, (2, 8, blocks, parts), (2, 1, 0, 3)))


def _planes(planes: Tensor) -> Tensor:
    """Gather the high bits of a lane's codes into words."""
    num_planes = planes.shape[1]

    def moved(rows: Tensor) -> Tensor:
        shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
        bits = (rows[..., None] >> shifts & 1).flatten(2)  # [rows, planes, columns]
        high = bits[:, 0] if num_planes == 1 else bits[:, 0] | bits[:, 1] << 1
        blocks = high.shape[1] // BLOCK_COLUMNS
        split = high.reshape(-1, 2, 8, blocks, 4, 4, 2, 2)  # .., quarter, pair, eight, column
        if num_planes == 1:  # nibbles of [eight, far], a bit for each quarter
            bits_of = split.permute(0, 3, 2, 5, 7, 6, 1, 4)
        else:  # bytes of [eight], two bits for each quarter
            bits_of = split.permute(0, 3, 2, 5, 1, 7, 6, 4)
        bits_of = bits_of.flatten(-3 if num_planes == 1 else -2).to(torch.int32)
        count = bits_of.shape[-1]
        at = torch.arange(count, dtype=torch.int32, device=rows.device) * num_planes
        words = (bits_of << at).sum(-1).to(torch.int16)  # [row blocks, blocks, 8, 4, of a lane]
        # What a lane needs of two adjacent blocks lies together.
        pairs = words.reshape(len(words), blocks // 2, 2, 32, -1).transpose(2, 3)
        return pairs.contiguous().view(torch.uint8)

    rows = planes.flatten(1)
    step = max(1, SLICE_BYTES // (16 * rows.shape[1] * 16)) * BLOCK_ROWS
    for begin in range(0, len(rows), step):
        part = planes[begin : begin + step]
        part.view(-1).copy_(moved(part).reshape(-1))
    return planes.view(-1).view(torch.int16)
