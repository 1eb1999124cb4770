"""One client's connection: Hypercorn's HTTP/1.1 with limits on everything a client can delay.

Owns when the connection ends: the client disconnects, is silent, does not read, or does not speak
HTTP.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

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

SEND_TIMEOUT_S = 60.0  # for a client that lags behind to read part of its answer
AHEAD_TIMEOUT_S = 10.0  # how long a client may have sent more than the app has read
CLOSE_TIMEOUT_S = 5.0  # for the last bytes of a connection that ends
LINGER_TIMEOUT_S = 2.0  # for a client that is still sending to read its refusal
NUM_LAST_ITERATIONS = 64  # of one read; one such read is handled per iteration, over all clients
LARGE_BYTES = 16 << 10  # of one read; of all clients, one such read is handled per iteration

SCHEMES = (b"http", b"https")
NO_BODY = frozenset((204, 304))
FRAMING = frozenset((b"content-length", b"transfer-encoding"))  # headers that delimit a body

BLANK_LINE = re.compile(rb"\n\r?\n")  # how h11 finds the end of a request's header fields
CONTENT_LENGTH = re.compile(rb"(?mi)^content-length[ \t]*:([^\n]*)$")
TRANSFER_ENCODING = re.compile(rb"(?mi)^transfer-encoding[ \t]*:")

Address = tuple[str, int] | None


class LoopThrottle:
    """Spreads work over iterations of the event loop: one waiter proceeds per iteration, in order,
    so that everything else waits for at most one piece of work.
    """

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    async def wait(self) -> None:
        """Return in an iteration of the loop in which no other waiter returns."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters.append(waiter)
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._wake_next)
        await waiter

    def _wake_next(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():  # it may have been cancelled
                waiter.set_result(None)
                break
        self._is_scheduled = bool(self._waiters)
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._wake_next)


class AppTaskGroup(TaskGroup):
    """Hypercorn's task group, but notifying a handler of a disconnect never blocks: otherwise a
    handler that has stopped reading a body would keep the connection forever.
    """

    on_read: Callable[[], Awaitable[None]] | None = None  # awaited when a handler reads a body

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
            while not messages.empty():  # drop the body of a client that has disconnected
                messages.get_nowait()
            messages.put_nowait(message)

        async def get() -> ASGIReceiveEvent:
            if self.on_read is not None and messages.empty():
                await self.on_read()
            return await messages.get()

        in_thread = partial(self._loop.run_in_executor, None)
        self.spawn(_handle, app, config, scope, get, send, in_thread, None)
        return put


class StrictH11(h11.Connection):
    """The server side of h11 that refuses requests which a proxy in front of it might delimit
    differently. `Http11` decides when to send 100 Continue.
    """

    def next_event(self) -> Any:
        """See h11. Raises h11.RemoteProtocolError."""
        if self.their_state is h11.IDLE:
            head, *_body = BLANK_LINE.split(self.trailing_data[0], maxsplit=1)
            if (words := ambiguity_of(head)) is not None:
                raise h11.RemoteProtocolError(words)
        return super().next_event()

    @property
    def they_are_waiting_for_100_continue(self) -> bool:
        return False  # Hypercorn would send 100 Continue immediately


def ambiguity_of(head: bytes) -> str | None:
    """Why header fields, perhaps incomplete, can be interpreted in two ways although RFC 9112 (5.2,
    6.1, 6.3) lets a server accept them: folded lines, several lengths, a length beside chunks.
    """
    if b"\n " in head or b"\n\t" in head:
        return "a header field is folded"
    lengths = CONTENT_LENGTH.findall(head)
    if len(lengths) > 1 or any(b"," in length for length in lengths):
        return "several Content-Length"
    if lengths and TRANSFER_ENCODING.search(head):
        return "Content-Length beside Transfer-Encoding"
    return None


