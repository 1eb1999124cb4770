"""The kernel that gathers the tap rows of every lane into the ring of features.

Numbers are moved as bits: Numba has no bfloat16, and the same code runs on the GPU and in the
simulator. Narrowing rounds to nearest, ties to even. Importing this module imports numba.cuda.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numba import cuda  # a global, as the simulator swaps the module of a running kernel
from torch import Tensor

from luceasync.cuda.launch import CudaLauncher

Convert = Callable[[Any], Any]

BLOCK_THREADS = 128
WORDS_PER_THREAD = 8  # words of a row per thread, whose setup costs as much as several words
FP32_INF = 0x7F800000


class FeatureKernel:
    """Writes tap rows to a ring's store on one device, converted to its dtype.

    luceasync.speculation.dflash.features describes the arguments. The first call for each pair of
    dtypes and number of taps compiles.
    """

    def __init__(self, device: torch.device) -> None:
        """Raises ValueError for a device that cannot run CUDA kernels."""
        self._launcher = CudaLauncher(device)
        self._kernels: dict[tuple[torch.dtype, torch.dtype], Any] = {}

    def __call__(
        self,
        taps: Sequence[Tensor],
        lanes: Tensor,
        begins: Tensor,
        counts: Tensor,
        paths: Tensor,
        store: Tensor,
        capacity_tokens: int,
    ) -> Tensor:
        dtypes = (taps[0].dtype, store.dtype)
        kernel = self._kernels.get(dtypes) or self._built(dtypes)
        source, target = _typestrs(taps, store)
        view = self._launcher.view
        views = tuple(view(tap, source) for tap in taps)
        num_entries, max_rows = paths.shape
        num_rows = min(max_rows, capacity_tokens)
        width = views[0].shape[2]
        threads = min(width, BLOCK_THREADS)
        num_blocks = -(-width // (threads * WORDS_PER_THREAD))
        grid = (num_rows, num_blocks, num_entries * len(taps))
        rows = store.new_empty(num_entries, max_rows, store.shape[1])
        if 0 in grid:
            return rows
        self._launcher.launch(
            kernel,
            grid,
            threads,
            views,
            view(lanes, "<i4"),
            view(begins, "<i8"),
            view(counts, "<i4"),
            view(paths, "<i4"),
            view(store, target),
            view(rows, target),
            capacity_tokens,
        )
        return rows

    def _built(self, dtypes: tuple[torch.dtype, torch.dtype]) -> Any:
        source, target = dtypes
        same = source == target
        widen, narrow = (_same, _same) if same else (TO_FP32[source], FROM_FP32[target])
        self._kernels[dtypes] = build_kernel(widen, narrow)
        return self._kernels[dtypes]


def _typestrs(taps: Sequence[Tensor], store: Tensor) -> tuple[str, str]:
    """The items that a thread moves: numbers, or, without a conversion, the widest words that every
    row consists of and is aligned to.
    """
    source_bytes, target_bytes = taps[0].element_size(), store.element_size()
    if taps[0].dtype != store.dtype:
        return f"<u{source_bytes}", f"<u{target_bytes}"
    spans = taps[0].shape[2] * source_bytes
    for tap in taps:
        spans |= tap.data_ptr()
    word_bytes = min(spans & -spans, 8)
    return f"<u{word_bytes}", f"<u{word_bytes}"


def build_kernel(widen: Convert, narrow: Convert) -> Any:
    """Build the kernel that converts numbers by `narrow(widen(bits))`.

    Its arguments: taps, a tuple of [entries, rows, words]; lanes, begins, counts [entries]; paths
    [entries, max_rows]; store [places + 1, taps * words]; rows [entries, max_rows, taps * words],
    written like the store; capacity. Blocks: (row, words, entry and tap); their number
    depends on shapes alone.
    """
    to_fp32, from_fp32 = (cuda.jit(device=True)(convert) for convert in (widen, narrow))

    @cuda.jit
    def scatter(taps, lanes, begins, counts, paths, store, rows, capacity):
        entry = cuda.blockIdx.z // len(taps)
        tap = cuda.blockIdx.z % len(taps)
        lane = lanes[entry]
        source = taps[tap]
        width = source.shape[2]
        # Blocks run in any order: skip rows that later ones of this call would overwrite.
        j = max(counts[entry] - capacity, 0) + cuda.blockIdx.x
        if lane < 0 or j >= counts[entry]:
            return
        row = paths[entry, j]
        place = lane * capacity + (begins[entry] + j) % capacity
        i = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
        while i < width:
            word = from_fp32(to_fp32(source[entry, row, i]))
            store[place, tap * width + i] = word
            rows[entry, j, tap * width + i] = word
            i += cuda.gridDim.y * cuda.blockDim.x

    return scatter


def _same(bits):
    return bits


def _fp32_to_fp32(bits):
    return np.int64(bits)


def _bf16_to_fp32(bits):
    return np.int64(bits) << 16


def _fp16_to_fp32(bits):
    bits = np.int64(bits)
    sign, exponent, mantissa = (bits & 0x8000) << 16, (bits >> 10) & 0x1F, bits & 0x3FF
    if exponent == 0x1F:
        return sign | FP32_INF | (mantissa << 13)
    if exponent == 0:
        if mantissa == 0:
            return sign
        exponent = np.int64(1)
        while mantissa < 0x400:  # a subnormal: shift its leading bit to the implied position
            mantissa <<= 1
            exponent -= 1
    return sign | ((exponent + 112) << 23) | ((mantissa & 0x3FF) << 13)


def _fp32_to_bf16(bits):
    if bits & 0x7FFFFFFF > FP32_INF:
        return np.int64(0x7FC0)  # keep NaN, which rounding could make infinite
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def _fp32_to_fp16(bits):
    sign, size = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if size > FP32_INF:
        return np.int64(0x7E00)
    if size >= 0x47800000:  # 65536; slightly smaller numbers round to infinity too
        return sign | 0x7C00
    if size >= 0x38800000:  # 2^-14: the smallest normal number
        return sign | ((size + 0xFFF + ((size >> 13) & 1) - (112 << 23)) >> 13)
    if size < 0x33000000:  # less than 2^-25, half of the smallest subnormal
        return sign
    shift = 126 - (size >> 23)
    mantissa = (size & 0x7FFFFF) | 0x800000
    half = np.int64(1) << (shift - 1)
    quotient, rest = mantissa >> shift, mantissa & (2 * half - 1)
    if rest > half or (rest == half and quotient & 1):
        quotient += 1
    return sign | quotient


TO_FP32 = {
    torch.float32: _fp32_to_fp32,
    torch.bfloat16: _bf16_to_fp32,
    torch.float16: _fp16_to_fp32,
}
FROM_FP32 = {
    torch.float32: _same,
    torch.bfloat16: _fp32_to_bf16,
    torch.float16: _fp32_to_fp16,
}
