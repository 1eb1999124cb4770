"""Work that something outside may end: a client that leaves, a shutdown deadline.

Owns the rule "whoever ends first ends the others". Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

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
