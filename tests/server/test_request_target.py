"""A whole URI is wanted as its path is, and its authority is the Host."""

from __future__ import annotations

import asyncio

import h11
import pytest

from luceasync.server.http.connection import in_origin_form
from tests.server.scripted import ScriptedEngine

DEADLINE_S = 20.0


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
def test_the_path_of_a_uri_is_wanted_of_its_host(target, path, host):
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
async def test_a_server_takes_a_whole_uri_and_judges_its_host(on_port, uri, host, status):
    async with on_port(ScriptedEngine()) as client, asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"GET %s HTTP/1.1\r\nhost: %s\r\n\r\n" % (uri, host))
        assert (await reader.readuntil(b"\r\n")).split()[1] == status
        writer.close()