class Http11(H11Protocol):
    """HTTP/1.1 only. Offers to upgrade are ignored, as RFC 9110, 7.8 allows."""

    _is_chunked = False  # how the rest of the current body is sent
    _head = b""  # the head of a response whose body follows immediately: both go out in one write

    async def initiate(self) -> None:
        self.connection = StrictH11(
            h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size
        )

    async def tell_to_continue(self) -> None:
        """Send 100 Continue to a client that waits for it (RFC 9110, 10.1.1). Called when the app
        reads the body, so a request that its header disqualifies is refused first.
        """
        connection = self.connection
        if isinstance(connection, StrictH11) and connection.client_is_waiting_for_100_continue:
            await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Body) and self._is_chunked and event.data:
            # Runs for each token. h11 would repeat validations whose result cannot have changed.
            await self.send(RawData(b"%x\r\n%b\r\n" % (len(event.data), event.data)))
            return
        if isinstance(event, Response) and self.is_receiving:
            event = replace(event, headers=[*event.headers, (b"connection", b"close")])
        await super().stream_send(event)
        self._is_chunked = isinstance(event, Response) and self._becomes_chunked(event)

    async def _send_h11_event(self, event: Any) -> None:
        try:
            data = self.connection.send(event) or b""
        except h11.LocalProtocolError:
            if self.connection.their_state is not h11.ERROR:
                raise
            return
        if isinstance(event, h11.Response) and has_length(event):
            self._head = data
            return
        head, self._head = self._head, b""
        if head or data:  # the end of a body of known length has no bytes
            await self.send(RawData(head + data))

    @property
    def is_receiving(self) -> bool:
        """Whether part of a request's body has not arrived yet."""
        return self.connection.their_state is h11.SEND_BODY

    def _becomes_chunked(self, response: Response) -> bool:
        """Whether h11 has announced chunked encoding: a body of unknown length, for an HTTP/1.1
        client.
        """
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
        if self.connection.our_state is not h11.SEND_RESPONSE:
            return  # already refused
        await super()._create_stream(in_origin_form(request))


def has_length(response: h11.Response) -> bool:
    """Whether the response declares the length of its body: then the app has all of it."""
    return any(name == b"content-length" for name, _ in response.headers)


def in_origin_form(request: h11.Request) -> h11.Request:
    """Turn an absolute-form target, which a server must accept, into origin form (RFC 9112, 3.2).

    The authority of the URI replaces the Host header (3.2.2).
    """
    scheme, separator, rest = request.target.partition(b"://")
    if not separator or scheme.lower() not in SCHEMES:
        return request
    end = min((at for at in map(rest.find, (b"/", b"?")) if at >= 0), default=len(rest))
    authority, target = rest[:end], rest[end:]
    if not authority:
        return request
    others = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        headers=[(b"host", authority), *others],
        target=target if target.startswith(b"/") else b"/" + target,
        http_version=request.http_version,
    )


