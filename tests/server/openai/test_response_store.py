"""Recent responses can be continued and their items referred to, by their own tenant alone."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from luceasync.errors import RequestError
from luceasync.server.openai.responses_items import InputItem, ResponseStore
from luceasync.server_config import ServerConfig
from tests.server.openai.test_responses import CALLING, RESPONSES
from tests.server.scripted import ScriptedEngine

HI = {"role": "user", "content": "Hi"}


async def respond(client: httpx.AsyncClient, given: Any, **fields: Any) -> dict[str, Any]:
    response = await client.post(RESPONSES, json={"model": "tiny", "input": given, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def roles(engine: ScriptedEngine) -> list[str]:
    return [message["role"] for message in engine.requests[-1].prompt.messages]


async def test_a_conversation_goes_on_from_the_previous_response(in_memory):
    engine = ScriptedEngine(CALLING)
    result = {"type": "function_call_output", "call_id": "call_1", "output": "1"}
    async with in_memory(engine) as client:
        first = await respond(client, "Hi", instructions="I")
        second = await respond(client, [result], previous_response_id=first["id"])
        await respond(client, "And?", previous_response_id=second["id"])
    assert second["previous_response_id"] == first["id"]
    assert roles(engine) == ["user", "assistant", "tool", "assistant", "user"]
    assert engine.requests[-1].prompt.messages[1]["reasoning_content"] == "why"
    assert len(engine.requests[-1].prompt.messages[1]["tool_calls"]) == 2


async def test_items_of_a_response_can_be_referred_to(in_memory):
    engine = ScriptedEngine(CALLING)
    async with in_memory(engine) as client:
        told = await respond(client, [HI])
        items = [{"type": "item_reference", "id": item["id"]} for item in told["output"]]
        result = {"type": "function_call_output", "call_id": "call_1", "output": "1"}
        await respond(client, [HI, *items, result, HI])
    assert [m["role"] for m in engine.requests[1].prompt.messages] == [
        "user", "assistant", "tool", "user",
    ]  # fmt: skip


async def test_a_streamed_response_is_kept_before_its_last_event(in_memory):
    engine = ScriptedEngine()
    async with in_memory(engine) as client:
        response = await client.post(
            RESPONSES, json={"model": "tiny", "input": "Hi", "stream": True}
        )
        name = response.text.split('"id":"')[1].split('"')[0]
        await respond(client, "More", previous_response_id=name)
    assert roles(engine) == ["user", "assistant", "user"]


async def test_nothing_is_kept_without_store_or_for_others(in_memory):
    async with in_memory(ScriptedEngine(), ServerConfig(api_keys=("one", "two"))) as client:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        body = {"model": "tiny", "input": "Hi"}
        lost = (await client.post(RESPONSES, json=body | {"store": False}, headers=one)).json()
        kept = (await client.post(RESPONSES, json=body, headers=one)).json()
        assert (lost["store"], kept["store"]) == (False, True)
        for told, headers, status in ((lost, one, 400), (kept, two, 400), (kept, one, 200)):
            follow = body | {"previous_response_id": told["id"]}
            response = await client.post(RESPONSES, json=follow, headers=headers)
            assert response.status_code == status
            if status == 400:
                assert response.json()["error"]["code"] == "previous_response_not_found"


def items(name: str, num_chars: int = 100) -> list[InputItem]:
    return [InputItem(id=name, role="user", content="x" * num_chars)]


def test_the_tenant_with_most_loses_its_oldest():
    store = ResponseStore(max_bytes=600)
    store.keep("a", "a1", items("i1"))
    for number in range(5):
        store.keep("b", f"b{number}", items(f"j{number}"))
    assert store.conversation("a", "a1")
    assert store.item("b", "j4", "input[0]").id == "j4"
    with pytest.raises(RequestError, match="not found"):
        store.conversation("b", "b0")
    with pytest.raises(RequestError, match="not found"):
        store.item("b", "j0", "input[0]")
    store.keep("a", "huge", items("i2", 1000))
    with pytest.raises(RequestError):
        store.conversation("a", "huge")


def test_an_item_lives_as_long_as_any_response_that_has_it():
    store = ResponseStore(max_bytes=600)
    shared = items("old")
    store.keep("a", "r1", shared)
    store.keep("a", "r2", [*shared, *items("new")])
    store.keep("a", "r3", items("x", 150))
    with pytest.raises(RequestError):
        store.conversation("a", "r1")
    assert store.item("a", "old", "input[0]").id == "old"
