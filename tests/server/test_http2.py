"""HTTP/2 over TLS answers as HTTP/1.1 does, and no client's streams are another's trouble."""

from __future__ import annotations

import asyncio
import gc
import json

import pytest
from h2.errors import ErrorCodes
from h2.events import StreamEnded, StreamReset
from h2.settings import SettingCodes
from hypercorn.protocol.http_stream import HTTPStream

from luceasync.server import frames, http2
from luceasync.server.http.connection import Connection
from luceasync.server.http.connections import Arrival
from luceasync.server.http2 import Http2
from tests.deltas import text_delta
from tests.server.scripted import ScriptedEngine, answer
from tests.server.secure import DEADLINE_S, SECURE, H2Client, trusting

CHAT = "/v1/chat/completions"
BODY = b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true}'


async def connect(client) -> H2Client:
    return await H2Client.connect(client.base_url.host, client.base_url.port)


def endless() -> ScriptedEngine:
    return ScriptedEngine([text_delta(0, "Hel"), asyncio.Event()])


async def test_streams_are_answered_beside_each_other(on_port):
    async with on_port(ScriptedEngine(), SECURE) as client:
        h2 = await connect(client)
        streams = [await h2.ask("POST", CHAT, BODY) for _ in range(3)]
        health = await h2.ask("GET", "/health")
        await h2.until(lambda h2: all(h2.has(StreamEnded, s) for s in [*streams, health]))
        assert json.loads(h2.body(health))["status"] == "ok"
        for stream in streams:
            assert h2.status(stream) == 200
            assert h2.body(stream).endswith(b"data: [DONE]\n\n")
        h2.close()


async def test_without_http_2_in_the_handshake_it_is_http_1(on_port):
    async with on_port(ScriptedEngine(), SECURE) as client:
        response = await client.get("/health")
        assert (response.status_code, response.http_version) == (200, "HTTP/1.1")
        assert client.base_url.scheme == "https"


async def test_a_stream_that_is_reset_frees_its_lane_and_no_other(on_port):
    engine = endless()
    async with on_port(engine, SECURE) as client:
        h2 = await connect(client)
        left, stays = await h2.ask("POST", CHAT, BODY), await h2.ask("POST", CHAT, BODY)
        await h2.until(lambda h2: b"Hel" in h2.body(left) and b"Hel" in h2.body(stays))
        h2.h2.reset_stream(left)
        await h2.flush()
        async with asyncio.timeout(DEADLINE_S):
            await engine.streams[0].closed.wait()
        assert not engine.streams[1].closed.is_set()
        h2.close()
        async with asyncio.timeout(DEADLINE_S):
            await engine.streams[1].closed.wait()


def of_connections() -> list[object]:
    """What there is of connections, in the whole process."""
    kinds = (Connection, Http2, HTTPStream, Arrival)
    return [each for each in gc.get_objects() if type(each) in kinds]


async def until_nothing_is_left(others: list[object], *, collect: bool) -> None:
    """Of any connection but those of `others`. `collect`: the collector may help."""
    known = {id(each) for each in others}
    async with asyncio.timeout(DEADLINE_S):
        while any(id(each) not in known for each in of_connections()):
            await asyncio.sleep(0.05)
            if collect:
                gc.collect()


@pytest.mark.slow
async def test_nothing_is_left_of_connections_that_ended(on_port):
    gc.collect()
    others = of_connections()  # a test that failed may hold some
    gc.disable()
    try:
        async with on_port(endless(), SECURE) as client:
            for _ in range(3):
                h2 = await connect(client)
                for _ in range(1000):
                    h2.h2.reset_stream(h2.begin("GET", "/health"))
                await h2.flush()
                await h2.until(lambda h2: h2.ended)
            await until_nothing_is_left(others, collect=False)
            for _ in range(3):  # in the middle of an answer
                h2 = await connect(client)
                stream = await h2.ask("POST", CHAT, BODY)
                await h2.until(lambda h2, stream=stream: b"Hel" in h2.body(stream))
                h2.close()
            await until_nothing_is_left(others, collect=True)
    finally:
        gc.enable()


