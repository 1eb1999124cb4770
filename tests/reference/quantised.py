"""Quantised modules of checkpoints, number by number: how each format lays codes, scales and zero
points into tensors, and the float32 number that each of them stands for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Module = tuple[dict[str, Tensor], Tensor]  # tensors below the module's name, and its numbers
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of output 8 n + i in its word, in steps of 4 bits


def words(numbers: list[list[int]], bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Rows of codes in int32 words."""
    per_word = 32 // bits
    places = places or tuple(range(per_word))
    rows = []
    for row in numbers:
        row = row + [0] * (-len(row) % per_word)
        starts = range(0, len(row), per_word)
        sums = [sum(row[s + i] << (bits * places[i]) for i in range(per_word)) for s in starts]
        rows.append([value - (1 << 32) if value >= 1 << 31 else value for value in sums])
    return torch.tensor(rows, dtype=torch.int32)


def random_codes(rows: int, columns: int, limit: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, limit, (rows, columns), generator=generator).tolist()


def random_scales(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 100)
    return (torch.rand(rows, columns, generator=generator) * 0.01 + 1e-3).to(dtype)


def fill(rows: int, columns: int, number: Callable[[int, int], float]) -> Tensor:
    """float32, each entry by itself."""
    return torch.tensor([[number(r, c) for c in range(columns)] for r in range(rows)])


def _transposed(matrix: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*matrix, strict=True)]


