"""Threads that compile kernels, with a deadline: a compiler may hang.

Knows kernels by name only, not how they are compiled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

log = logging.getLogger(__name__)

NUM_TOLD = 3  # names of unfinished kernels


class CompilerHangs(Exception):
    """Compiling these kernels has made no progress for too long."""


class KernelCompilation:
    """Runs up to `num_threads` jobs at a time. A thread that hangs in a compiler is abandoned and
    does not delay the end of the process.
    """

    def __init__(self, num_threads: int, patience_s: float) -> None:
        """`patience_s`: the longest wait without progress."""
        self._num_threads = num_threads
        self._patience_s = patience_s
        self._threads: list[threading.Thread] = []
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._pending: dict[Future[Any], str] = {}
        self._changed = threading.Condition()

    def submit(self, name: str, job: Callable[[], Any]) -> Future[Any]:
        """Run `job`, which compiles the kernel `name`, in one of the threads."""
        future: Future[Any] = Future()
        with self._changed:
            self._pending[future] = name
        self._jobs.put((future, job))
        if len(self._threads) < self._num_threads:
            called = f"compile_{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._run, name=called, daemon=True))
            self._threads[-1].start()
        return future

    def end(self) -> None:
        """Wait for all jobs and end the threads. Every future is done afterwards. Raises
        CompilerHangs if there is no progress; late results are discarded.
        """
        for _ in self._threads:
            self._jobs.put(None)
        late = self._wait()
        if not late:
            return
        with suppress(Empty):  # start no further job
            while True:
                self._jobs.get_nowait()
        names = sorted(late.values())
        others = f" and {len(names) - NUM_TOLD} more" if len(names) > NUM_TOLD else ""
        words = (
            f"no kernel was compiled within {self._patience_s:g} s; not done are "
            f"{', '.join(names[:NUM_TOLD])}{others}: the compiler hangs, or the machine is too busy"
        )
        for future in late:
            future.set_exception(CompilerHangs(words))
        raise CompilerHangs(words)

    def _wait(self) -> dict[Future[Any], str]:
        """Wait until all are done, or there is no progress; return the unfinished names."""
        with self._changed:
            num_pending, since_s = len(self._pending), time.monotonic()
            while self._pending:
                left_s = since_s + self._patience_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
                if len(self._pending) < num_pending:
                    num_pending, since_s = len(self._pending), time.monotonic()
            late, self._pending = self._pending, {}
            return late

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, make = job
            made, error = None, None
            try:
                made = make()
            except Exception as caught:  # reported to the caller that needs the kernel
                error = caught
            with self._changed:
                if self._pending.pop(future, None) is None:
                    log.warning("a kernel was compiled after its deadline")
                    return
            # Set before completion is signalled, as the waiter reads it then.
            future.set_exception(error) if error is not None else future.set_result(made)
            with self._changed:
                self._changed.notify_all()
