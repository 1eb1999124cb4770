"""Work of a server beside what is measured: a thread whose loop writes events of many answers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NUM_STREAMS = 16
TOKEN_S = 10e-3  # between two events of a stream


@contextmanager
def streams() -> Iterator[None]:
    """A thread whose event loop writes events of NUM_STREAMS answers, as a server does."""
    stop = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_stream_all(stop)))
    thread.start()
    yield
    stop.set()
    thread.join()


async def _stream_all(stop: threading.Event) -> None:
    await asyncio.gather(*(_stream(stop) for _ in range(NUM_STREAMS)))


async def _stream(stop: threading.Event) -> None:
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=ours)
    other_reader, other_writer = await asyncio.open_connection(sock=theirs)
    while not stop.is_set():
        choice = {"index": 0, "delta": {"content": " word"}, "finish_reason": None}
        event = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "choices": [choice]}
        writer.write(f"data: {json.dumps(event)}\n\n".encode())
        await writer.drain()
        await other_reader.read(1 << 16)
        await asyncio.sleep(TOKEN_S)
    for each in (writer, other_writer):
        each.close()
        await each.wait_closed()
