"""A page of another site can neither use the server nor read its answers."""

from __future__ import annotations

import socket

import httpx
import pytest

from luceasync.server.http.origins import listens_on_loopback
from luceasync.server_config import ServerConfig
from tests.server.scripted import ScriptedEngine

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
PAGE = "https://evil.example"
OUR_PAGE = "http://localhost:3000"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


def is_refused(response: httpx.Response, code: str) -> bool:
    """Whether it is a 403 with `code` in the family's form that no page may read."""
    assert "access-control-allow-origin" not in response.headers
    if response.status_code != 403:
        return False
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["code"] == code


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/metrics", "/v1/models", "/nowhere"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", ""]
)
async def test_on_loopback_a_foreign_host_is_refused_on_every_page(in_memory, path, host):
    async with in_memory(ScriptedEngine()) as client:
        assert is_refused(await client.get(path, headers={"Host": host}), "unknown_host")


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "127.0.0.1:80", "127.8.7.6", "[::1]", "[::1]:8000"],
)
async def test_on_loopback_local_hosts_are_served(in_memory, host):
    async with in_memory(ScriptedEngine()) as client:
        response = await client.post(CHAT, json=BODY, headers={"Host": host})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("names", "host", "served"),
    [
        (("chat.lan",), "chat.lan:8000", True),
        (("chat.lan",), "CHAT.lan", True),
        (("chat.lan",), "localhost", True),
        (("chat.lan",), "other.lan", False),
        (("a", "b"), "b", True),
        (("*",), "other.lan", True),
    ],
)
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
async def test_hosts_that_a_flag_names_are_served_and_no_others(
    in_memory, names, host, served, address
):
    config = ServerConfig(host=address, allow_hosts=names)
    async with in_memory(ScriptedEngine(), config) as client:
        response = await client.get("/health", headers={"Host": host})
    assert response.status_code == (200 if served else 403)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.1"])
async def test_off_loopback_any_host_is_served(in_memory, address):
    async with in_memory(ScriptedEngine(), ServerConfig(host=address)) as client:
        assert (await client.get("/health", headers={"Host": "box.lan"})).status_code == 200


async def test_the_name_that_the_server_listens_on_is_served(in_memory, monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    async with in_memory(ScriptedEngine(), ServerConfig(host="Box")) as client:
        assert (await client.get("/health", headers={"Host": "box:8000"})).status_code == 200
        assert is_refused(await client.get("/health", headers={"Host": "evil"}), "unknown_host")


def test_loopback_is_told_by_what_a_host_resolves_to():
    local = {host: listens_on_loopback(host) for host in ("localhost", "127.1", "::1", "0.0.0.0")}
    assert local == {"localhost": True, "127.1": True, "::1": True, "0.0.0.0": False}


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "application/json"]
)
@pytest.mark.parametrize("origin", [PAGE, "null", OUR_PAGE, "http://localhost", "file://"])
async def test_a_page_of_another_origin_starts_nothing(in_memory, origin, content_type):
    engine = ScriptedEngine()
    headers = {"Origin": origin, "Content-Type": content_type, "Host": "localhost:8000"}
    async with in_memory(engine) as client:
        response = await client.post(
            CHAT, content=b'{"messages": [{"role": "user", "content": "Hi"}]}', headers=headers
        )
    assert is_refused(response, "foreign_origin")
    assert engine.requests == []


async def test_another_origin_reads_nothing_and_gets_no_preflight_answer(in_memory):
    config = ServerConfig(allow_origins=(OUR_PAGE,), api_keys=("one",))
    for allowed in (ServerConfig(), config, ServerConfig(host="0.0.0.0")):
        async with in_memory(ScriptedEngine(), allowed) as client:
            for path in ("/health", "/metrics", "/v1/models"):
                response = await client.get(path, headers={"Origin": PAGE})
                assert is_refused(response, "foreign_origin")
            asked = await client.options(CHAT, headers={"Origin": PAGE, **PREFLIGHT})
            assert is_refused(asked, "foreign_origin")


async def test_the_servers_own_pages_are_allowed(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        headers = {"Host": "localhost:8000", "Origin": "http://localhost:8000"}
        assert (await client.post(CHAT, json=BODY, headers=headers)).status_code == 200


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded", "text/plain"])
async def test_requests_without_an_origin_may_have_any_content_type(in_memory, content_type):
    headers = {} if content_type is None else {"Content-Type": content_type}
    async with in_memory(ScriptedEngine()) as client:
        response = await client.post(
            CHAT, content=b'{"messages": [{"role": "user", "content": "Hi"}]}', headers=headers
        )
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("allowed", "origin", "told"),
    [((OUR_PAGE,), OUR_PAGE, OUR_PAGE), (("null",), "null", "null"), (("*",), PAGE, "*")],
)
async def test_pages_of_allowed_origins_read_answers_and_refusals(in_memory, allowed, origin, told):
    config = ServerConfig(allow_origins=allowed, api_keys=("one",))
    async with in_memory(ScriptedEngine(), config) as client:
        asked = await client.options(CHAT, headers={"Origin": origin, **PREFLIGHT})
        without_key = await client.post(CHAT, json=BODY, headers={"Origin": origin})
        headers = {"Origin": origin, "Authorization": "Bearer one"}
        answered = await client.post(CHAT, json=BODY, headers=headers)
    assert [r.status_code for r in (asked, without_key, answered)] == [200, 401, 200]
    for response in (asked, without_key, answered):
        assert response.headers["access-control-allow-origin"] == told
        assert "access-control-allow-credentials" not in response.headers
    assert (
        asked.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    )
    assert "Retry-After" in answered.headers["access-control-expose-headers"]


async def test_pages_of_allowed_origins_read_unexpected_errors_too(in_memory):
    config = ServerConfig(allow_origins=(OUR_PAGE,))
    async with in_memory(ScriptedEngine(opening=ZeroDivisionError("a secret")), config) as client:
        failed = await client.post(CHAT, json=BODY, headers={"Origin": OUR_PAGE})
    assert failed.status_code == 500
    assert failed.headers["access-control-allow-origin"] == OUR_PAGE
    assert "x-request-id" in failed.headers
    assert "secret" not in failed.text


async def test_an_allowed_origin_lets_no_foreign_host_in(in_memory):
    config = ServerConfig(allow_origins=("*",))
    async with in_memory(ScriptedEngine(), config) as client:
        response = await client.get("/health", headers={"Origin": PAGE, "Host": "evil.example"})
    assert is_refused(response, "unknown_host")


async def test_the_size_of_a_refusal_is_bounded(in_memory):
    long = "e" * 10_000
    async with in_memory(ScriptedEngine()) as client:
        for headers in ({"Host": long}, {"Origin": f"https://{long}"}):
            assert len((await client.get("/health", headers=headers)).content) < 500


async def test_refusals_are_sent_and_counted_on_a_real_connection(on_port):
    async with on_port(ScriptedEngine()) as client:
        rebound = await client.get("/v1/models", headers={"Host": "evil.example"})
        page = await client.post(CHAT, json=BODY, headers={"Origin": PAGE})
        metrics = await client.get("/metrics")
    assert is_refused(rebound, "unknown_host")
    assert is_refused(page, "foreign_origin")
    for route in ("/v1/models", CHAT):
        counted = f'luceasync_http_requests_total{{route="{route}",status="403"}} 1.0'
        assert counted in metrics.text
