"""Runs the draft's passes: operation by operation, or as CUDA graphs, captured once a shape has
come up often enough.

A pass reads its inputs and fixed memory, waits for nothing, and may be repeated: it writes the same
the second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from luceasync.pipeline.capture import Capture, Captured

NUM_EAGER_CALLS = 2  # kernels are compiled meanwhile, and a rare shape is not captured
NUM_WARM_UPS = NUM_EAGER_CALLS  # after one to compile: then a pass is run as it will be

Pass = Callable[..., Any]


class Runner(Protocol):
    """Runs `work(*inputs)`; `key` and the inputs' shapes identify the pass. `work` copies inputs
    that are on the host to its device. `num_unsettled`: passes so far whose time says nothing of
    later ones, since kernels were compiled or a graph was captured.
    """

    num_unsettled: int

    def __call__(self, key: Hashable, work: Pass, *inputs: Tensor) -> Any: ...

    def close(self) -> None:
        """Free what was captured."""
        ...


class EagerRunner:
    """Runs passes operation by operation."""

    num_unsettled = 0

    def __call__(self, key: Hashable, work: Pass, *inputs: Tensor) -> Any:
        return work(*inputs)

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class _Step:
    inputs: tuple[Tensor, ...]
    captured: Captured[Any]


class GraphRunner:
    """Runs passes on one GPU as graphs. The next pass may overwrite what a pass returned."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.num_unsettled = 0
        self._steps: dict[Hashable, _Step] = {}
        self._num_calls: Counter[Hashable] = Counter()

    def __call__(self, key: Hashable, work: Pass, *inputs: Tensor) -> Any:
        full_key = (key, *((x.shape, x.dtype) for x in inputs))
        step = self._steps.get(full_key)
        if step is None:
            self.num_unsettled += 1
            self._num_calls[full_key] += 1
            if self._num_calls[full_key] <= NUM_EAGER_CALLS:
                return work(*inputs)
            step = self._steps[full_key] = self._step_of(work, inputs)
        _copy(step.inputs, inputs)
        step.captured.replay()
        return step.captured.output

    def close(self) -> None:
        """Free the graphs."""
        self._steps.clear()

    def _step_of(self, work: Pass, inputs: tuple[Tensor, ...]) -> _Step:
        static = tuple(x.to(self._capture.device, copy=True) for x in inputs)
        return _Step(static, self._capture(lambda: work(*static), num_warmups=1))


def _copy(static: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Copy inputs; those that are on the device already, in one launch."""
    pairs = list(zip(static, given, strict=True))
    for to, x in pairs:
        if x.device != to.device:
            to.copy_(x, non_blocking=True)
    here = [(to, x) for to, x in pairs if x.device == to.device]
    if here:
        torch._foreach_copy_([to for to, _ in here], [x for _, x in here])
