"""A server's life in this process: bind, load, serve, and shut down by a deadline of our own.

Owns signals and the order of the end. Knows nothing of routes; the app's Drain counts its requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

from starlette.applications import Starlette

from luceasync.config import ServerConfig
from luceasync.server.drain import Drain, race
from luceasync.server.http.listener import LINGER_S, listen, run_hypercorn, tls_context, url_of

# The end of this process by a deadline, whatever hangs in it. Knows nothing of requests or of
# disks: a thread in a system call that never returns cannot be ended, and the interpreter waits
# for it.


HANGING_STATUS = 1


def end_process_after(seconds: float) -> None:
    """End the process with HANGING_STATUS unless it has ended by itself in that time."""
    timer = threading.Timer(seconds, _end, [seconds])
    timer.daemon = True
    timer.start()


def _end(seconds: float) -> None:
    words = (
        f"The process was told to end {seconds:g} s ago, and something in it hangs: it ends now. "
        "What was on its way to the disk is lost.\n"
    )
    try:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, words.encode())
    finally:
        os._exit(HANGING_STATUS)


END_S = 5.0  # after the graceful time

logger = logging.getLogger(__name__)


class _Stopped(Exception):
    """A signal asked for the end."""


async def serve(
    app: Starlette,
    config: ServerConfig,
    *,
    on_bound: Callable[[str], None],
    load: Callable[[], Coroutine[Any, Any, None]],
) -> bool:
    """Serve `app` until SIGINT or SIGTERM; `load` runs beside it once the port is bound.

    After the signal new requests get 503 and running ones may finish; those that still run after
    `graceful_timeout_s` end with an error; END_S later the process ends, whatever hangs in it, a
    disk that does not sync for example. A second SIGINT kills the process, and so does the first
    one before `load` is done: nobody waits for an answer yet. Returns whether every
    connection has ended: if not, some client holds one open without reading, and the caller must
    exit hard. Raises ConfigError when the port cannot be bound or the
    certificate does not do, and what `load` raises.
    """
    drain: Drain = app.state.drain
    stop, closed = asyncio.Event(), asyncio.Event()
    tls = tls_context(config)
    listener = listen(config)
    signals = ExitStack()
    signals.enter_context(_signals(stop))
    on_bound(url_of(listener, tls))
    # Not in a task group: on a client that never reads hypercorn hangs even when it is cancelled,
    # and the end of this process must not wait for that.
    serving = asyncio.create_task(run_hypercorn(app, listener, closed, tls), name="hypercorn")
    try:
        await race(_load(load, stop), _stopped(stop), _crashed(serving))
    except _Stopped:
        end_process_after(config.graceful_timeout_s + END_S)
    finally:
        signals.close()
        await _drain(drain, config.graceful_timeout_s)
        closed.set()
        await asyncio.wait({serving}, timeout=LINGER_S)
    return serving.done()


async def _load(load: Callable[[], Coroutine[Any, Any, None]], stop: asyncio.Event) -> None:
    await load()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    await stop.wait()


async def _stopped(stop: asyncio.Event) -> NoReturn:
    await stop.wait()
    raise _Stopped


async def _crashed(serving: asyncio.Task[None]) -> NoReturn:
    """Hypercorn ends on its own only by a failure."""
    await asyncio.shield(serving)
    raise _Stopped


async def _drain(drain: Drain, timeout_s: float) -> None:
    """Let running requests finish; past `timeout_s` tell them to stop, and wait for that."""
    drain.begin()
    if drain.num_running:
        logger.info(
            "Stopping: %d running requests may go on for %g s; Ctrl-C ends them now.",
            drain.num_running,
            timeout_s,
        )
    if not await drain.wait_idle(timeout_s):
        logger.warning("%d requests did not finish within %g s.", drain.num_running, timeout_s)
        drain.expire()
        await drain.wait_idle(LINGER_S)


@contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """Set `stop` on SIGTERM, which is known already afterwards. SIGINT kills at once, but while
    somebody has it set `stop` too.
    """
    loop = asyncio.get_running_loop()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