def awq(rows: int, columns: int, group: int, seed: int = 0) -> Module:
    """w = (q - z) s; words along the outputs."""
    codes, groups = random_codes(rows, columns, 16, seed), columns // group
    zeros = random_codes(rows, groups, 16, seed + 1)
    scales = random_scales(rows, groups, torch.float16, seed)
    tensors = {
        "qweight": words(_transposed(codes), 4, AWQ_PLACES),
        "qzeros": words(_transposed(zeros), 4, AWQ_PLACES),
        "scales": scales.t().contiguous(),
    }
    numbers = fill(
        rows,
        columns,
        lambda r, c: (codes[r][c] - zeros[r][c // group]) * scales[r, c // group].item(),
    )
    return tensors, numbers


def gptq(rows: int, columns: int, group: int, bits: int = 4, seed: int = 0) -> Module:
    """w = (q - (z + 1)) s; words of codes along the inputs, of zero points along the outputs."""
    limit, groups = 1 << bits, columns // group
    codes, zeros = (
        random_codes(rows, columns, limit, seed),
        random_codes(rows, groups, limit - 1, seed),
    )
    scales = random_scales(rows, groups, torch.float16, seed)
    tensors = {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words(_transposed(zeros), bits),
        "scales": scales.t().contiguous(),
        "g_idx": torch.tensor([c // group for c in range(columns)], dtype=torch.int32),
    }
    numbers = fill(
        rows,
        columns,
        lambda r, c: (codes[r][c] - zeros[r][c // group] - 1) * scales[r, c // group].item(),
    )
    return tensors, numbers


def pack_quantized(
    rows: int, columns: int, group: int, bits: int = 4, *, zeros: bool = False, seed: int = 0
) -> Module:
    """w = (q - z) s, both stored half of their range higher; without z, z = 0."""
    limit, groups, half = 1 << bits, columns // group, 1 << (bits - 1)
    codes = random_codes(rows, columns, limit, seed)
    points = random_codes(rows, groups, limit, seed + 1) if zeros else [[half] * groups] * rows
    scales = random_scales(rows, groups, torch.bfloat16, seed)
    tensors = {"weight_packed": words(codes, bits), "weight_scale": scales}
    tensors["weight_shape"] = torch.tensor([rows, columns])
    if zeros:
        tensors["weight_zero_point"] = words(_transposed(points), bits).t().contiguous()
    numbers = fill(
        rows,
        columns,
        lambda r, c: (
            ((codes[r][c] - half) - (points[r][c // group] - half)) * scales[r, c // group].item()
        ),
    )
    return tensors, numbers


def e4m3(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Random ones, none of them a NaN."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * 40).to(torch.float8_e4m3fn)


def fp8_blocks(rows: int, columns: int, block: int, dtype: torch.dtype, seed: int = 0) -> Module:
    """w = c s, s of each square."""
    codes = e4m3(rows, columns, seed)
    scales = random_scales(-(-rows // block), -(-columns // block), dtype, seed)
    by_number = codes.float()
    numbers = fill(
        rows,
        columns,
        lambda r, c: (by_number[r, c] * scales[r // block, c // block].float()).item(),
    )
    return {"weight": codes, "weight_scale_inv": scales}, numbers


def fp8_rows(rows: int, columns: int, seed: int = 0) -> Module:
    """w = c s, s of each row."""
    codes, scales = e4m3(rows, columns, seed), random_scales(rows, 1, torch.bfloat16, seed)
    by_number = codes.float()
    numbers = fill(rows, columns, lambda r, c: (by_number[r, c] * scales[r, 0].float()).item())
    return {"weight": codes, "weight_scale": scales}, numbers


def fp8_matrix(rows: int, columns: int, seed: int = 0) -> Module:
    """w = c s, one s."""
    codes, scale = e4m3(rows, columns, seed), torch.tensor(0.0071)
    by_number = codes.float()
    numbers = fill(rows, columns, lambda r, c: (by_number[r, c] * scale).item())
    return {"weight": codes, "weight_scale": scale}, numbers


def int8_rows(rows: int, columns: int, seed: int = 0) -> Module:
    """w = c s, s of each row."""
    codes = torch.tensor(random_codes(rows, columns, 256, seed)) - 128
    scales = random_scales(rows, 1, torch.bfloat16, seed)
    numbers = fill(rows, columns, lambda r, c: codes[r, c].item() * scales[r, 0].item())
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, numbers


def _e2m1(code: int) -> float:
    return -E2M1[code - 8] if code >= 8 else E2M1[code]


def _pairs(codes: list[list[int]]) -> Tensor:
    """Two codes in a byte, the even column below."""
    pairs = [[row[c] | row[c + 1] << 4 for c in range(0, len(row), 2)] for row in codes]
    return torch.tensor(pairs, dtype=torch.uint8)


def mxfp4(rows: int, columns: int, seed: int = 0) -> Module:
    """w = c 2^(e - 127), e of 32 columns."""
    codes = random_codes(rows, columns, 16, seed)
    exponents = random_codes(rows, columns // 32, 40, seed + 1)
    exponents = [[100 + e for e in row] for row in exponents]
    scales = torch.tensor(exponents, dtype=torch.uint8)
    numbers = fill(
        rows, columns, lambda r, c: _e2m1(codes[r][c]) * 2.0 ** (exponents[r][c // 32] - 127)
    )
    return {"weight_packed": _pairs(codes), "weight_scale": scales}, numbers


def nvfp4(rows: int, columns: int, *, divided: bool, seed: int = 0) -> Module:
    """w = c (s / g) as compressed-tensors has it, w = c (s g) as modelopt has."""
    codes = random_codes(rows, columns, 16, seed)
    scales = e4m3(rows, columns // 16, seed + 1).float().abs().to(torch.float8_e4m3fn)
    matrix = torch.tensor([313.7 if divided else 0.000317])

    def number(r: int, c: int) -> float:
        scale = scales[r, c // 16].float()
        whole = scale / matrix[0] if divided else scale * matrix[0]
        return (torch.tensor(_e2m1(codes[r][c])) * whole).item()

    numbers = fill(rows, columns, number)
    if divided:
        names = ("weight_packed", "weight_scale", "weight_global_scale")
        return dict(zip(names, (_pairs(codes), scales, matrix), strict=True)), numbers
    names = ("weight", "weight_scale", "weight_scale_2")
    return dict(zip(names, (_pairs(codes), scales, matrix[0]), strict=True)), numbers
