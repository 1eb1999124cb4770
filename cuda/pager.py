"""The kernel that copies rows between host memory, accessed in place, and the pages of all layers
of a shard: any number of pieces in one launch.

Treats rows as words of bits; does not know lanes or nodes. Importing this module imports
numba.cuda.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import cuda  # a global, as the simulator swaps the module of a running kernel
from torch import Tensor

from luceasync.cuda.launch import CudaLauncher

NUM_BLOCKS = 32  # 8 blocks saturate a bus; the rest of the device continues to compute
BLOCK_THREADS = 512
WORD_BYTES = 8


# A tensor of rows on the device: the index of its stack, the byte offset of row 0 in it, and the
# bytes of a row.
Part = tuple[int, int, int]
# The index of a source, its first row, the place of that row in every part, and the number of rows.
Piece = tuple[int, int, int, int]


class PagerKernel:
    """Copies between host memory and stacks on one device, on torch's current stream. The first
    call in each direction compiles.
    """

    def __init__(self, device: torch.device) -> None:
        """Raises ValueError for a device that cannot run CUDA kernels."""
        self._device = device
        self._launcher = CudaLauncher(device)
        self._gather, self._scatter = build_kernel(to_host=False), build_kernel(to_host=True)

    def gather(
        self,
        stacks: Sequence[Tensor],
        parts: Sequence[Part],
        addresses: Sequence[Sequence[int]],
        pieces: Sequence[Piece],
    ) -> None:
        """Copy all `pieces` from host memory to every part. `stacks`: contiguous tensors;
        `addresses`: for each source, those of row 0 of its tensors, in the order of `parts`, in
        memory that the device can access in place.
        """
        self._run(self._gather, stacks, parts, addresses, pieces)

    def scatter(
        self,
        stacks: Sequence[Tensor],
        parts: Sequence[Part],
        addresses: Sequence[Sequence[int]],
        pieces: Sequence[Piece],
    ) -> None:
        """Same as `gather`, from the device to host memory."""
        self._run(self._scatter, stacks, parts, addresses, pieces)

    def _run(
        self,
        kernel: Any,
        stacks: Sequence[Tensor],
        parts: Sequence[Part],
        addresses: Sequence[Sequence[int]],
        pieces: Sequence[Piece],
    ) -> None:
        if not pieces or not parts:
            return
        starts, of_parts = np.array(addresses, np.int64), np.array(parts, np.int64)
        word_bytes = _word_bytes(starts, of_parts[:, 1:], [stack.data_ptr() for stack in stacks])
        base = int(starts.min())
        rows = max(first + num_rows for _, first, _, num_rows in pieces)
        end = int(starts.max()) + max(rows, 1) * int(of_parts[:, 2].max())
        starts = (starts - base) // word_bytes
        of_parts[:, 1:] //= word_bytes
        # this few numbers are copied with the command itself, without waiting
        numbers = np.concatenate(
            [of_parts.ravel(), starts.ravel(), np.array(pieces, np.int64).ravel()]
        )
        plan = torch.from_numpy(numbers).to(self._device, non_blocking=True)
        view, word = self._launcher.view, f"<u{word_bytes}"
        self._launcher.launch(
            kernel,
            (min(NUM_BLOCKS, len(parts) * len(pieces)), 1, 1),
            BLOCK_THREADS,
            tuple(view(stack.view(-1), word) for stack in stacks),
            self._launcher.memory(base, end - base, word),
            view(plan, "<i8"),
            len(parts),
            len(addresses),
            len(pieces),
        )


def _word_bytes(starts: np.ndarray, of_parts: np.ndarray, stacks: Sequence[int]) -> int:
    """The widest words that all rows consist of and are aligned to."""
    spans = np.bitwise_or.reduce(starts.ravel()) | np.bitwise_or.reduce(of_parts.ravel())
    for address in stacks:
        spans |= address
    return min(int(spans & -spans), WORD_BYTES)


def build_kernel(*, to_host: bool) -> Any:
    """Build the kernel of one direction.

    Its arguments: stacks, a tuple of [words]; host [words], from the lowest address on; plan int64:
    for each part its stack, first word and words of a row, then for each source where its parts
    begin in `host`, then the fields of each Piece; and the number of each. A block copies one part
    of a piece after the other.
    """

    @cuda.jit
    def copy(stacks, host, plan, num_parts, num_sources, num_pieces):
        starts = 3 * num_parts
        pieces = starts + num_sources * num_parts
        step = cuda.blockDim.x
        item = cuda.blockIdx.x
        while item < num_pieces * num_parts:
            part = item % num_parts
            piece = pieces + item // num_parts * 4
            stack = stacks[plan[3 * part]]
            row_words = plan[3 * part + 2]
            there = plan[starts + plan[piece] * num_parts + part] + plan[piece + 1] * row_words
            here = plan[3 * part + 1] + plan[piece + 2] * row_words
            num_words = plan[piece + 3] * row_words
            i = cuda.threadIdx.x
            # Keep four words in flight, to hide the latency of the bus.
            while i + 3 * step < num_words:
                j, k, m = i + step, i + 2 * step, i + 3 * step
                if to_host:
                    a, b = stack[here + i], stack[here + j]
                    c, d = stack[here + k], stack[here + m]
                    host[there + i], host[there + j] = a, b
                    host[there + k], host[there + m] = c, d
                else:
                    a, b = host[there + i], host[there + j]
                    c, d = host[there + k], host[there + m]
                    stack[here + i], stack[here + j] = a, b
                    stack[here + k], stack[here + m] = c, d
                i += 4 * step
            while i < num_words:
                if to_host:
                    host[there + i] = stack[here + i]
                else:
                    stack[here + i] = host[there + i]
                i += step
            item += cuda.gridDim.x

    return copy
