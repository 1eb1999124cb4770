"""Runs a server in this process: bind, load, serve, and shut down within a deadline.

Owns the signals. Independent of routes; the app's Drain counts its requests.
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

from luceasync.server.drain import Drain, race
from luceasync.server.http.listener import LINGER_S, listen, run_hypercorn, tls_context, url_of
from luceasync.server_config import ServerConfig

EXIT_S = 5.0  # after the graceful timeout
HANGING_STATUS = 1

logger = logging.getLogger(__name__)


class _Stopped(Exception):
    """A signal asked the server to stop."""


async def serve(
    app: Starlette,
    config: ServerConfig,
    *,
    on_bound: Callable[[str], None],
    load: Callable[[], Coroutine[Any, Any, None]],
) -> bool:
    """Serve `app` until SIGINT or SIGTERM. Once the port is bound, `load` runs concurrently.

    After the signal, new requests get a 503 and running ones may finish; those that still run after
    `graceful_timeout_s` end with an error. EXIT_S later the process exits, even if something in it
    hangs, such as a disk that does not sync. A second SIGINT kills the process, and so does the
    first one while `load` runs, since no client is being answered yet.

    Returns whether all connections have ended. If not, a client holds one open without reading, and
    the caller must exit hard. Raises ConfigError if the port cannot be bound or the certificate is
    unusable, and what `load` raises.
    """
    drain: Drain = app.state.drain
    stop, closed = asyncio.Event(), asyncio.Event()
    tls = tls_context(config)
    listener = listen(config)
    signals = ExitStack()
    signals.enter_context(_signals(stop))
    on_bound(url_of(listener, tls))
    # Not in a task group: with a client that never reads, Hypercorn hangs even when cancelled, and
    # the process must exit nevertheless.
    serving = asyncio.create_task(run_hypercorn(app, listener, closed, tls), name="hypercorn")
    try:
        await race(_load(load, stop), _stopped(stop), _crashed(serving))
    except _Stopped:
        exit_process_after(config.graceful_timeout_s + EXIT_S)
    finally:
        signals.close()
        await _drain(drain, config.graceful_timeout_s)
        closed.set()
        await asyncio.wait({serving}, timeout=LINGER_S)
    return serving.done()


async def _load(load: Callable[[], Coroutine[Any, Any, None]], stop: asyncio.Event) -> NoReturn:
    await load()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    await _stopped(stop)


async def _stopped(stop: asyncio.Event) -> NoReturn:
    await stop.wait()
    raise _Stopped


async def _crashed(serving: asyncio.Task[None]) -> NoReturn:
    """Wait for Hypercorn, which ends by itself only if it fails."""
    await asyncio.shield(serving)
    raise _Stopped


async def _drain(drain: Drain, timeout_s: float) -> None:
    """Let running requests finish; after `timeout_s`, stop them and wait for them to stop."""
    drain.begin()
    if drain.num_running:
        logger.info(
            "Stopping: %d running requests may finish within %g s; Ctrl-C ends them now.",
            drain.num_running,
            timeout_s,
        )
    if not await drain.wait_idle(timeout_s):
        logger.warning("%d requests did not finish within %g s.", drain.num_running, timeout_s)
        drain.expire()
        await drain.wait_idle(LINGER_S)


@contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """Set `stop` on SIGTERM; after the `with` block, further signals have no effect. SIGINT kills
    the process, except while the handler that `_load` installs sets `stop` instead.
    """
    loop = asyncio.get_running_loop()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def exit_process_after(seconds: float) -> None:
    """Exit with HANGING_STATUS unless the process has ended by then.

    A thread in a system call that never returns cannot be stopped, and the interpreter would wait
    for it.
    """
    timer = threading.Timer(seconds, _exit, [seconds])
    timer.daemon = True
    timer.start()


def _exit(seconds: float) -> None:
    message = (
        f"The process was told to end {seconds:g} s ago, but something in it hangs: exiting now. "
        "Nodes that were not yet on disk are lost.\n"
    )
    try:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, message.encode())
    finally:
        os._exit(HANGING_STATUS)
