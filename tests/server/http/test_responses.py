"""The headers of an event stream go out with its first bytes, and silence is filled."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from luceasync.server.http.responses import (
    JSON_LINES,
    SERVER_SENT,
    EventStream,
    encode_event,
    encode_line,
)


class Wire:
    """Records what was sent; every message sets `seen`."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.seen = asyncio.Event()

    async def send(self, message: Any) -> None:
        await asyncio.sleep(0)  # another writer may run here
        self.messages.append(message)
        self.seen.set()

    @property
    def kinds(self) -> list[str]:
        return [message["type"].removeprefix("http.response.") for message in self.messages]


def test_an_event_is_one_line_whatever_the_text():
    assert encode_event({"text": "a\nb\r\u2028"}).count(b"\n") == 2


async def test_nothing_is_sent_before_the_first_bytes():
    wire = Wire()
    events = EventStream(wire.send)
    assert (events.started, wire.messages) == (False, [])
    await events.write(b"a")
    assert events.started
    headers = dict(wire.messages[0]["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"


async def test_two_writers_start_the_response_once_and_first():
    wire = Wire()
    events = EventStream(wire.send)
    await asyncio.gather(*(events.write(b"x") for _ in range(3)))
    await events.close(b"y")
    assert wire.kinds == ["start", "body", "body", "body", "body"]
    assert [message["more_body"] for message in wire.messages[1:]] == [True, True, True, False]


async def test_a_cancelled_writer_does_not_block_others():
    wire = Wire()
    events = EventStream(wire.send)
    first, second, third = (asyncio.create_task(events.write(b"x")) for _ in range(3))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait_for(asyncio.gather(first, third), 10)
    assert wire.kinds == ["start", "body", "body"]


async def test_silence_is_filled_with_comments():
    wire = Wire()
    task = asyncio.create_task(EventStream(wire.send).keep_alive(0.01))
    while len(wire.messages) < 3:
        wire.seen.clear()
        await wire.seen.wait()
    task.cancel()
    assert wire.kinds == ["start", "body", "body"]
    assert wire.messages[1]["body"] == SERVER_SENT.keep_alive == b": keep-alive\n\n"


async def test_lines_of_json_are_whole_around_a_silence():
    """A keep-alive is the space before the next line: an empty line would be invalid JSON."""
    wire = Wire()
    events = EventStream(wire.send, JSON_LINES)
    await events.write(encode_line({"text": "a\nb"}))
    task = asyncio.create_task(events.keep_alive(0.01))
    while len(wire.messages) < 4:
        wire.seen.clear()
        await wire.seen.wait()
    task.cancel()
    await events.close(encode_line({"text": "c"}))
    assert dict(wire.messages[0]["headers"])[b"content-type"] == b"application/x-ndjson"
    lines = b"".join(message["body"] for message in wire.messages[1:]).splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["a\nb", "c"]
