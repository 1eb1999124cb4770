"""How a body is delimited and asked for; odd requests end without a traceback."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
from contextlib import suppress
from itertools import product

import pytest

from luceasync.server_config import ServerConfig
from tests.server.http.test_connection import BODY, CHAT, DEADLINE_S, HEALTH, connect
from tests.server.scripted import ScriptedEngine

EXPECTING = CHAT.partition(b"content-length")[0] + b"expect: 100-continue\r\n"


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (EXPECTING + b"content-length: 5000\r\n\r\n", b"413"),
        (
            EXPECTING.replace(b"/v1/chat/completions", b"/nowhere") + b"content-length: 5\r\n\r\n",
            b"404",
        ),
        (EXPECTING + b"content-encoding: gzip\r\ncontent-length: 5\r\n\r\n", b"415"),
    ],
)
async def test_no_body_is_asked_for_that_is_not_wanted(on_port, request_head, status):
    async with on_port(ScriptedEngine(), ServerConfig(max_body_bytes=1000)) as client:
        reader, writer = await connect(client)
        writer.write(request_head)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
        assert head.startswith(b"HTTP/1.1 %b " % status)
        assert b"connection: close" in head.lower()
        writer.close()


async def test_a_body_that_is_wanted_is_asked_for_once(on_port):
    async with on_port(ScriptedEngine()) as client:
        reader, writer = await connect(client)
        body = BODY.replace(b"true", b"false")
        for _ in range(2):
            writer.write(EXPECTING + b"content-length: %d\r\n\r\n" % len(body))
            asked = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
            assert asked.startswith(b"HTTP/1.1 100 ")
            writer.write(body)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
            assert head.startswith(b"HTTP/1.1 200 ")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            assert length is not None
            await asyncio.wait_for(reader.readexactly(int(length[1])), DEADLINE_S)
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        b"content-length: %d\r\ncontent-length: %d" % (len(BODY), len(BODY)),
        b"content-length: %d, %d" % (len(BODY), len(BODY)),
        b"Content-Length: %d\r\nX: y\r\nCONTENT-LENGTH : %d" % (len(BODY), len(BODY)),
        b"content-length: %d\r\ntransfer-encoding: chunked" % len(BODY),
        b"transfer-encoding: chunked\r\nContent-Length: %d" % len(BODY),
        b"content-length:\r\n %d" % len(BODY),
        b"x: y\r\n\tz\r\ncontent-length: %d" % len(BODY),
        b"x: y\n z\r\ncontent-length: %d" % len(BODY),
    ],
)
async def test_a_body_that_proxies_may_delimit_otherwise_is_refused(on_port, fields):
    async with on_port(ScriptedEngine()) as client:
        reader, writer = await connect(client)
        sent = CHAT.partition(b"content-length")[0] + fields + b"\r\n\r\n" + BODY
        for part in (sent[:60], sent[60:], HEALTH):
            writer.write(part)
            await writer.drain()
        with suppress(ConnectionError):
            said = await asyncio.wait_for(reader.read(), DEADLINE_S)
            assert said.startswith(b"HTTP/1.1 400 ") and b"connection: close" in said.lower()
            assert said.count(b"HTTP/1.1") == 1
        writer.close()


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
async def test_what_looks_like_fields_in_a_body_is_none(on_port, end):
    body = b'{"messages": [{"role": "user", "content": "Hi"}],\n\t"user":\n "content-length: 3"}'
    head = [b"POST /v1/chat/completions HTTP/1.1", b"host: localhost"]
    head += [b"content-length: %d" % len(body), b"", b""]
    async with on_port(ScriptedEngine()) as client:
        reader, writer = await connect(client)
        writer.write(end.join(head) + body)
        said = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
        assert said.startswith(b"HTTP/1.1 200 ")
        writer.close()


ODD_HEADERS = [
    b"transfer-encoding: chunked",
    b"transfer-encoding: gzip, chunked",
    b"transfer-encoding: chunked\r\ncontent-length: 5",
    b"transfer-encoding:\x0bchunked",
    b"transfer-encoding: chunked\r\nexpect: 100-continue",
    b"content-length: 5, 6",
    b"content-length: -1",
    b"content-length: 5",
    b"upgrade: h2c\r\nconnection: upgrade, http2-settings\r\nhttp2-settings: AAA",
]
ODD_BODIES = [
    b"",
    b"zz\r\n",
    b"5\r\nabcdeXX",
    b"%x\r\n%b\r\nzz\r\n" % (len(BODY), BODY),
    b"%x\r\n%b\r\n0\r\nbad\0: 1\r\n\r\n" % (len(BODY), BODY),
    b"{}" + HEALTH,
]


async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, how: str) -> None:
    match how:
        case "half":
            writer.write_eof()
        case "reset":
            await asyncio.sleep(0)
            writer.transport.abort()
        case "read":
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(), 0.02)
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("version", [b"1.1", b"2.0"])
@pytest.mark.parametrize("how", ["now", "half", "reset", "read"])
@pytest.mark.parametrize("target", [b"POST /v1/chat/completions", b"PUT /nowhere"])
async def test_odd_requests_leave_no_traceback(on_port, caplog, version, how, target):
    failures: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
    async with on_port(ScriptedEngine()) as client:
        for header, body in product(ODD_HEADERS, ODD_BODIES):
            reader, writer = await connect(client)
            writer.write(target + b" HTTP/" + version + b"\r\nhost: localhost\r\n")
            writer.write(header + b"\r\n\r\n" + body)
            with suppress(ConnectionError, RuntimeError):  # the server may have left first
                await leave(reader, writer, how)
        assert (await client.get("/health")).status_code == 200
        await asyncio.sleep(0.05)
    gc.collect()
    assert failures == []
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []
