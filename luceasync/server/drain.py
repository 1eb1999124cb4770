"""Running requests and how they end: at a shutdown, or in a race with what may stop them.

Knows nothing of signals or sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from luceasync.errors import Unavailable

Result = TypeVar("Result")


class Drain:
    """Admits requests until `begin`; `expire` stops those that still run."""

    def __init__(self) -> None:
        self.closing = False
        self.num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._expired = asyncio.Event()

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
        """Wait until running requests must stop. Raises Unavailable then."""
        await self._expired.wait()
        raise Unavailable("The server shut down before the answer was complete.")

    def begin(self) -> None:
        """Refuse new requests from now on."""
        self.closing = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until no request runs. Returns whether none does."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def expire(self) -> None:
        """Stop the requests that still run."""
        self._expired.set()


async def race(work: Coroutine[Any, Any, Result], *watchers: Coroutine[Any, Any, Any]) -> Result:
    """Await `work` while `watchers` run concurrently, and return its result.

    A watcher never returns: it raises when `work` has to stop, because the client has left or the
    server shuts down. Then `work` is cancelled, its cleanup is awaited, and the watcher's exception
    is raised, without a group. The watchers are cancelled when `work` ends; if `work` itself fails,
    its exception is raised.

    `work` has a task of its own, so each token that it awaits resumes this task alone and not the
    frame of every layer of the server above it.
    """
    error: BaseException
    try:
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(work)
            watching = [tasks.create_task(watcher) for watcher in watchers]
            working.add_done_callback(lambda _: _cancel(watching))
        return working.result()
    except BaseExceptionGroup as group:
        failure = None if working.cancelled() else working.exception()
        if failure is not None and working.cancelling():
            raise  # the cleanup of `work` failed too: show both
        error = failure or group.exceptions[0]  # other watchers may have raised at the same time
        group.__traceback__ = None
    # Raise outside of the `except`, and drop the references of this frame: they form a cycle that
    # would keep what `work` held, a body of 15 MB for example, until a garbage collection.
    try:
        raise error
    finally:
        del error, failure, working


def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
