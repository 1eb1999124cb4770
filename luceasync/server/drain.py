"""Which requests run, and how they end when the server has to.

Owns the count of running requests and the two moments of a shutdown. Knows nothing of signals or
sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from luceasync.errors import Unavailable


class Drain:
    """Lets requests in until `begin`; `expire` tells those that still run to stop."""

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
        """Hold a place among the running requests. Raises Unavailable once closing."""
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
        """Wait until running requests have to stop. Raises Unavailable then."""
        await self._expired.wait()
        raise Unavailable("The server shut down before the answer was complete.")

    def begin(self) -> None:
        """Refuse new requests from now on."""
        self.closing = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request runs, at most `timeout_s`; tell whether it came to that."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def expire(self) -> None:
        """Tell the requests that still run to stop."""
        self._expired.set()


# Work that something outside may end: a client that leaves, a shutdown deadline. Owns the rule
# "whoever ends first ends the others". Knows nothing of HTTP.


Result = TypeVar("Result")


async def race(work: Coroutine[Any, Any, Result], *watchers: Coroutine[Any, Any, Any]) -> Result:
    """Await `work` while `watchers` run beside it, and return its result.

    A watcher never returns: it raises when `work` has to stop. Then `work` is cancelled, its
    cleanup is awaited, and what the watcher raised is raised here, plain. The watchers are
    cancelled when `work` ends; where `work` fails by itself, that is raised.

    `work` has a task of its own: what it awaits again and again, each token of an answer, wakes it
    alone, and not all that awaits it, a frame for each layer of the server.
    """
    error: BaseException
    try:
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(work)
            beside = [tasks.create_task(watcher) for watcher in watchers]
            working.add_done_callback(lambda _: _cancel(beside))
        return working.result()
    except BaseExceptionGroup as group:
        failure = None if working.cancelled() else working.exception()
        if failure is not None and working.cancelling():
            raise  # the cleanup of `work` failed too: both must be seen
        error = failure or group.exceptions[0]  # others may have ended at the same moment
        group.__traceback__ = None
    # Out of reach of the group, and of this frame: what failed holds what it worked on, a body of
    # 15 MB for example, and would stay with it until the collector comes.
    try:
        raise error
    finally:
        del error, failure, working


def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