class Connection(TCPServer):
    """Serves one client until either side ends the connection; `await` it.

    While an answer is being sent, one more piece is read ahead: only reading reveals a disconnect.
    A client that has its answer but is still sending a body gets a moment to read the answer: if
    the socket were closed, the client's next write would be answered with a reset.
    """

    def __init__(
        self,
        app: ASGIWrapper,
        config: Config,
        context: WorkerContext,
        throttle: LoopThrottle,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(app, loop, config, context, {}, reader, writer)
        self._throttle = throttle
        self._http: Http11 | None = None
        self._client_left = False
        self._lingering: asyncio.TimerHandle | None = None  # while input is discarded
        self._num_blocked = 0  # senders that wait for the client, or for such a sender
        self.on_idle: Callable[[bool], None] = lambda is_idle: None  # called on each change
        self._transport = writer.transport
        self._low_water_bytes = self._transport.get_write_buffer_limits()[0]

    async def run(self) -> None:
        group = AppTaskGroup(self.loop)
        try:
            client, server = self._addresses()
            async with group as self._task_group:
                await self._begin(client, server, group)
                await self.idle_task.restart(self._task_group, self._idle_timeout)
                await self._read_data()
                # The task group would wait until the idle task expires.
                await self.idle_task.stop()
        except OSError:
            pass  # the client has disconnected
        finally:
            await self._close()
            if self._lingering is not None:
                self._lingering.cancel()
            # Break the reference cycle with the protocol; otherwise both live until a garbage
            # collection.
            self._http = group.on_read = None
            vars(self).pop("protocol", None)

    def abort(self) -> None:
        """Close the connection now and drop unsent data."""
        self._transport.abort()

    async def protocol_send(self, event: Event) -> None:
        if not isinstance(event, RawData):
            if isinstance(event, Updated):
                self.on_idle(event.idle)
                if self._client_left:  # no further request can arrive
                    return
            if isinstance(event, Closed) and self._must_linger():
                self._linger()
                return
            await super().protocol_send(event)
            return
        try:
            await self._write(event.data)
        except TimeoutError:
            self.abort()
        except (ConnectionError, RuntimeError):
            pass  # the client has disconnected
        else:
            return
        await self.protocol.handle(Closed())

    async def _write(self, data: bytes) -> None:
        """Send `data` in the order of the calls, and wait while the client lags behind. Raises
        TimeoutError, ConnectionError or RuntimeError.
        """
        if self._num_blocked == 0:
            self._transport.write(data)
            if not self._is_behind():
                return  # the path of each token: nothing to await
            data = b""
        self._num_blocked += 1
        try:
            async with self.send_lock:
                self._transport.write(data)
                if self._is_behind():
                    async with asyncio.timeout(SEND_TIMEOUT_S):
                        await self.writer.drain()
        finally:
            self._num_blocked -= 1

    def _is_behind(self) -> bool:
        """Whether the write buffer is above its low-water mark, or the client has disconnected."""
        buffered_bytes = self._transport.get_write_buffer_size()
        return buffered_bytes > self._low_water_bytes or self._transport.is_closing()

    def _addresses(self) -> tuple[Address, Address]:
        """The client's address and the server's. Raises OSError if the client has already
        disconnected.
        """
        socket = self.writer.get_extra_info("socket")
        names = (socket.getpeername(), socket.getsockname())
        client, server = (parse_socket_addr(socket.family, name) for name in names)
        return client, server

    async def _begin(self, client: Address, server: Address, group: AppTaskGroup) -> None:
        is_encrypted = self.writer.get_extra_info("ssl_object") is not None
        self._http = Http11(
            self.app,
            self.config,
            self.context,
            group,
            ConnectionState({}),
            is_encrypted,
            client,
            server,
            self.protocol_send,
        )
        self.protocol = self._http  # type: ignore[assignment]
        group.on_read = self._http.tell_to_continue
        await self._http.initiate()

    async def _read_data(self) -> None:
        data = await self._read()
        while data:
            if len(data) >= LARGE_BYTES:
                await self._throttle.wait()
            if self._lingering is not None:
                data = await self._read()
                continue
            handling = asyncio.ensure_future(self.protocol.handle(RawData(data)))
            reading = asyncio.ensure_future(self._read())
            try:
                await asyncio.wait({handling, reading}, return_when=asyncio.FIRST_COMPLETED)
                if handling.done():
                    await handling
                data = await reading
                if data:  # handling waits for the previous answer, or for the app to read
                    await asyncio.wait_for(handling, AHEAD_TIMEOUT_S)
                else:
                    await _settle(handling)
            except TimeoutError:
                break
            finally:
                for task in (handling, reading):
                    task.cancel()
        self._client_left = True
        await self.protocol.handle(Closed())

    async def _read(self) -> bytes:
        """The client's next bytes; b"" after it has disconnected."""
        try:
            return await self.reader.read(MAX_RECV)
        except OSError:
            return b""

    def _must_linger(self) -> bool:
        """Whether the client is connected and has not sent all of its body."""
        is_receiving = self._http is not None and self._http.is_receiving
        return is_receiving and not self._transport.is_closing()

    def _linger(self) -> None:
        """Send nothing more, and discard input until the client disconnects, or for
        LINGER_TIMEOUT_S.
        """
        if self._lingering is not None:
            return
        self._lingering = self.loop.call_later(LINGER_TIMEOUT_S, self.abort)
        if self._transport.can_write_eof():
            self._transport.write_eof()

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await super()._close()
        except OSError:  # TimeoutError is one
            self.abort()


async def _settle(handling: asyncio.Future[None]) -> None:
    """Let `handling` run as far as it can without waiting: a request whose handler has not started
    would not be notified of the disconnect.
    """
    for _ in range(NUM_LAST_ITERATIONS):
        if handling.done():
            return
        await asyncio.sleep(0)
