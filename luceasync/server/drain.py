"""Running requests and how they end: at a shutdown, or in a race with watchers that may stop them.

Independent of signals and sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from luceasync.errors import Unavailable

Result = TypeVar("Result")


class Drain:
    """Admits requests until `begin`; `expire` stops those that are still running."""

    def __init__(self) -> None:
        self.closing = False
        self.num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._expired = asyncio.Event()
        self._stopped_by_it: set[UntilExpired] = set()

    def __repr__(self) -> str:
        return f"Drain(num_running={self.num_running}, closing={self.closing})"

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request as running. Raises Unavailable once closing."""
        if self.closing:
            raise Unavailable("The server is shutting down.")
        self.num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_running -= 1
            if self.num_running == 0:
                self._idle.set()

    async def expired(self) -> NoReturn:
        """Wait until running requests must stop, then raise Unavailable."""
        await self._expired.wait()
        raise _expiry()

    def until_expired(self) -> UntilExpired:
        """A context manager that stops the task within it like `expired` would, but needs no task
        of its own."""
        return UntilExpired(self._stopped_by_it, has_expired=self._expired.is_set())

    def begin(self) -> None:
        """Refuse new requests from now on."""
        self.closing = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until no request is running. Returns whether that is so."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def expire(self) -> None:
        """Stop the requests that are still running."""
        self._expired.set()
        for each in tuple(self._stopped_by_it):
            each.stop()


def _expiry() -> Unavailable:
    return Unavailable("The server shut down before the answer was complete.")


class UntilExpired:
    """Raises Unavailable in the `with` block of a task that a Drain stops, as asyncio.timeout does
    TimeoutError."""

    def __init__(self, stopped_by_it: set[UntilExpired], *, has_expired: bool) -> None:
        """It is among `stopped_by_it` within the block."""
        self._others = stopped_by_it
        self._has_expired = has_expired
        self._task: asyncio.Task[object] | None = None
        self._num_cancelled = 0  # before the block

    def __enter__(self) -> None:
        if self._has_expired:
            raise _expiry()
        self._task = asyncio.current_task()
        assert self._task is not None, "a block of a task"
        self._num_cancelled = self._task.cancelling()
        self._others.add(self)

    def stop(self) -> None:
        """Cancel the task, to raise Unavailable where the block ends."""
        assert self._task is not None, "the block has begun"
        self._has_expired = True
        self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._others.discard(self)
        task, self._task = self._task, None  # no reference cycle
        if not self._has_expired or task is None:
            return
        if task.uncancel() <= self._num_cancelled and kind is asyncio.CancelledError:
            raise _expiry() from None


async def race(work: Coroutine[Any, Any, Result], *watchers: Coroutine[Any, Any, Any]) -> Result:
    """Await `work` while `watchers` run concurrently, and return its result.

    A watcher never returns: it raises when `work` has to stop because the client disconnected or
    the server shuts down. Then `work` is cancelled, its cleanup is awaited, and the watcher's
    exception is raised, in a group if the cleanup failed too. Once `work` has ended, its result or
    exception is the outcome, whatever a watcher raises; the watchers are cancelled.

    `work` runs in its own task, so each token that it awaits resumes this task only, not the frames
    of all layers of the server above it.
    """
    # Not a TaskGroup: up to Python 3.12, a TaskGroup that fails leaves the current task counted as
    # cancelled, and in Python 3.11.2 no asyncio.timeout works in such a task.
    working = asyncio.create_task(work)
    tasks = [working, *(asyncio.create_task(watcher) for watcher in watchers)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancel(tasks)
    if not working.cancelling():
        tasks.clear()
        try:
            return working.result()
        finally:
            del working
    failures = (failure for task in tasks[1:] if (failure := _failure(task)) is not None)
    error = next(failures, asyncio.CancelledError())
    cleanup = _failure(working)
    # Drop this frame's references to the failed tasks before raising: they form a cycle that would
    # keep what `work` held, for example a body of 15 MB, until a garbage collection.
    del tasks, working, failures
    try:
        raise error if cleanup is None else BaseExceptionGroup("cleanup failed", [cleanup, error])
    finally:
        del error, cleanup


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks that still run and wait for their cleanup, even while being cancelled."""
    for task in tasks:
        task.cancel()
    interrupted = False
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            interrupted = True
    if interrupted:
        raise asyncio.CancelledError


def _failure(task: asyncio.Task[Any]) -> BaseException | None:
    return None if task.cancelled() else task.exception()
