"""Runs the draft's passes: operation by operation, or as CUDA graphs, captured once a shape has
come up often enough.

A pass reads its inputs and fixed memory, waits for nothing, and may be repeated: it writes the same
the second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from luceasync.pipeline.capture import Capture
from luceasync.pipeline.transfer import HostInput

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


class _Step:
    """A captured pass and its inputs. The graph itself takes those of the host from pinned memory:
    a copy of its own would take the host as long as a launch.
    """

    def __init__(self, capture: Capture, work: Pass, inputs: Sequence[Tensor]) -> None:
        device = capture.device
        self._of_host = {
            i: HostInput(x, device) for i, x in enumerate(inputs) if x.device != device
        }
        self._static = tuple(
            self._of_host[i].values if i in self._of_host else x.clone()
            for i, x in enumerate(inputs)
        )
        self._captured = capture(lambda: self._run(work), num_warmups=1)

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        """Queue the pass on these inputs, those on the device copied in one launch. Returns its
        output.
        """
        for i, given in self._of_host.items():
            given.put(inputs[i])
        here = [i for i in range(len(inputs)) if i not in self._of_host]
        if here:
            torch._foreach_copy_([self._static[i] for i in here], [inputs[i] for i in here])
        self._captured.replay()
        for given in self._of_host.values():
            given.replayed()
        return self._captured.output

    def _run(self, work: Pass) -> Any:
        for given in self._of_host.values():
            given.take()
        return work(*self._static)


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
            step = self._steps[full_key] = _Step(self._capture, work, inputs)
        return step(inputs)

    def close(self) -> None:
        """Free the graphs."""
        self._steps.clear()
