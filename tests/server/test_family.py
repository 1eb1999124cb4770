"""An API family is a class: its routes, bodies, events and errors are served without changes
elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from luceasync.errors import QueueFull, RequestError, Unavailable
from luceasync.request import Engine, Request, Stream, TextPrompt
from luceasync.server.app import FAMILIES, create_app
from luceasync.server.failures import Failure
from luceasync.server.family import Endpoint
from luceasync.server.http.auth import Caller
from luceasync.server.http.responses import SERVER_SENT
from luceasync.server_config import ServerConfig
from tests.deltas import text_delta
from tests.server.scripted import ScriptedEngine, answer

TELL = "/toy/tell"


class Toy:
    """Bodies are lines of text, one request each; events are named; errors are one string."""

    framing = SERVER_SENT

    def __init__(self, engine: Engine) -> None:
        self.endpoints: Sequence[Endpoint] = (Tell(),)
        self.pages = (Route("/toy", self.about),)

    async def about(self, request: HttpRequest) -> Response:
        return PlainTextResponse("a toy")

    def error(self, failure: Failure) -> object:
        return f"oops {failure.status}: {failure.message}"


class Tell:
    path = TELL
    body = None

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> Told:
        lines = body.decode().splitlines()
        if not lines:
            raise RequestError("nothing to tell")
        tenant = caller.tenant(None)
        requests = tuple(Request(TextPrompt(line), tenant=tenant) for line in lines)
        return Told(requests, headers.get("x-live") == "yes")


class Told:
    """Its events are (number of the request, text)."""

    def __init__(self, requests: tuple[Request, ...], stream: bool) -> None:
        self.requests = requests
        self.stream = stream

    async def events(self, streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, str], None]:
        for number, stream in enumerate(streams):
            async for delta in stream:
                for piece in delta.pieces:
                    yield number, piece.text

    def encode(self, event: tuple[int, str]) -> bytes:
        return b"event: word\ndata: %d %s\n\n" % (event[0], event[1].encode())

    def end(self, failure: Failure | None) -> bytes:
        words = "all told" if failure is None else f"oops {failure.status}"
        return f"event: end\ndata: {words}\n\n".encode()

    async def fold(self, events: AsyncIterator[tuple[int, str]]) -> object:
        texts = [""] * len(self.requests)
        async for number, text in events:
            texts[number] += text
        return texts


@pytest.fixture
def toy_client(in_memory):
    def connect(engine: ScriptedEngine, **config: Any):
        return in_memory(engine, ServerConfig(**config), families=(*FAMILIES, Toy))

    return connect


async def tell(client: httpx.AsyncClient, text: str, **headers: str) -> httpx.Response:
    return await client.post(TELL, content=text, headers=headers)


async def test_a_plain_answer_is_the_fold_of_its_requests_events(toy_client):
    engine = ScriptedEngine()
    async with toy_client(engine) as client:
        response = await tell(client, "one\ntwo")
    assert response.json() == ["Hello!", "Hello!"]
    assert [request.prompt for request in engine.requests] == [TextPrompt("one"), TextPrompt("two")]
    assert all(stream.closed.is_set() for stream in engine.streams)


async def test_a_streamed_answer_is_framed_by_the_family(toy_client):
    async with toy_client(ScriptedEngine(answer("a", "b"))) as client:
        response = await tell(client, "one", **{"x-live": "yes"})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text == (
        "event: word\ndata: 0 a\n\nevent: word\ndata: 0 b\n\nevent: end\ndata: all told\n\n"
    )


async def test_its_other_routes_are_served_beside_those_of_openai(toy_client):
    async with toy_client(ScriptedEngine()) as client:
        assert (await client.get("/toy")).text == "a toy"
        assert (await client.get("/v1/models")).json()["object"] == "list"


@pytest.mark.parametrize(
    ("opening", "status"),
    [(QueueFull(3, 1), 429), (Unavailable("gone"), 503), (ZeroDivisionError("a secret"), 500)],
)
async def test_failures_on_its_routes_have_its_form(toy_client, opening, status):
    async with toy_client(ScriptedEngine(opening=opening)) as client:
        for headers in ({}, {"x-live": "yes"}):
            response = await tell(client, "one", **headers)
            assert response.status_code == status
            assert response.json().startswith(f"oops {status}: ")
            assert "secret" not in response.text


async def test_a_refused_body_a_wrong_method_and_a_missing_key_too(toy_client):
    async with toy_client(ScriptedEngine()) as client:
        assert (await tell(client, "")).json() == "oops 400: nothing to tell"
        assert (await client.get(TELL)).json().startswith("oops 405")
        assert "error" in (await client.get("/nowhere")).json()
    async with toy_client(ScriptedEngine(), api_keys=("one",)) as client:
        assert (await tell(client, "one")).json().startswith("oops 401")
        assert "error" in (await client.get("/v1/models")).json()
        told = await tell(client, "one", **{"x-api-key": "one"})
    assert told.status_code == 200


async def test_a_failure_midway_ends_the_stream_in_its_form(toy_client):
    script = [text_delta(0, "a", (1,)), Unavailable("gone")]
    async with toy_client(ScriptedEngine(script)) as client:
        response = await tell(client, "one", **{"x-live": "yes"})
    assert response.text == "event: word\ndata: 0 a\n\nevent: end\ndata: oops 503\n\n"


async def test_if_a_later_request_is_refused_the_earlier_streams_are_closed(toy_client):
    engine = ScriptedEngine()
    first_open = engine.open

    async def open_once(request: Request) -> Any:
        if engine.streams:
            raise QueueFull(1, 1)
        return await first_open(request)

    engine.open = open_once
    async with toy_client(engine) as client, asyncio.timeout(10):
        assert (await tell(client, "one\ntwo")).status_code == 429
    assert [stream.closed.is_set() for stream in engine.streams] == [True]


def test_an_app_works_without_the_builtin_families():
    app = create_app(ScriptedEngine(), ServerConfig(), families=(Toy,))
    of_any_server = {"/v1/loads"}  # what routers ask
    paths = {route.path for route in app.routes if "v1" in route.path}
    assert paths == of_any_server
