"""A field that would change the answer and is not served is refused by its name."""

from __future__ import annotations

import pytest

from luceasync.server.openai.request_body import UNSERVED_FIELDS
from tests.server.scripted import ScriptedEngine

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("name", UNSERVED_FIELDS)
@pytest.mark.parametrize("value", [{"type": "object"}, "x" * 5000, True, 1, ["a"]])
async def test_a_field_that_is_used_is_a_400_that_names_it_and_not_its_value(
    in_memory, name, value
):
    engine = ScriptedEngine()
    async with in_memory(engine) as client:
        response = await client.post(CHAT, json=BODY | {name: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    assert len(response.content) < 200
    assert engine.requests == []


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, ["text"]])
async def test_fields_that_are_off_and_fields_that_nobody_knows_are_ignored(in_memory, value):
    named = dict.fromkeys(UNSERVED_FIELDS, value) | {"function_call": "none"}
    async with in_memory(ScriptedEngine()) as client:
        response = await client.post(CHAT, json=BODY | named | {"parallel_tool_calls": True})
    assert response.status_code == 200