async def test_rapid_resets_end_the_connection_and_only_that(on_port):
    async with on_port(ScriptedEngine(), SECURE) as client:
        h2, other = await connect(client), await connect(client)
        for _ in range(1000):
            h2.h2.reset_stream(h2.begin("GET", "/health"))
        await h2.flush()
        await h2.until(lambda h2: h2.goaway is not None)
        assert h2.goaway == ErrorCodes.ENHANCE_YOUR_CALM
        await h2.until(lambda h2: h2.ended)
        health = await other.ask("GET", "/health")
        await other.until(lambda h2: h2.has(StreamEnded, health))
        h2.close()
        other.close()


async def test_a_few_resets_do_not(on_port):
    async with on_port(ScriptedEngine(), SECURE) as client:
        h2 = await connect(client)
        for _ in range(90):
            h2.h2.reset_stream(h2.begin("GET", "/health"))
        await h2.flush()
        health = await h2.ask("GET", "/health")
        await h2.until(lambda h2: h2.has(StreamEnded, health))
        h2.close()


PING = bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) + bytes(8)
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
PRIORITY = bytes([0, 0, 5, 2, 0, 0, 0, 0, 99]) + bytes([0, 0, 0, 0, 1])
UNKNOWN = bytes([0, 0, 0, 99, 0, 0, 0, 0, 0])
WINDOW = bytes([0, 0, 4, 8, 0, 0, 0, 0, 0, 0, 0, 0, 1])


@pytest.mark.parametrize("frame", [PING, SETTINGS, PRIORITY, UNKNOWN, WINDOW])
async def test_a_flood_of_frames_that_ask_for_nothing_ends_the_connection(on_port, frame):
    async with on_port(ScriptedEngine(), SECURE) as client:
        h2 = await connect(client)
        h2.writer.write(frame * 5000)
        await h2.until(lambda h2: h2.goaway is not None)
        assert h2.goaway == ErrorCodes.ENHANCE_YOUR_CALM
        h2.close()


async def test_resets_that_a_client_makes_us_send_count_as_its_own(on_port, monkeypatch):
    monkeypatch.setattr(frames, "MAX_RESETS", 3.0)
    monkeypatch.setattr(frames, "RESETS_PER_S", 0.0)
    engine = endless()
    async with on_port(engine, SECURE) as client:
        h2 = await connect(client)
        for _ in range(4):
            stream = await h2.ask("POST", CHAT, BODY)
            await h2.until(lambda h2, stream=stream: b"Hel" in h2.body(stream))
            overflow = stream.to_bytes(4, "big") + (2**31 - 1).to_bytes(4, "big")
            h2.writer.write(bytes([0, 0, 4, 8, 0]) + overflow)
            await h2.until(lambda h2, s=stream: h2.goaway is not None or h2.has(StreamReset, s))
        assert h2.goaway == ErrorCodes.ENHANCE_YOUR_CALM
        async with asyncio.timeout(DEADLINE_S):
            for stream in engine.streams:
                await stream.closed.wait()
        h2.close()


async def test_more_streams_than_are_allowed_end_the_connection(on_port):
    engine = endless()
    async with on_port(engine, SECURE) as client:
        h2 = await connect(client)
        await h2.until(
            lambda h2: h2.h2.remote_settings.max_concurrent_streams == frames.MAX_STREAMS
        )
        h2.h2.remote_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 1000
        h2.h2.remote_settings.acknowledge()
        for _ in range(frames.MAX_STREAMS + 1):
            await h2.ask("POST", CHAT, BODY)
        await h2.until(lambda h2: h2.goaway is not None)
        h2.close()


async def test_a_list_of_headers_is_bounded(on_port):
    async with on_port(ScriptedEngine(), SECURE) as client:
        h2 = await connect(client)
        h2.begin("GET", "/health", x="x" * (frames.MAX_HEADER_LIST_BYTES + 1))
        await h2.flush()
        await h2.until(lambda h2: h2.goaway is not None)
        h2.close()


