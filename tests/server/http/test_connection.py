"""A connection ends with its client, and no client holds up another."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Callable
from dataclasses import replace

import h11
import pytest
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import RawData
from hypercorn.protocol.http_stream import HTTPStream

from luceasync.server.app import create_app
from luceasync.server.http import connection as connection_module
from luceasync.server.http import listener as listener_module
from luceasync.server.http.connection import Connection, Http11, LoopThrottle, in_origin_form
from luceasync.server.http.connections import AcceptedConnection
from luceasync.server_config import ServerConfig
from tests.deltas import text_delta
from tests.server import secure
from tests.server.scripted import ScriptedEngine, answer

DEADLINE_S = 20.0
BODY = b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true}'
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
CHAT = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)
)


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not reached():
            await asyncio.sleep(0.01)


async def connect(client) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(client.base_url.host, client.base_url.port)


async def has_ended(reader: asyncio.StreamReader) -> bool:
    """Whether the server has closed the connection without sending anything."""
    try:
        return await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
    except ConnectionError:
        return True


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("said", [b"", HEALTH, HEALTH[:20]], ids=["nothing", "all", "a part"])
async def test_a_closed_connection_frees_its_descriptor(on_port, said):
    async with on_port(ScriptedEngine()) as client:
        await client.get("/health", headers={"connection": "close"})  # all else is open now
        before = num_descriptors()
        for _ in range(20):
            reader, writer = await connect(client)
            writer.write(said)
            if said == HEALTH:
                await reader.readuntil(b"}")
            writer.close()
            await writer.wait_closed()
        await until(lambda: num_descriptors() <= before)


@pytest.mark.parametrize("ahead", [b"", b"G", HEALTH * 3, b"x" * 70_000])
async def test_a_client_that_leaves_is_noticed_whatever_it_has_pipelined(
    on_port, ahead, monkeypatch
):
    monkeypatch.setattr(connection_module, "AHEAD_TIMEOUT_S", 0.2)
    engine = ScriptedEngine([text_delta(0, "Hel"), asyncio.Event(), *answer("lo")])
    async with on_port(engine) as client:
        reader, writer = await connect(client)
        writer.write(CHAT)
        await reader.readuntil(b"Hel")
        writer.write(ahead)
        await writer.drain()
        writer.close()
        async with asyncio.timeout(DEADLINE_S):
            await engine.streams[0].closed.wait()


LARGE = 1 << 40
UNREAD = {
    "declared": b"content-length: %d\r\n\r\n" % LARGE,
    "begun": b"content-length: %d\r\n\r\n{" % LARGE,
    "chunked": b"transfer-encoding: chunked\r\n\r\n100000\r\n" + b"x" * (1 << 20),
}


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("sent", UNREAD.values(), ids=UNREAD)
async def test_a_body_that_is_too_large_is_refused_before_it_has_come(
    on_port, sent, scheme, monkeypatch
):
    monkeypatch.setattr(connection_module, "LINGER_TIMEOUT_S", 2 * DEADLINE_S)
    tls = secure.SECURE if scheme == "https" else ServerConfig()
    async with on_port(ScriptedEngine(), replace(tls, max_body_bytes=1000)) as client:
        open_connection = secure.connect if scheme == "https" else asyncio.open_connection
        host = "localhost" if scheme == "https" else client.base_url.host
        reader, writer = await open_connection(host, client.base_url.port)
        writer.write(CHAT.partition(b"content-length")[0] + sent)
        async with asyncio.timeout(DEADLINE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 413 ") and b"connection: close" in head.lower()
            await reader.readuntil(b"body_too_large")
            writer.close()


async def test_a_client_that_still_sends_reads_that_it_is_refused(on_port):
    """It sends far more than the sockets hold before it reads."""
    async with on_port(ScriptedEngine(), ServerConfig(max_body_bytes=1000)) as client:
        for path in (b"/v1/chat/completions", b"/nowhere"):
            reader, writer = await connect(client)
            head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % (path, 64 << 20))
            for _ in range(64):
                writer.write(b"x" * (1 << 20))
                await asyncio.wait_for(writer.drain(), DEADLINE_S)
            said = await asyncio.wait_for(reader.read(), DEADLINE_S)
            assert said.split()[1] in (b"413", b"404") and said.endswith(b"}")
            writer.close()


async def test_a_connection_with_an_unread_body_ends_soon(on_port, monkeypatch):
    monkeypatch.setattr(connection_module, "LINGER_TIMEOUT_S", 0.1)
    async with on_port(ScriptedEngine(), ServerConfig(max_body_bytes=1000)) as client:
        await client.get("/health", headers={"connection": "close"})  # all else is open now
        before = num_descriptors()
        _, writer = await connect(client)
        writer.write(CHAT.partition(b"content-length")[0] + UNREAD["declared"])
        await until(lambda: num_descriptors() == before + 1)  # the client's own end
        writer.close()


async def test_pipelined_requests_are_answered_in_order(on_port):
    async with on_port(ScriptedEngine()) as client:
        reader, writer = await connect(client)
        writer.write(CHAT + HEALTH)
        said = await asyncio.wait_for(reader.readuntil(b'"status":"ok"'), DEADLINE_S)
        assert said.index(b"[DONE]") < said.index(b'"status":"ok"')
        writer.close()


async def read_answer(
    client: h11.Connection, reader: asyncio.StreamReader
) -> tuple[h11.Response, bytes]:
    """The next response as a strict client reads it, and its body."""
    response, body = None, b""
    while True:
        match event := client.next_event():
            case h11.NEED_DATA:
                client.receive_data(await asyncio.wait_for(reader.read(1), DEADLINE_S))
            case h11.Response():
                response = event
            case h11.Data():
                body += event.data
            case _:
                assert isinstance(event, h11.EndOfMessage) and response is not None
                return response, body


async def test_a_chunked_answer_ends_where_the_next_one_begins(on_port):
    async with on_port(ScriptedEngine([text_delta(0, "a\r\n0\r\n\r\n"), *answer("é")])) as client:
        reader, writer = await connect(client)
        judge = h11.Connection(h11.CLIENT)
        for request, framing in ((CHAT, b"chunked"), (HEALTH, None), (CHAT, b"chunked")):
            writer.write(request)
            method = request.split()[0]
            judge.send(h11.Request(method=method, target="/", headers=[("host", "localhost")]))
            judge.send(h11.EndOfMessage())
            response, body = await read_answer(judge, reader)
            assert dict(response.headers).get(b"transfer-encoding") == framing
            if framing:
                assert rb"a\r\n0\r\n\r\n" in body and body.endswith(b"data: [DONE]\n\n")
            judge.start_next_cycle()
        writer.close()


async def test_an_answer_of_known_length_leaves_in_one_write(on_port, monkeypatch):
    """Head, body and end: a packet and a system call for each would be three."""
    written, write = [], connection_module.Connection._write

    async def write_noted(self, data: bytes) -> None:
        written.append(data)
        await write(self, data)

    monkeypatch.setattr(connection_module.Connection, "_write", write_noted)
    async with on_port(ScriptedEngine()) as client:
        for method, has_body in (("GET", True), ("HEAD", False)):
            response = await client.request(method, "/v1/models")
            assert response.status_code == 200 and bool(response.content) == has_body
            assert len(written) == 1 and written.pop().startswith(b"HTTP/1.1 200")


async def test_an_http_1_0_client_gets_no_chunks(on_port):
    async with on_port(ScriptedEngine()) as client:
        reader, writer = await connect(client)
        writer.write(CHAT.replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = (await asyncio.wait_for(reader.read(), DEADLINE_S)).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert body.startswith(b"data: ") and body.endswith(b"data: [DONE]\n\n")
        writer.close()


async def test_a_client_that_does_not_read_loses_its_answer(on_port, monkeypatch):
    monkeypatch.setattr(connection_module, "SEND_TIMEOUT_S", 0.2)
    engine = ScriptedEngine([*[text_delta(0, "x" * 10**6)] * 50, *answer("!")])
    async with on_port(engine) as client:
        _, writer = await connect(client)
        writer.write(CHAT)
        await until(lambda: bool(engine.streams))
        async with asyncio.timeout(DEADLINE_S):
            await engine.streams[0].closed.wait()
        writer.close()


async def test_concurrent_writes_to_a_slow_client_keep_their_order():
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    read, write = await asyncio.open_connection(sock=theirs)
    app = ASGIWrapper(create_app(ScriptedEngine(), ServerConfig()))  # type: ignore[arg-type]
    connection = Connection(app, Config(), WorkerContext(None), LoopThrottle(), reader, writer)
    pieces = [bytes([number]) * 50_000 for number in range(40)]

    numbers = iter(range(len(pieces)))

    async def send() -> None:
        for number in numbers:  # a sender whose piece is sent queues up with the next one
            await connection.protocol_send(RawData(pieces[number]))

    sending = asyncio.gather(*(send() for _ in range(4)))
    try:
        await asyncio.sleep(0.01)
        assert not sending.done()
        async with asyncio.timeout(DEADLINE_S):
            assert await read.readexactly(sum(map(len, pieces))) == b"".join(pieces)
            await sending
    finally:
        for each in (writer, write):
            each.transport.abort()


async def test_http_2_without_tls_is_a_505(on_port):
    async with on_port(ScriptedEngine()) as client:
        reader, writer = await connect(client)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        said = await asyncio.wait_for(reader.read(), DEADLINE_S)
        assert said.startswith(b"HTTP/1.1 505 ")
        writer.close()


async def test_an_offer_to_upgrade_to_http_2_is_ignored(on_port):
    async with on_port(ScriptedEngine()) as client:
        offer = {"connection": "upgrade, http2-settings", "upgrade": "h2c", "http2-settings": ""}
        response = await client.get("/health", headers=offer)
        assert (response.status_code, response.http_version) == (200, "HTTP/1.1")


async def test_above_the_limit_the_oldest_idle_connection_is_closed(on_port, monkeypatch):
    monkeypatch.setattr("luceasync.server.http.listener.max_connections", lambda: 2)
    engine = ScriptedEngine([text_delta(0, "Hel"), asyncio.Event()])
    async with on_port(engine) as client:
        busy, idle = await connect(client), await connect(client)
        busy[1].write(CHAT)
        await busy[0].readuntil(b"Hel")
        newest = await connect(client)
        assert await has_ended(idle[0])
        newest[1].write(CHAT)
        await newest[0].readuntil(b"Hel")
        refused = await connect(client)
        assert await has_ended(refused[0])
        assert not any(stream.closed.is_set() for stream in engine.streams)
        for _, writer in (busy, idle, newest, refused):
            writer.close()


async def test_an_active_client_keeps_its_connection_beside_many_silent_ones(on_port, monkeypatch):
    monkeypatch.setattr("luceasync.server.http.listener.max_connections", lambda: 4)
    async with on_port(ScriptedEngine()) as client:
        asker, asked_once = await connect(client), await connect(client)
        for reader, writer in (asker, asked_once, asker):
            writer.write(HEALTH)
            await reader.readuntil(b"}")
        silent = [await connect(client) for _ in range(6)]
        for reader, _ in silent[:4]:
            assert await has_ended(reader)
        for reader, writer in silent[4:]:
            writer.write(HEALTH)
            await reader.readuntil(b"}")
        newest = await connect(client)
        assert await has_ended(asked_once[0])  # of those that have asked, idle for longest
        asker[1].write(HEALTH)
        await asker[0].readuntil(b"}")
        for _, writer in (asker, asked_once, newest, *silent):
            writer.close()


@pytest.mark.parametrize("num_missing", [0, 100], ids=["whole", "without its end"])
async def test_a_half_closed_connection_ends(on_port, num_missing):
    """The request and the EOF arrive together: its handler must be told of the EOF."""
    head, body = CHAT.split(b"\r\n\r\n")
    length = b"content-length: %d" % (len(BODY) + num_missing)
    head = head.replace(b"content-length: %d" % len(BODY), length)
    async with on_port(ScriptedEngine()) as client:
        for _ in range(5):
            reader, writer = await connect(client)
            writer.write(head + b"\r\n\r\n" + body)
            writer.write_eof()
            async with asyncio.timeout(DEADLINE_S):
                await reader.read()
            writer.close()


def of_connections() -> list[object]:
    """All objects of connections in this process."""
    kinds = (Connection, Http11, HTTPStream, AcceptedConnection)
    return [each for each in gc.get_objects() if type(each) in kinds]


async def until_nothing_is_left(others: list[object], *, collect: bool) -> None:
    """Wait until only `others` are left. `collect`: with the help of the collector."""
    known = {id(each) for each in others}
    async with asyncio.timeout(DEADLINE_S):
        while any(id(each) not in known for each in of_connections()):
            await asyncio.sleep(0.05)
            if collect:
                gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "TLS"])
async def test_closed_connections_leave_no_objects(on_port, is_encrypted):
    gc.collect()
    others = of_connections()  # a test that failed may hold some
    config = secure.SECURE if is_encrypted else ServerConfig()
    begin = secure.connect if is_encrypted else asyncio.open_connection
    gc.disable()
    try:
        async with on_port(
            ScriptedEngine([text_delta(0, "Hel"), asyncio.Event()]), config
        ) as client:
            host, port = client.base_url.host, client.base_url.port
            for _ in range(3):  # before an answer
                reader, writer = await begin(host, port)
                writer.write(HEALTH[:20])
                writer.close()
            await until_nothing_is_left(others, collect=False)
            for _ in range(3):  # in the middle of an answer
                reader, writer = await begin(host, port)
                writer.write(CHAT)
                await reader.readuntil(b"Hel")
                writer.transport.abort()
            await until_nothing_is_left(others, collect=True)
    finally:
        gc.enable()


def test_descriptors_are_reserved_for_the_rest_of_the_process(monkeypatch):
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(listener_module.resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(listener_module.resource, "setrlimit", lambda _, to: asked.append(to))
    assert listener_module.max_connections() == 4096 - listener_module.RESERVED_DESCRIPTORS
    assert asked == [(4096, 4096)]


def request(target: bytes, *hosts: bytes) -> h11.Request:
    headers = [(b"host", host) for host in hosts]
    return h11.Request(method=b"GET", headers=[*headers, (b"x-a", b"1")], target=target)


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        (b"http://localhost:8000/v1/models?a=b", b"/v1/models?a=b", b"localhost:8000"),
        (b"HTTPS://[::1]/", b"/", b"[::1]"),
        (b"http://localhost", b"/", b"localhost"),
        (b"http://localhost?a=/b", b"/?a=/b", b"localhost"),
        (b"/http://other/x", b"/http://other/x", b"said"),
        (b"/v1/models", b"/v1/models", b"said"),
        (b"ftp://localhost/x", b"ftp://localhost/x", b"said"),
        (b"http:///x", b"http:///x", b"said"),
        (b"*", b"*", b"said"),
    ],
)
def test_an_absolute_target_becomes_a_path_and_a_host(target, path, host):
    found = in_origin_form(request(target, b"said"))
    assert found.target == path
    assert sorted(found.headers) == [(b"host", host), (b"x-a", b"1")]
    assert found.method == b"GET"


@pytest.mark.parametrize(
    ("uri", "host", "status"),
    [
        (b"http://localhost/health", b"localhost", b"200"),
        (b"http://localhost/health", b"evil.example", b"200"),  # the Host is passed over
        (b"http://evil.example/health", b"localhost", b"403"),
        (b"http://localhost/nowhere", b"localhost", b"404"),
    ],
)
async def test_a_server_accepts_an_absolute_uri_and_checks_its_host(on_port, uri, host, status):
    async with on_port(ScriptedEngine()) as client, asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"GET %s HTTP/1.1\r\nhost: %s\r\n\r\n" % (uri, host))
        assert (await reader.readuntil(b"\r\n")).split()[1] == status
        writer.close()


NUM = 20


async def test_one_waiter_proceeds_per_iteration_of_the_loop():
    throttle, passed = LoopThrottle(), list[int]()

    async def work(number: int) -> None:
        await throttle.wait()
        passed.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(NUM)]
    num_before = 0
    while len(passed) < NUM:
        await asyncio.sleep(0)
        assert len(passed) <= num_before + 1
        num_before = len(passed)
    assert passed == list(range(NUM))
    await asyncio.gather(*tasks)


async def test_a_cancelled_waiter_does_not_block_others():
    throttle = LoopThrottle()
    tasks = [asyncio.create_task(throttle.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[1].cancel()
    async with asyncio.timeout(10):
        await tasks[2]
        await throttle.wait()
