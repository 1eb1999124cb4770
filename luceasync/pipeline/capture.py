"""Captures work as CUDA graphs, each of which is one launch: streams, memory pool, warm-up.

Does not know what the work is, only that it reads fixed addresses, never waits and may be repeated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from luceasync.errors import LuceasyncError

PATIENCE_S = 300.0  # for the next kernel to be compiled: the largest takes 12 s of one core


@contextmanager
def compiled_ahead(device: torch.device, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Compile the kernels that the context's body would launch, see luceasync.kernels.kernel.
    Raises LuceasyncError if none is finished within `patience_s` after the last one.
    """
    from luceasync.kernels import kernel

    try:
        with kernel.compiled_ahead(device, patience_s):
            yield
    except kernel.CompilerHangs as error:
        raise LuceasyncError(str(error)) from None


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Captured(Generic[T]):
    """A graph, and what the captured function returned: tensors that each replay overwrites."""

    graph: torch.cuda.CUDAGraph
    output: T

    def replay(self) -> None:
        """Queue the work on the current stream."""
        self.graph.replay()


class Capture:
    """Captures functions on one GPU. Their graphs share a memory pool, so graphs from one Capture
    must not run at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = _capture_stream(device)

    def compile_ahead(self, runs: Sequence[Callable[[], object]]) -> None:
        """Run each of `runs` once to compile the kernels that it launches, in parallel; see
        luceasync.kernels.kernel.
        """
        with torch.cuda.device(self.device), compiled_ahead(self.device):
            for run in runs:
                run()

    def __call__(self, run: Callable[[], T], *, num_warmups: int) -> Captured[T]:
        """Run `run` `num_warmups` times, so that kernels are compiled, the allocator settles and
        libraries have their workspaces for the stream; then capture it.
        """
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(num_warmups):
                run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # other threads pin memory meanwhile
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
            output = run()
        return Captured(graph, output)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for the lifetime of the process: the matrix library keeps a workspace for every
    stream that it has seen, and captured products continue to use it."""
    return torch.cuda.Stream(device)
