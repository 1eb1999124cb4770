"""luceasync-backend for models of random weights, which writes down when it does what of a step.

    python scripts/traced_backend.py ARGUMENT...

LUCEASYNC_TRACE names the file; see `Trace`. time.perf_counter() is one clock for all processes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from luceasync.backend.app import main
from luceasync.bench.random_weights import know_it

VARIABLE = "LUCEASYNC_TRACE"
MAX_STEPS = 4096
# Moments of a step: its order is here, it has been checked, it is queued on the device; the order
# to rank is here, candidates are on the host, and have been sent.
MOMENTS = ("received", "checked", "queued", "asked", "ranked", "answered")


class Trace:
    """Moments of each step, float64 [steps, moments] in a file that others may read meanwhile."""

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        shape = (MAX_STEPS, len(MOMENTS))
        mode: Any = "w+" if is_new else "r+"
        self.times = np.memmap(path, np.float64, mode, shape=shape)
        self._step = -1

    def begin(self) -> None:
        """A step has come."""
        self._step = (self._step + 1) % MAX_STEPS
        self.stamp("received")

    def stamp(self, moment: str) -> None:
        if self._step >= 0:
            self.times[self._step, MOMENTS.index(moment)] = time.perf_counter()


def watch(trace: Trace) -> None:
    """Look at every order."""
    from luceasync.backend import serving
    from luceasync.pipeline.stage import LocalStage
    from luceasync.pipeline.remote import wire

    real_next, real_answer = serving.Wire.next, serving.Wire.answer
    real_lent, real_taken = serving.Wire.lent, LocalStage.taken

    def following(link: serving.Wire) -> Any:
        got = real_next(link)
        if got is not None and isinstance(got.message, wire.Run | wire.Given):
            if isinstance(got.message, wire.Given) or got.message.kind == "decode":
                trace.begin()
        elif got is not None and isinstance(got.message, wire.Rank):
            trace.stamp("asked")
        return got

    def lent(link: serving.Wire, got: Any, spec: Any) -> Any:
        found = real_lent(link, got, spec)
        trace.stamp("checked")
        return found

    def taken(group: LocalStage) -> Any:
        trace.stamp("queued")
        return real_taken(group)

    def answer(link: serving.Wire, got: Any, message: Any, tensors: Any = ()) -> None:
        if isinstance(got.message, wire.Rank):
            trace.stamp("ranked")
        real_answer(link, got, message, tensors)
        if isinstance(got.message, wire.Rank):
            trace.stamp("answered")

    serving.Wire.next = following  # type: ignore[method-assign]
    serving.Wire.lent = lent  # type: ignore[method-assign]
    serving.Wire.answer = answer  # type: ignore[method-assign]
    LocalStage.taken = taken  # type: ignore[method-assign]


if __name__ == "__main__":
    know_it()
    watch(Trace(Path(os.environ[VARIABLE])))
    main()
