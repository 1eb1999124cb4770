"""The connections that are open, from the listening socket on: how many, and which end first.

Owns accepting, the handshake of TLS, and the bounds of both. Knows nothing of what is said on one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from luceasync.server.http.connection import Connection
from luceasync.server.malloc_trim import GivingBack

MAX_HANDSHAKES = 64  # of TLS that have begun; beyond, the oldest of them ends
HANDSHAKE_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 5.0  # for the other side's last word of TLS
NUM_ACCEPTED_AT_ONCE = 32  # then those that are open have their turn
NUM_ENDED = 32  # after which memory is given back: one of TLS has held up to half a MiB
NO_ROOM_PAUSE_S = 0.1  # where the process or the machine has no descriptor left

logger = logging.getLogger(__name__)

MakeConnection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Connection]


class Arrival:
    """One that has come; its connection is there once TLS, if there is any, has agreed."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.connection: Connection | None = None
        self.task: asyncio.Task[None] | None = None

    def end(self) -> None:
        """End it now; what was not sent is lost."""
        if self.connection is not None:
            self.connection.abort()
        elif self.task is not None:
            self.task.cancel()


class Connections:
    """Those that are open, at most `most`: beyond, one that is idle ends, else the newest.

    First ends who has asked for nothing yet, the oldest of them; then who has been idle longest. So
    clients that ask now and then keep theirs beside any number that never do. `tls` None: they are
    not encrypted.
    """

    def __init__(self, make: MakeConnection, most: int, tls: ssl.SSLContext | None) -> None:
        self._make = make
        self._most = most
        self._tls = tls
        self._open: dict[Arrival, None] = {}  # in the order in which they came
        self._shaking: dict[Arrival, None] = {}
        self._silent: dict[Arrival, None] = {}  # they have asked for nothing
        self._idle: dict[Arrival, None] = {}  # in the order in which they got their last answers
        self._ending: set[Arrival] = set()
        self._giving_back = GivingBack()
        self._num_ended = 0

    def __len__(self) -> int:
        return len(self._open) - len(self._ending)

    def accept_from(self, listener: socket.socket) -> None:
        """Serve what comes to `listener` from now on."""
        listener.setblocking(False)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(NUM_ACCEPTED_AT_ONCE):
            try:
                sock, _address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # it left before
            except OSError as error:
                logger.warning("No connection can be accepted: %s", error.strerror)
                self._pause(listener)
                return
            self.begin(sock)

    def _pause(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(NO_ROOM_PAUSE_S, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self.accept_from(listener)

    def begin(self, sock: socket.socket) -> None:
        """Serve it to its end, beside the others."""
        if len(self) >= self._most and not (
            self._end_first(self._silent) or self._end_first(self._idle)
        ):
            sock.close()
            return
        if len(self._shaking) >= MAX_HANDSHAKES:
            self._end_first(self._shaking)
        arrival = Arrival(sock)
        self._open[arrival] = self._silent[arrival] = None
        if self._tls is not None:
            self._shaking[arrival] = None
        arrival.task = asyncio.get_running_loop().create_task(self._serve(arrival))
        arrival.task.add_done_callback(lambda _: self._forget(arrival))

    async def _serve(self, arrival: Arrival) -> None:
        arrival.sock.setblocking(False)
        try:
            reader, writer = await self._streams(arrival.sock)
        except (OSError, TimeoutError) as error:  # of ssl too: it left, or speaks no TLS
            logger.debug("A connection ended in its handshake: %s", error)
            return
        finally:
            self._shaking.pop(arrival, None)
        arrival.connection = self._make(reader, writer)
        arrival.connection.when_idle = partial(self._moved, arrival)
        await arrival.connection

    async def _streams(
        self, sock: socket.socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Both ends of `sock`, after its handshake. Raises OSError or TimeoutError."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        patience = {
            "ssl_handshake_timeout": HANDSHAKE_TIMEOUT_S,
            "ssl_shutdown_timeout": SHUTDOWN_TIMEOUT_S,
        }
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=self._tls, **(patience if self._tls is not None else {})
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    def _moved(self, arrival: Arrival, is_idle: bool) -> None:
        """Its request has been answered, or another one begins."""
        self._silent.pop(arrival, None)
        self._idle.pop(arrival, None)
        if is_idle and arrival in self._open:
            self._idle[arrival] = None

    def _forget(self, arrival: Arrival) -> None:
        for arrivals in (self._open, self._shaking, self._silent, self._idle):
            arrivals.pop(arrival, None)
        arrival.connection = None  # it tells this arrival when it is idle
        self._ending.discard(arrival)
        arrival.sock.close()
        self._num_ended += self._tls is not None
        if self._num_ended >= NUM_ENDED:
            self._num_ended = 0
            self._giving_back.ask()

    def _end_first(self, arrivals: dict[Arrival, None]) -> bool:
        """End the first of `arrivals`; tell whether there was one."""
        while arrivals:
            arrival = next(iter(arrivals))
            del arrivals[arrival]
            if arrival not in self._ending:
                self._ending.add(arrival)
                arrival.end()
                return True
        return False

    async def end(self, timeout_s: float) -> None:
        """Wait for their ends, and after `timeout_s` end the others."""
        await self._wait(timeout_s)
        for arrival in self._open:
            arrival.end()
        await self._wait(timeout_s)

    async def _wait(self, timeout_s: float) -> None:
        tasks = [arrival.task for arrival in self._open if arrival.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
