"""Files of a certificate for localhost, and a client of HTTP/2 over TLS that does what it is told.

Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, Event, ResponseReceived

from luceasync.config import ServerConfig

FILES = Path(__file__).parent / "tls"
CERT, KEY = FILES / "cert.pem", FILES / "key.pem"
SECURE = ServerConfig(tls_cert=CERT, tls_key=KEY)
DEADLINE_S = 20.0


def trusting(*protocols: str) -> ssl.SSLContext:
    """A client's context that trusts the certificate and offers `protocols`."""
    context = ssl.create_default_context(cafile=CERT)
    if protocols:
        context.set_alpn_protocols(protocols)
    return context


class H2Client:
    """One connection; `events` is all that came."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.h2 = H2Connection(H2Configuration(client_side=True))
        self.events: list[Event] = []
        self.ended = False

    @classmethod
    async def connect(cls, host: str, port: int) -> Self:
        reader, writer = await asyncio.open_connection(host, port, ssl=trusting("h2"))
        client = cls(reader, writer)
        client.h2.initiate_connection()
        await client.flush()
        return client

    async def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())
        with suppress(ConnectionError):
            await self.writer.drain()

    def begin(self, method: str, path: str, *, end: bool = True, **headers: str) -> int:
        """Open a stream, without sending it yet."""
        stream_id = self.h2.get_next_available_stream_id()
        head = {":method": method, ":path": path, ":scheme": "https", ":authority": "localhost"}
        self.h2.send_headers(stream_id, list((head | headers).items()), end_stream=end)
        return stream_id

    async def ask(self, method: str, path: str, body: bytes = b"") -> int:
        """Open a stream and send all of it."""
        stream_id = self.begin(method, path, end=not body)
        if body:
            self.h2.send_data(stream_id, body, end_stream=True)
        await self.flush()
        return stream_id

    async def until(self, reached: Callable[[Self], bool]) -> None:
        """Read until it is so. Windows are opened as data comes."""
        async with asyncio.timeout(DEADLINE_S):
            while not reached(self):
                data = b""
                with suppress(ConnectionError):
                    data = await self._reader.read(65536)
                if not data:
                    self.ended = True
                    assert reached(self), self.events[-5:]
                    return
                for event in self.h2.receive_data(data):
                    self.events.append(event)
                    if isinstance(event, DataReceived):
                        num_bytes = event.flow_controlled_length or 0
                        self.h2.acknowledge_received_data(num_bytes, event.stream_id)
                await self.flush()

    def status(self, stream_id: int) -> int | None:
        """Of the answer on a stream; None: it has not come."""
        for event in self.events:
            if isinstance(event, ResponseReceived) and event.stream_id == stream_id:
                return int(dict(event.headers or [])[b":status"])
        return None

    def body(self, stream_id: int) -> bytes:
        parts = (e for e in self.events if isinstance(e, DataReceived))
        return b"".join(e.data or b"" for e in parts if e.stream_id == stream_id)

    def has(self, kind: type[Event], stream_id: int | None = None) -> bool:
        """Whether an event of that kind has come."""
        found = (event for event in self.events if isinstance(event, kind))
        return any(stream_id in (None, getattr(event, "stream_id", None)) for event in found)

    @property
    def goaway(self) -> int | None:
        """Why the server ended the connection."""
        for event in self.events:
            if isinstance(event, ConnectionTerminated):
                return int(event.error_code or 0)
        return None

    def close(self) -> None:
        self.writer.transport.abort()
