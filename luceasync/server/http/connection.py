"""One client's connection: HTTP/1.1 by Hypercorn's protocol, over a socket that we let go of.

Owns when the connection ends: its client leaves, is silent, does not read, or says what is neither.
Knows no route.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

import h11
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.task_group import TaskGroup, _handle
from hypercorn.asyncio.tcp_server import MAX_RECV, TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, Response
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.typing import (
    AppWrapper,
    ASGIReceiveEvent,
    ASGISendEvent,
    ConnectionState,
    Scope,
)
from hypercorn.utils import parse_socket_addr

# The forms in which a request names what it wants (RFC 9112, 3.2). Knows no route.


SCHEMES = (b"http", b"https")


def in_origin_form(request: h11.Request) -> h11.Request:
    """The request as a client would say it that knows of no proxies: of a whole URI, which a server
    must accept (3.2.2), the path is wanted, and its authority is the Host, whatever else is said.
    """
    scheme, separator, rest = request.target.partition(b"://")
    if not separator or scheme.lower() not in SCHEMES:
        return request
    end = min((at for at in map(rest.find, (b"/", b"?")) if at >= 0), default=len(rest))
    authority, wanted = rest[:end], rest[end:]
    if not authority:
        return request
    others = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        headers=[(b"host", authority), *others],
        target=wanted if wanted.startswith(b"/") else b"/" + wanted,
        http_version=request.http_version,
    )


# Work that many ask for at once, spread over the turns of the event loop. Owns the order: first
# come, first served, one at each turn. Knows nothing of the work.


class Turns:
    """Whoever has much to do waits for `take` first: others then never wait for more than one."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_turning = False

    async def take(self) -> None:
        """Return at a turn of the loop at which nobody else does."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn)
        await turn

    def _turn(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # who waits may have been cancelled
                turn.set_result(None)
                break
        self._is_turning = bool(self._waiting)
        if self._is_turning:
            asyncio.get_running_loop().call_soon(self._turn)


Address = tuple[str, int] | None

SEND_TIMEOUT_S = 60.0  # in which a client has to read some of what waits for it
AHEAD_TIMEOUT_S = 10.0  # for which a client may have sent more than anybody reads yet
NO_BODY = frozenset((204, 304))
FRAMING = frozenset((b"content-length", b"transfer-encoding"))  # headers that say a body's end
LAST_TURNS = 64  # of the loop, for what a client has said before it left
LARGE_BYTES = 16 << 10  # of one piece: those of many clients are taken one at a time
CLOSE_TIMEOUT_S = 5.0  # for the last bytes of a connection that ends


class Handlers(TaskGroup):
    """Hypercorn's, but nobody waits to tell a handler that its client has left: one that reads no
    more of a body would keep the connection for good.
    """

    async def spawn_app(
        self,
        app: AppWrapper,
        config: Config,
        scope: Scope,
        send: Callable[[ASGISendEvent | None], Awaitable[None]],
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        messages: asyncio.Queue[ASGIReceiveEvent] = asyncio.Queue(config.max_app_queue_size)

        async def put(message: ASGIReceiveEvent) -> None:
            if message["type"] != "http.disconnect":
                await messages.put(message)
                return
            while not messages.empty():  # the body of a client that has left
                messages.get_nowait()
            messages.put_nowait(message)

        in_thread = partial(self._loop.run_in_executor, None)
        self.spawn(_handle, app, config, scope, messages.get, send, in_thread, None)
        return put


class Http11(H11Protocol):
    """HTTP/1.1 and nothing else.

    An offer to upgrade is passed over, as a server may (RFC 9110, 7.8).
    """

    _in_chunks = False  # so goes what is still sent of the body

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Body) and self._in_chunks and event.data:
            # Each token comes this way. h11 would look again at what cannot have changed.
            await self.send(RawData(b"%x\r\n%b\r\n" % (len(event.data), event.data)))
            return
        await super().stream_send(event)
        self._in_chunks = isinstance(event, Response) and self._goes_in_chunks(event)

    def _goes_in_chunks(self, response: Response) -> bool:
        """Whether h11 has promised so: a body of unknown length, to a client of HTTP/1.1."""
        return (
            isinstance(self.connection, h11.Connection)
            and self.connection.our_state is h11.SEND_BODY
            and self.connection.their_http_version == b"1.1"
            and response.status_code not in NO_BODY
            and not any(name.lower() in FRAMING for name, _ in response.headers)
        )

    async def _check_protocol(self, event: h11.Request) -> None:
        if event.http_version != b"1.1" and event.http_version != b"1.0":
            await self._send_error_response(505)
            await self.send(Closed())

    async def _create_stream(self, request: h11.Request) -> None:
        await super()._create_stream(in_origin_form(request))


class Connection(TCPServer):
    """Serves what comes in from one client until either side ends it; `await` it.

    What a client sends while its answer is on the way is read as far as one piece, so that its
    leaving is noticed too.
    """

    def __init__(
        self,
        app: ASGIWrapper,
        config: Config,
        context: WorkerContext,
        turns: Turns,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(app, loop, config, context, {}, reader, writer)
        self._turns = turns
        self._http: Http11 | None = None
        self._client_left = False
        self._num_waiting = 0  # senders that wait for the client, or for one that does
        self.when_idle: Callable[[bool], None] = lambda is_idle: None  # told each time it changes
        self._transport = writer.transport
        self._low_water_bytes = self._transport.get_write_buffer_limits()[0]

    async def run(self) -> None:
        try:
            client, server = self._addresses()
            async with Handlers(self.loop) as self._task_group:
                await self._begin(client, server)
                await self.idle_task.restart(self._task_group, self._idle_timeout)
                await self._read_data()
                # The task group waits for it: nobody else would end it before its time.
                await self.idle_task.stop()
        except OSError:
            pass  # the client is gone
        finally:
            await self._close()
            # It and its protocol know each other: they would stay until the collector comes.
            self._http = None
            vars(self).pop("protocol", None)

    def abort(self) -> None:
        """End the connection now; what was not sent is lost."""
        self._transport.abort()

    async def protocol_send(self, event: Event) -> None:
        if not isinstance(event, RawData):
            if isinstance(event, Updated):
                self.when_idle(event.idle)
                if self._client_left:  # after the last answer there is no request to wait for
                    return
            await super().protocol_send(event)
            return
        try:
            await self._write(event.data)
        except TimeoutError:
            self.abort()
        except (ConnectionError, RuntimeError):
            pass  # the client is gone
        else:
            return
        await self.protocol.handle(Closed())

    async def _write(self, data: bytes) -> None:
        """Send `data`, in the order of the calls, and wait while the client is behind. Raises
        TimeoutError, ConnectionError or RuntimeError.
        """
        if self._num_waiting == 0:
            self._transport.write(data)
            if not self._is_behind():
                return  # each token comes this way: nothing is awaited
            data = b""
        self._num_waiting += 1
        try:
            async with self.send_lock:
                self._transport.write(data)
                if self._is_behind():
                    async with asyncio.timeout(SEND_TIMEOUT_S):
                        await self.writer.drain()
        finally:
            self._num_waiting -= 1

    def _is_behind(self) -> bool:
        """Whether more waits for the client than may be added to, or the client is gone."""
        waiting_bytes = self._transport.get_write_buffer_size()
        return waiting_bytes > self._low_water_bytes or self._transport.is_closing()

    def _addresses(self) -> tuple[Address, Address]:
        """The client's and ours. Raises OSError where the client has gone already."""
        socket = self.writer.get_extra_info("socket")
        names = (socket.getpeername(), socket.getsockname())
        client, server = (parse_socket_addr(socket.family, name) for name in names)
        return client, server

    async def _begin(self, client: Address, server: Address) -> None:
        is_encrypted = self.writer.get_extra_info("ssl_object") is not None
        self._http = Http11(
            self.app,
            self.config,
            self.context,
            self._task_group,
            ConnectionState({}),
            is_encrypted,
            client,
            server,
            self.protocol_send,
        )
        self.protocol = self._http  # type: ignore[assignment]
        await self._http.initiate()

    async def _read_data(self) -> None:
        data = await self._read()
        while data:
            if len(data) >= LARGE_BYTES:
                await self._turns.take()
            handling = asyncio.ensure_future(self.protocol.handle(RawData(data)))
            reading = asyncio.ensure_future(self._read())
            try:
                await asyncio.wait({handling, reading}, return_when=asyncio.FIRST_COMPLETED)
                if handling.done():
                    await handling
                data = await reading
                if data:  # it waits for the answer before, or for whoever reads the body
                    await asyncio.wait_for(handling, AHEAD_TIMEOUT_S)
                else:
                    await _settled(handling)
            except TimeoutError:
                break
            finally:
                for task in (handling, reading):
                    task.cancel()
        self._client_left = True
        await self.protocol.handle(Closed())

    async def _read(self) -> bytes:
        """What the client has sent; nothing when it has left."""
        try:
            return await self.reader.read(MAX_RECV)
        except OSError:
            return b""

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await super()._close()
        except TimeoutError:
            self.abort()


async def _settled(handling: asyncio.Future[None]) -> None:
    """Let what is being handled come as far as it does by itself: a request that has half begun
    would not hear that its client has left.
    """
    for _ in range(LAST_TURNS):
        if handling.done():
            return
        await asyncio.sleep(0)
