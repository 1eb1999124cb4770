"""A GPU's path through a model, on the CPU: Triton's kernels in their interpreter, and captured
passes that are run again. There are no streams, so wrong ordering goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Generic, TypeVar

from torch import Tensor

from luceasync.models.ops import Ops, OpsWithSlots
from luceasync.pipeline.cpu_platform import CpuPlatform

T = TypeVar("T")


class Rerun(Generic[T]):
    """In place of luceasync.pipeline.capture.Captured: results go where the first run put them."""

    def __init__(self, run: Callable[[], T]) -> None:
        self._run = run
        self.output = run()

    def replay(self) -> None:
        found = self._run()
        if isinstance(found, Tensor):
            assert isinstance(self.output, Tensor)
            self.output.copy_(found)


class Recapture:
    """Stands in for luceasync.pipeline.capture.Capture."""

    def compile_ahead(self, runs: Sequence[Callable[[], object]]) -> None:
        for run in runs:
            run()

    def __call__(self, run: Callable[[], T], *, num_warmups: int) -> Rerun[T]:
        for _ in range(num_warmups):
            run()
        return Rerun(run)


class _Capture(Recapture):
    """Skips warm-up runs: the interpreter is slow, and compiles nothing."""

    def compile_ahead(self, runs: Sequence[Callable[[], object]]) -> None:
        pass

    def __call__(self, run: Callable[[], T], *, num_warmups: int) -> Rerun[T]:
        return super().__call__(run, num_warmups=0)


class InterpretedPlatform(CpuPlatform):
    """Chooses what a GPU's platform chooses, as far as that runs here."""

    @cached_property
    def ops(self) -> Ops:
        from luceasync.models.triton_ops import TritonOps

        return TritonOps()

    def slotted_ops(self, num_slots: int) -> OpsWithSlots:
        from luceasync.models.expert_slots import SlottedOps

        return SlottedOps(num_slots, self)

    def hold(self, tensor: Tensor) -> Tensor:
        """See luceasync.models.expert_slots.ExpertHost."""
        return tensor.clone()

    def close(self) -> None:
        """Nothing more is held."""

    def pick(
        self,
        *,
        torch: Callable[[], T],
        triton: Callable[[], T] | None = None,
        numba: Callable[[], T] | None = None,
    ) -> T:
        return torch() if triton is None else triton()

    def passes(self, *, eager: Callable[[], T], captured: Callable[..., T]) -> T:
        return captured(_Capture())
