"""Accepts connections, limits their number, and decides which one to close first.

Owns TLS handshakes too. Independent of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from luceasync.server.http.connection import Connection
from luceasync.server.malloc_trim import MallocTrim

MAX_HANDSHAKES = 64  # TLS handshakes in progress; above that the oldest is aborted
HANDSHAKE_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 5.0  # for the client's close_notify
NUM_ACCEPTED_AT_ONCE = 32  # before open connections get their turn
NUM_CLOSED_PER_TRIM = 32  # TLS connections, each of which held up to half a MiB
ACCEPT_PAUSE_S = 0.1  # when the process or the machine is out of descriptors

logger = logging.getLogger(__name__)

MakeConnection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Connection]


class AcceptedConnection:
    """An accepted socket; `connection` is set after the TLS handshake, if there is one."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.connection: Connection | None = None
        self.task: asyncio.Task[None] | None = None

    def end(self) -> None:
        """Close the connection now and drop unsent data."""
        if self.connection is not None:
            self.connection.abort()
        elif self.task is not None:
            self.task.cancel()


class Connections:
    """At most `most` open connections. Above that an idle one is closed; if there is none, the
    newest.

    Connections that have never sent a request are closed first, the oldest before others, then the
    one idle for longest: a client that sends requests now and then keeps its connection beside any
    number that send none. `tls` None: plain HTTP.
    """

    def __init__(self, make: MakeConnection, most: int, tls: ssl.SSLContext | None) -> None:
        self._make = make
        self._most = most
        self._tls = tls
        self._open: dict[AcceptedConnection, None] = {}  # in the order of acceptance
        self._handshaking: dict[AcceptedConnection, None] = {}
        self._silent: dict[AcceptedConnection, None] = {}  # have sent no request so far
        self._idle: dict[AcceptedConnection, None] = {}  # in the order of their last answers
        self._ending: set[AcceptedConnection] = set()
        self._malloc_trim = MallocTrim()
        self._num_closed = 0

    def __len__(self) -> int:
        return len(self._open) - len(self._ending)

    def accept_from(self, listener: socket.socket) -> None:
        """Accept connections of `listener` from now on."""
        listener.setblocking(False)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(NUM_ACCEPTED_AT_ONCE):
            try:
                sock, _address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # the client has already disconnected
            except OSError as error:
                logger.warning("Cannot accept a connection: %s", error.strerror)
                self._pause(listener)
                return
            self.begin(sock)

    def _pause(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(ACCEPT_PAUSE_S, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self.accept_from(listener)

    def begin(self, sock: socket.socket) -> None:
        """Start to serve an accepted socket."""
        if len(self) >= self._most and not (
            self._end_first(self._silent) or self._end_first(self._idle)
        ):
            sock.close()
            return
        if len(self._handshaking) >= MAX_HANDSHAKES:
            self._end_first(self._handshaking)
        accepted = AcceptedConnection(sock)
        self._open[accepted] = self._silent[accepted] = None
        if self._tls is not None:
            self._handshaking[accepted] = None
        accepted.task = asyncio.get_running_loop().create_task(self._serve(accepted))
        accepted.task.add_done_callback(lambda _: self._forget(accepted))

    async def _serve(self, accepted: AcceptedConnection) -> None:
        accepted.sock.setblocking(False)
        try:
            reader, writer = await self._streams(accepted.sock)
        except (OSError, TimeoutError) as error:  # SSLError too: it left, or speaks no TLS
            logger.debug("A TLS handshake failed: %s", error)
            return
        finally:
            self._handshaking.pop(accepted, None)
        accepted.connection = self._make(reader, writer)
        accepted.connection.on_idle = partial(self._set_idle, accepted)
        await accepted.connection

    async def _streams(
        self, sock: socket.socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Reader and writer of `sock`, after its handshake. Raises OSError or TimeoutError."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        timeouts = {
            "ssl_handshake_timeout": HANDSHAKE_TIMEOUT_S,
            "ssl_shutdown_timeout": SHUTDOWN_TIMEOUT_S,
        }
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=self._tls, **(timeouts if self._tls is not None else {})
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    def _set_idle(self, accepted: AcceptedConnection, is_idle: bool) -> None:
        """Record that a request on the connection has been answered, or has begun."""
        self._silent.pop(accepted, None)
        self._idle.pop(accepted, None)
        if is_idle and accepted in self._open:
            self._idle[accepted] = None

    def _forget(self, accepted: AcceptedConnection) -> None:
        for connections in (self._open, self._handshaking, self._silent, self._idle):
            connections.pop(accepted, None)
        accepted.connection = None  # breaks the cycle through `on_idle`
        self._ending.discard(accepted)
        accepted.sock.close()
        self._num_closed += self._tls is not None
        if self._num_closed >= NUM_CLOSED_PER_TRIM:
            self._num_closed = 0
            self._malloc_trim.schedule()

    def _end_first(self, connections: dict[AcceptedConnection, None]) -> bool:
        """Close the first of `connections`. Returns whether there was one."""
        while connections:
            accepted = next(iter(connections))
            del connections[accepted]
            if accepted not in self._ending:
                self._ending.add(accepted)
                accepted.end()
                return True
        return False

    async def end(self, timeout_s: float) -> None:
        """Wait until all connections have ended; after `timeout_s`, close those that are left."""
        await self._wait(timeout_s)
        for accepted in self._open:
            accepted.end()
        await self._wait(timeout_s)

    async def _wait(self, timeout_s: float) -> None:
        tasks = [accepted.task for accepted in self._open if accepted.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
