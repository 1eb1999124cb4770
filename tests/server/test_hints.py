"""A conversation has the name that its client gives it; what makes no sense is no name."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from luceasync.errors import RequestError
from luceasync.server.fields import MAX_CACHE_KEY_CHARS, MAX_SESSION_CHARS, conversation_id_of
from tests.server.scripted import ScriptedEngine, answer

MESSAGES = [{"role": "user", "content": "Hi"}]
ROUTES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi"},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "model": "tiny", "max_tokens": 5},
}
KEYED = [route for route in ROUTES if route != "/v1/messages"]


@pytest.mark.parametrize("name", ["session-id", "X-Session-Id", "X-Claude-Code-Session-Id"])
def test_a_session_is_the_name_and_comes_before_a_key_that_many_may_share(name):
    assert conversation_id_of(Headers({name: "ses_1"}), "key") == "ses_1"


def test_a_key_is_the_name_where_there_is_no_session():
    assert conversation_id_of(Headers(), "k" * MAX_CACHE_KEY_CHARS) == "k" * MAX_CACHE_KEY_CHARS
    assert conversation_id_of(Headers(), "") == conversation_id_of(Headers()) == ""


@pytest.mark.parametrize("value", ["", "   ", "x" * (MAX_SESSION_CHARS + 1), "x" * 65536])
def test_a_header_that_makes_no_sense_is_passed_over(value):
    assert conversation_id_of(Headers({"x-session-id": value})) == ""
    assert conversation_id_of(Headers({"session-id": value, "x-session-id": "a"})) == "a"


def test_bytes_that_are_no_utf8_and_repeated_headers_are_names_as_well():
    raw = [(b"session-id", b"\xff\x00\xfe"), (b"session-id", b"other")]
    assert conversation_id_of(Headers(raw=raw)) == "\xff\x00\xfe"


def test_a_key_that_is_too_long_is_refused_as_openai_does():
    with pytest.raises(RequestError, match="maximum length 64") as caught:
        conversation_id_of(Headers({"session-id": "s"}), "k" * (MAX_CACHE_KEY_CHARS + 1))
    assert caught.value.param == "prompt_cache_key"
    assert caught.value.code == "string_above_max_length"


@pytest.mark.parametrize("route", ROUTES)
async def test_every_route_tells_the_engine(in_memory, route):
    engine = ScriptedEngine(answer("Hi"))
    async with in_memory(engine) as client:
        told = await client.post(route, json=ROUTES[route], headers={"x-session-id": "ses_1"})
    assert told.status_code == 200, told.text
    assert engine.requests[-1].conversation == "ses_1"


@pytest.mark.parametrize("route", KEYED)
async def test_a_key_of_the_body_is_told_too_and_a_wrong_one_is_a_400(in_memory, route):
    engine = ScriptedEngine(answer("Hi"))
    async with in_memory(engine) as client:
        told = await client.post(route, json={**ROUTES[route], "prompt_cache_key": "k"})
        assert told.status_code == 200 and engine.requests[-1].conversation == "k"
        for wrong in ("k" * 65, 5, ["k"], {}):
            body = {**ROUTES[route], "prompt_cache_key": wrong}
            error = (await client.post(route, json=body)).json()["error"]
            assert error["param"] == "prompt_cache_key" and len(str(error)) < 500
        for absent in (None, ""):
            body = {**ROUTES[route], "prompt_cache_key": absent}
            assert (await client.post(route, json=body)).status_code == 200
            assert engine.requests[-1].conversation == ""


@pytest.mark.parametrize("header", [b"\xff\xfe\x00", b"a" * 10_000, b"\t", b"\xe2\x80\xae"])
async def test_odd_headers_are_served(in_memory, header):
    engine = ScriptedEngine(answer("Hi"))
    async with in_memory(engine) as client:
        headers = [(b"session-id", header), (b"session-id", b"b"), (b"x-session-id", header)]
        told = await client.post(
            "/v1/chat/completions", json={"messages": MESSAGES}, headers=headers
        )
    assert told.status_code == 200
