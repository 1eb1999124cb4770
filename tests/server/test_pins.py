"""Every API takes pins, and says in its own words what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from luceasync.errors import RequestError
from tests.server.scripted import ScriptedEngine

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
    """The words, and the field that the API names beside them."""
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
async def test_what_is_to_stay_reaches_the_engine(in_memory, api: str, asked: Any, pins: Any):
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
async def test_what_is_wrong_is_named(in_memory, api: str, asked: Any, param: str):
    path, body = APIS[api]
    async with in_memory(ScriptedEngine()) as client:
        response = await client.post(path, json=body | {"kvflash_pin": asked})
    assert response.status_code == 400
    words, named = refusal(api, response.json())
    assert f"'{param}'" in words and named in (param, None)


@every_api
async def test_what_does_not_fit_is_told_by_how_much_does(in_memory, api: str):
    path, body = APIS[api]
    engine = ScriptedEngine(opening=RequestError(TOO_LARGE, param="kvflash_pin"))
    async with in_memory(engine) as client:
        response = await client.post(path, json=body | {"kvflash_pin": [[0, 640]]})
    assert response.status_code == 400
    words, named = refusal(api, response.json())
    assert words == TOO_LARGE and named in ("kvflash_pin", None)
