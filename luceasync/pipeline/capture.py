"""Work captured as CUDA graphs, which are launched as one: streams, memory pool, warm-up.

Knows nothing of what is captured, only that it reads fixed memory, waits for nobody and may be
repeated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from luceasync.errors import LuceasyncError

# Kernels of a GPU compiled before they are launched, or words for a person. Knows no pass.
# Imports the compiler only where something is compiled.


PATIENCE_S = 300.0  # for one kernel more: the largest takes 12 s of one core


@contextmanager
def compiled_ahead(device: torch.device, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """See luceasync.kernels.kernel. Raises LuceasyncError where none is done within `patience_s`
    after the one before.
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
    """A graph, and what the captured function returned: tensors that every replay writes anew."""

    graph: torch.cuda.CUDAGraph
    output: T

    def replay(self) -> None:
        """Queue the work on the current stream."""
        self.graph.replay()


class Capture:
    """Captures functions on one GPU. What they leave shares one pool: graphs that were captured
    with the same object must not run at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = _capture_stream(device)

    def compile_ahead(self, runs: Sequence[Callable[[], object]]) -> None:
        """Compile what `runs` launch, each of which is run once for it, beside each other: see
        luceasync.kernels.kernel.
        """
        with torch.cuda.device(self.device), compiled_ahead(self.device):
            for run in runs:
                run()

    def __call__(self, run: Callable[[], T], *, num_warmups: int) -> Captured[T]:
        """Run `run` so many times, so that kernels are compiled, the allocator settles and the
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
    """One for the life of the process: the matrix library keeps a workspace for every stream that
    it has seen, and captured products go on using it.
    """
    return torch.cuda.Stream(device)