async def test_a_client_that_opens_no_window_loses_its_answer(on_port, monkeypatch):
    monkeypatch.setattr(http2, "WINDOW_TIMEOUT_S", 0.2)
    engine = ScriptedEngine([*[text_delta(0, "x" * 10**5)] * 50, *answer("!")])
    async with on_port(engine, SECURE) as client:
        h2 = await connect(client)
        h2.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        stream = await h2.ask("POST", CHAT, BODY)
        await h2.until(lambda h2: h2.has(StreamReset, stream))
        async with asyncio.timeout(DEADLINE_S):
            await engine.streams[0].closed.wait()
        health = await h2.ask("GET", "/ready")  # the connection is as good as before
        await h2.until(lambda h2: h2.status(health) is not None)
        h2.close()


async def test_long_answers_and_long_bodies_pass_through_the_windows(on_port):
    text = "x" * 300_000
    engine = ScriptedEngine(answer(text))
    async with on_port(engine, SECURE) as client:
        h2 = await connect(client)
        body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
        stream = h2.begin("POST", CHAT, end=False)
        begin = 0
        while begin < len(body):
            await h2.flush()
            window = min(h2.h2.local_flow_control_window(stream), 16384)
            if window == 0:
                await h2.until(lambda h2: h2.h2.local_flow_control_window(stream) > 0)
                continue
            end = min(len(body), begin + window)
            h2.h2.send_data(stream, body[begin:end], end_stream=end == len(body))
            begin = end
        await h2.flush()
        await h2.until(lambda h2: h2.has(StreamEnded, stream))
        assert json.loads(h2.body(stream))["choices"][0]["message"]["content"] == text
        assert engine.requests[0].prompt.messages[0]["content"] == text
        h2.close()


async def test_a_body_that_nobody_wants_is_told_to_stop(on_port):
    async with on_port(ScriptedEngine(), SECURE) as client:
        h2 = await connect(client)
        stream = h2.begin("POST", "/health", end=False)
        await h2.flush()
        await h2.until(lambda h2: h2.has(StreamReset, stream))
        assert h2.status(stream) == 405
        health = await h2.ask("GET", "/health")
        await h2.until(lambda h2: h2.has(StreamEnded, health))
        h2.close()


@pytest.mark.parametrize("path", ["/\xe9", "*", "/health#x", "/%ff%00"])
async def test_a_path_that_is_none_is_nobody_elses_trouble(on_port, path):
    async with on_port(ScriptedEngine(), SECURE) as client:
        h2 = await connect(client)
        stream, health = h2.begin("GET", path), h2.begin("GET", "/health")
        await h2.flush()
        await h2.until(lambda h2: h2.has(StreamEnded, health))
        await h2.until(lambda h2: h2.has(StreamReset, stream) or h2.status(stream) in (200, 404))
        h2.close()


async def test_a_tunnel_is_not_dug(on_port):
    async with on_port(ScriptedEngine(), SECURE) as client:
        h2 = await connect(client)
        stream = h2.h2.get_next_available_stream_id()
        h2.h2.send_headers(stream, [(":method", "CONNECT"), (":authority", "example.org:80")])
        await h2.flush()
        await h2.until(lambda h2: h2.has(StreamReset, stream))
        h2.close()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"P" * 24, b"\x00" * 100])
async def test_what_is_no_http_2_ends_the_connection(on_port, said):
    async with on_port(ScriptedEngine(), SECURE) as client:
        h2 = await connect(client)
        h2.close()
        raw = await connect_raw(client)
        raw[1].write(said)
        async with asyncio.timeout(DEADLINE_S):
            await raw[0].read()
        raw[1].close()


async def connect_raw(client) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = client.base_url.host, client.base_url.port
    return await asyncio.open_connection(host, port, ssl=trusting("h2"))


async def test_a_shutdown_lets_a_stream_end_and_refuses_new_ones(on_port):
    async with on_port(ScriptedEngine(), SECURE) as client:
        h2 = await connect(client)
        health = await h2.ask("GET", "/health")
        await h2.until(lambda h2: h2.has(StreamEnded, health))
    await h2.until(lambda h2: h2.ended)
    h2.close()
