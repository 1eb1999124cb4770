"""HTTP/2 on one connection: streams by h2, each with Hypercorn's stream and handler.

Owns what a client may have open, reset and keep waiting. Hypercorn's own protocol bounds none of
it. There are no priorities, no pushes and no tunnels. Knows no route, and no socket.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.events import (
    Event as H2Event,
)
from h2.exceptions import ProtocolError
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import (
    Body,
    EndBody,
    Request,
    Response,
    StreamClosed,
)
from hypercorn.protocol.events import (
    Event as StreamEvent,
)
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import ConnectionState
from hypercorn.utils import filter_pseudo_headers

from luceasync.server.frames import MAX_STREAMS, Frames, Purse, bounded_connection

Address = tuple[str, int] | None

NUM_FRAMES_AT_ONCE = 4  # then others have their turn
WINDOW_TIMEOUT_S = 60.0  # in which a client has to make room for some of an answer
GOODBYE_S = 0.1  # for the last word to a client that floods us, of which no more is read

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stream:
    """One that is open. `request`: what its handler is begun with; None: it has begun. `heard`:
    its request is complete. `said`: so is its answer.
    """

    http: HTTPStream
    request: Request | None
    heard: bool = False
    said: bool = False


class Http2:
    """The protocol of a connection that `send` writes to and `abort` ends at once."""

    def __init__(
        self,
        app: ASGIWrapper,
        config: Config,
        context: WorkerContext,
        task_group: TaskGroup,
        client: Address,
        server: Address,
        send: Callable[[Event], Awaitable[None]],
        abort: Callable[[], None],
    ) -> None:
        self._app = app
        self._config = config
        self._context = context
        self._task_group = task_group
        self._client = client
        self._server = server
        self._send = send
        self._abort = abort
        self._h2 = bounded_connection()
        self._frames = Frames()
        self._purse = Purse()
        self._streams: dict[int, _Stream] = {}
        self._windows_moved = asyncio.Event()
        self._closed = False

    async def initiate(self) -> None:
        """Say what we allow."""
        self._h2.initiate_connection()
        await self._flush()

    async def handle(self, event: Event) -> None:
        """Take what came in, or the end of the connection."""
        if isinstance(event, Closed):
            await self._close()
        elif isinstance(event, RawData):
            for number, frame in enumerate(self._frames.cut(event.data), 1):
                if self._closed:
                    return
                await self._receive(frame)
                if number % NUM_FRAMES_AT_ONCE == 0:
                    await self._begin_handlers()
                    await asyncio.sleep(0)
            await self._begin_handlers()

    async def _receive(self, frame: bytes) -> None:
        if not self._purse.pay_for(frame):
            await self._end(ErrorCodes.ENHANCE_YOUR_CALM)
            return
        try:
            events = self._h2.receive_data(frame)
        except ProtocolError:  # h2 has written why
            await self._end(None)
            return
        for event in events:
            await self._take(event)
        await self._flush()

    async def _take(self, event: H2Event) -> None:
        match event:
            case RequestReceived():
                await self._begin_stream(event)
            case DataReceived(stream_id=stream_id) if stream_id is not None:
                if stream := self._streams.get(stream_id):
                    await self._begin_handler(stream)
                    await stream.http.handle(Body(stream_id=stream_id, data=event.data or b""))
                # Nobody reads more than that ahead of the handler: the client waits for this.
                self._h2.acknowledge_received_data(event.flow_controlled_length or 0, stream_id)
            case StreamEnded(stream_id=stream_id) if stream_id is not None:
                if stream := self._streams.get(stream_id):
                    stream.heard = True
                    if stream.request is None:
                        await stream.http.handle(EndBody(stream_id=stream_id))
            case StreamReset(stream_id=stream_id):
                if not event.remote_reset and not self._purse.pay_for_reset():
                    await self._end(ErrorCodes.ENHANCE_YOUR_CALM)
                await self._drop(stream_id)
            case WindowUpdated() | RemoteSettingsChanged():
                self._wake_senders()
            case ConnectionTerminated():
                await self._end(None)

    async def _begin_stream(self, event: RequestReceived) -> None:
        stream_id = event.stream_id
        assert stream_id is not None and event.headers is not None
        headers = [(bytes(name), bytes(value)) for name, value in event.headers]
        said = dict(headers)
        method, path = said.get(b":method", b""), said.get(b":path", b"")
        if len(self._streams) >= MAX_STREAMS or self._context.terminated.is_set():
            self._h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            return
        if method == b"CONNECT" or not (method + path).isascii():
            self._h2.reset_stream(stream_id, ErrorCodes.PROTOCOL_ERROR)
            return
        http = HTTPStream(
            self._app,
            self._config,
            self._context,
            self._task_group,
            True,
            self._client,
            self._server,
            self._stream_send,
            stream_id,
        )
        request = Request(
            stream_id=stream_id,
            headers=filter_pseudo_headers(headers),
            http_version="2",
            method=method.decode().upper(),
            raw_path=path,
            state=ConnectionState({}),
        )
        self._streams[stream_id] = _Stream(http, request)
        if len(self._streams) == 1:
            await self._send(Updated(idle=False))

    async def _begin_handlers(self) -> None:
        """Of the streams that are still open: what is reset at once costs no handler."""
        for stream in list(self._streams.values()):
            await self._begin_handler(stream)

    async def _begin_handler(self, stream: _Stream) -> None:
        request, stream.request = stream.request, None
        if request is not None:
            await stream.http.handle(request)
            if stream.heard:
                await stream.http.handle(EndBody(stream_id=request.stream_id))

    async def _stream_send(self, event: StreamEvent) -> None:
        """Send what a handler says. Nothing, once its stream or its connection has ended."""
        stream_id = event.stream_id
        if (stream := self._streams.get(stream_id)) is None:
            return
        try:
            if isinstance(event, StreamClosed):
                await self._finish(stream_id, stream)
            elif isinstance(event, Response):
                status = (b":status", b"%d" % event.status_code)
                ours = self._config.response_headers("h2")
                self._h2.send_headers(stream_id, [status, *event.headers, *ours])
            elif isinstance(event, Body):
                await self._send_body(stream_id, event.data)
            elif isinstance(event, EndBody):
                self._h2.end_stream(stream_id)
                stream.said = True
            await self._flush()
        except ProtocolError:
            await self._drop(stream_id)
        except TimeoutError:
            self._h2.reset_stream(stream_id, ErrorCodes.CANCEL)
            await self._drop(stream_id)
            await self._flush()

    async def _send_body(self, stream_id: int, data: bytes) -> None:
        """Raises TimeoutError where the client has made no room in time."""
        begin = 0
        while begin < len(data):
            async with asyncio.timeout(WINDOW_TIMEOUT_S):
                window_bytes = await self._window_bytes(stream_id)
            if window_bytes == 0:
                return
            end = begin + min(window_bytes, self._h2.max_outbound_frame_size)
            self._h2.send_data(stream_id, data[begin:end])
            self._purse.paid_back()
            await self._flush()
            begin = end

    async def _window_bytes(self, stream_id: int) -> int:
        """How much the client would read now, at least a byte of it; 0 where the stream ended."""
        while stream_id in self._streams:
            num_bytes = self._h2.local_flow_control_window(stream_id)
            if num_bytes > 0:
                return num_bytes
            await self._windows_moved.wait()
        return 0

    def _wake_senders(self) -> None:
        self._windows_moved.set()
        self._windows_moved = asyncio.Event()

    async def _finish(self, stream_id: int, stream: _Stream) -> None:
        """The handler is done with it; a body that is still on its way is not wanted."""
        if not (stream.heard and stream.said):
            error = ErrorCodes.NO_ERROR if stream.said else ErrorCodes.INTERNAL_ERROR
            self._h2.reset_stream(stream_id, error)
        await self._drop(stream_id)

    async def _drop(self, stream_id: int | None) -> None:
        """Tell its handler, if it has one still, that nobody listens."""
        stream = self._streams.pop(stream_id, None) if stream_id is not None else None
        if stream is None or stream_id is None:
            return
        self._wake_senders()
        if stream.request is None:
            await stream.http.handle(StreamClosed(stream_id=stream_id))
        if not self._streams and not self._closed:
            await self._send(Updated(idle=True))

    async def _end(self, error: ErrorCodes | None) -> None:
        """End the connection; `error`: for which reason, unless h2 has said so already."""
        if self._closed:
            return
        if error is not None:
            logger.debug("A connection of HTTP/2 ends: %s", error.name)
            self._h2.close_connection(error)
        await self._close()
        await self._flush()
        if error is not None:  # a polite end would read, and decipher, what still comes
            await asyncio.sleep(GOODBYE_S)
            self._abort()
        await self._send(Closed())

    async def _close(self) -> None:
        self._closed = True
        for stream_id in list(self._streams):
            await self._drop(stream_id)

    async def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data:
            await self._send(RawData(data))
