"""`min_tokens` reaches the engine, within what may come at all."""

from __future__ import annotations

import pytest

from tests.server.scripted import ScriptedEngine, answer

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
}


@pytest.mark.parametrize("route", ROUTES)
async def test_it_is_asked_of_the_engine(in_memory, route):
    engine = ScriptedEngine(answer("Hi"))
    async with in_memory(engine) as client:
        for given, expected in ((5, 5), (0, 0), (None, 0)):
            body = {**ROUTES[route], "min_tokens": given, "max_tokens": 9}
            assert (await client.post(route, json=body)).status_code == 200
            assert engine.requests[-1].min_tokens == expected


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("wrong", [10, -1, 2**63, "5", [1], 1.5])
async def test_more_than_may_come_and_what_is_no_number_is_a_400(in_memory, route, wrong):
    engine = ScriptedEngine(answer("Hi"))
    async with in_memory(engine) as client:
        body = {**ROUTES[route], "min_tokens": wrong, "max_tokens": 9}
        told = await client.post(route, json=body)
    assert told.status_code == 400 and told.json()["error"]["param"] == "min_tokens"
    assert not engine.requests
