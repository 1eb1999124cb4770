"""Bodies are bounded before they are decoded; all APIs share some fields."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers

from luceasync.errors import RequestError
from luceasync.server import fields
from luceasync.server.fields import (
    MAX_CACHE_KEY_CHARS,
    MAX_SESSION_CHARS,
    conversation_id_of,
    has_too_many_values,
)
from tests.server.scripted import ScriptedEngine, answer

TEXTS = st.text(alphabet=',[{"\\a\N{SNOWMAN}', max_size=8)
JSON = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
)


def num_separators(value: Any) -> int:
    """Commas between values, and opening brackets."""
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(0, len(value) - 1) + sum(map(num_separators, inner))


@pytest.mark.slow
@given(JSON)
def test_only_separators_outside_strings_count(value):
    body = json.dumps(value, ensure_ascii=False).encode()
    num = num_separators(value)
    assert not has_too_many_values(body, num)
    # Strings without values around them may make it seem more, but never fewer.
    assert num == 0 or has_too_many_values(body, num - 1)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSON, st.integers(2, 9))
def test_the_count_does_not_depend_on_the_pieces(monkeypatch, value, piece_bytes):
    monkeypatch.setattr(fields, "SCAN_BYTES", piece_bytes)
    test_only_separators_outside_strings_count.hypothesis.inner_test(value)


@pytest.mark.parametrize("text", [b"", b'"', b"\\", b'"\\', b"[" * 9, b'"' * 9, b'"\\"' * 9])
def test_invalid_json_can_be_counted(text):
    assert has_too_many_values(text, 3) in (False, True)


def test_separators_in_strings_do_not_count():
    text = json.dumps({"content": ",[{" * 1000}).encode()
    assert not has_too_many_values(text, 1)


MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "title": "@"}
FORMAT = {"type": "json_schema", "name": "a", "schema": SCHEMA}
ROUTES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi"},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "model": "tiny", "max_tokens": 5},
}
# Values that the decoder keeps as they are, or skips.
RAW_FIELDS = {
    "/v1/chat/completions": {"response_format": {"type": "json_schema", "json_schema": FORMAT}},
    "/v1/responses": {"text": {"format": FORMAT}},
    "/v1/completions": {"guided_json": SCHEMA},
    "/v1/messages": {"output_config": {"format": FORMAT}},
}
KEYED = [route for route in ROUTES if route != "/v1/messages"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("wrong", [b"\xff", b"\xed\xa0\x80", b"\xc3", b"\xc0\x80"])
async def test_a_body_that_is_not_utf_8_is_a_400(in_memory, route, wrong):
    extras = (RAW_FIELDS[route], {"unknown": "@"}, {"unknown": {"@": 1}})
    async with in_memory(ScriptedEngine()) as client:
        for extra in extras:
            body = json.dumps({**ROUTES[route], **extra}).encode().replace(b"@", wrong)
            told = await client.post(route, content=body)
            assert told.status_code == 400, (extra, told.text)
            assert "not valid UTF-8" in told.json()["error"]["message"]


async def test_characters_may_lie_across_the_pieces_that_are_checked(in_memory, monkeypatch):
    monkeypatch.setattr(fields, "SCAN_BYTES", 3)
    body = {"messages": [{"role": "user", "content": "é€😀" * 20}]}
    async with in_memory(ScriptedEngine()) as client:
        told = await client.post(
            "/v1/chat/completions", content=json.dumps(body, ensure_ascii=False)
        )
    assert told.status_code == 200


@pytest.mark.parametrize("name", ["session-id", "X-Session-Id", "X-Claude-Code-Session-Id"])
def test_a_session_header_wins_over_the_cache_key(name):
    assert conversation_id_of(Headers({name: "ses_1"}), "key") == "ses_1"


def test_the_cache_key_is_used_without_a_session_header():
    assert conversation_id_of(Headers(), "k" * MAX_CACHE_KEY_CHARS) == "k" * MAX_CACHE_KEY_CHARS
    assert conversation_id_of(Headers(), "") == conversation_id_of(Headers()) == ""


@pytest.mark.parametrize("value", ["", "   ", "x" * (MAX_SESSION_CHARS + 1), "x" * 65536])
def test_an_unusable_header_is_ignored(value):
    assert conversation_id_of(Headers({"x-session-id": value})) == ""
    assert conversation_id_of(Headers({"session-id": value, "x-session-id": "a"})) == "a"


def test_headers_may_be_repeated_and_hold_any_bytes():
    raw = [(b"session-id", b"\xff\x00\xfe"), (b"session-id", b"other")]
    assert conversation_id_of(Headers(raw=raw)) == "\xff\x00\xfe"


def test_a_cache_key_that_is_too_long_is_refused():
    with pytest.raises(RequestError, match="maximum length 64") as caught:
        conversation_id_of(Headers({"session-id": "s"}), "k" * (MAX_CACHE_KEY_CHARS + 1))
    assert caught.value.param == "prompt_cache_key"
    assert caught.value.code == "string_above_max_length"


@pytest.mark.parametrize("route", ROUTES)
async def test_every_route_passes_the_session_to_the_engine(in_memory, route):
    engine = ScriptedEngine(answer("Hi"))
    async with in_memory(engine) as client:
        told = await client.post(route, json=ROUTES[route], headers={"x-session-id": "ses_1"})
    assert told.status_code == 200, told.text
    assert engine.requests[-1].conversation == "ses_1"


@pytest.mark.parametrize("route", KEYED)
async def test_the_cache_key_reaches_the_engine_and_a_wrong_one_is_a_400(in_memory, route):
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
async def test_odd_session_headers_are_accepted(in_memory, header):
    engine = ScriptedEngine(answer("Hi"))
    async with in_memory(engine) as client:
        headers = [(b"session-id", header), (b"session-id", b"b"), (b"x-session-id", header)]
        told = await client.post(
            "/v1/chat/completions", json={"messages": MESSAGES}, headers=headers
        )
    assert told.status_code == 200


HI = [{"role": "user", "content": "Hi"}]
APIS = {
    "chat": ("/v1/chat/completions", {"messages": HI}),
    "completions": ("/v1/completions", {"prompt": "Hi"}),
    "responses": ("/v1/responses", {"input": "Hi"}),
    "messages": ("/v1/messages", {"model": "tiny", "max_tokens": 10, "messages": HI}),
}
TOO_LARGE = "Invalid value for 'kvflash_pin': 640 tokens, in chunks of 64; 128 fit."

every_api = pytest.mark.parametrize("api", APIS)


def refusal(api: str, answer: dict[str, Any]) -> tuple[str, str | None]:
    """The message, and the field that the API names beside it."""
    if api == "messages":
        assert answer.keys() >= {"type", "error"} and answer["type"] == "error"
        assert answer["error"]["type"] == "invalid_request_error"
        return answer["error"]["message"], None
    error = answer["error"]
    assert error["type"] == "invalid_request_error"
    return error["message"], error["param"]


@every_api
@pytest.mark.parametrize(
    ("asked", "pins"),
    [(None, ()), ("system", "system"), ([[0, 64], [100, 228]], ((0, 64), (100, 228)))],
)
async def test_pins_reach_the_engine(in_memory, api: str, asked: Any, pins: Any):
    engine, (path, body) = ScriptedEngine(), APIS[api]
    async with in_memory(engine) as client:
        response = await client.post(path, json=body | {"kvflash_pin": asked})
    assert response.status_code == 200, response.text
    assert [request.pins for request in engine.requests] == [pins]


@every_api
@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ("all", "kvflash_pin"),
        ([[5, 5]], "kvflash_pin[0]"),
        ([[0, 4], [-1, 4]], "kvflash_pin[1]"),
        ([[0, 1, 2]], "kvflash_pin[0]"),
        (7, "kvflash_pin"),
        ([[0, 1]] * 65, "kvflash_pin"),
    ],
)
async def test_a_wrong_field_is_named(in_memory, api: str, asked: Any, param: str):
    path, body = APIS[api]
    async with in_memory(ScriptedEngine()) as client:
        response = await client.post(path, json=body | {"kvflash_pin": asked})
    assert response.status_code == 400
    words, named = refusal(api, response.json())
    assert f"'{param}'" in words and named in (param, None)


@every_api
async def test_pins_that_do_not_fit_are_refused(in_memory, api: str):
    path, body = APIS[api]
    engine = ScriptedEngine(opening=RequestError(TOO_LARGE, param="kvflash_pin"))
    async with in_memory(engine) as client:
        response = await client.post(path, json=body | {"kvflash_pin": [[0, 640]]})
    assert response.status_code == 400
    words, named = refusal(api, response.json())
    assert words == TOO_LARGE and named in ("kvflash_pin", None)


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (rb"x\ud83d", "x\ufffd"),
        (rb"\ude00 y", "\ufffd y"),
        (rb"\uD83D\uDE00 \ud83d", "\U0001f600 \ufffd"),
        (rb"\\ud83d \ud83d", "\\ud83d \ufffd"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\ud83d\n", "\ufffd\n"),
    ],
)
def test_half_of_a_surrogate_pair_is_a_replacement_character(sent, read):
    assert fields.decode(msgspec.json.Decoder(list[str]), b'["' + sent + b'"]') == [read]
