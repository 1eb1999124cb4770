"""Anthropic's messages: events, the plain answer, and failures in their form."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from luceasync.errors import QueueFull, Unavailable
from luceasync.request import (
    ArgumentsPiece,
    CallPiece,
    Delta,
    Finish,
    ReasoningPiece,
    TextPiece,
    Usage,
)
from tests.server.scripted import TIMINGS, ScriptedEngine, answer, finish

MESSAGES = "/v1/messages?beta=true"
BODY = {"model": "tiny", "max_tokens": 10, "messages": [{"role": "user", "content": "Hi"}]}
STREAM = BODY | {"stream": True}
CALLING = [
    Delta(0, (ReasoningPiece("w"),), token_ids=(1,)),
    Delta(0, (ReasoningPiece("hy"), TextPiece("look"))),
    Delta(0, (CallPiece(0, "call_1", "f"), ArgumentsPiece(0, '{"a": 1'), ArgumentsPiece(0, "}"))),
    Delta(0, (CallPiece(1, "call_2", "g"), ArgumentsPiece(1, "{}"))),
    Delta(0, finish=finish("stop", 4)),
]


def events_of(response: httpx.Response) -> list[Any]:
    """The data of each event, whose name is its type."""
    assert response.status_code == 200, response.text
    events = []
    for lines in response.text.strip().split("\n\n"):
        name, data = lines.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_a_stream_has_blocks_between_start_and_stop(in_memory):
    async with in_memory(ScriptedEngine(CALLING)) as client:
        events = events_of(await client.post(MESSAGES, json=STREAM))
    assert [event["type"] for event in events] == [
        "message_start", "ping",
        "content_block_start", *["content_block_delta"] * 3, "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", *["content_block_delta"] * 2, "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    indexes = [event["index"] for event in events if "index" in event]
    assert indexes == sorted(indexes) and set(indexes) == {0, 1, 2, 3}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == {
        "input_tokens": 6, "output_tokens": 4,
        "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0,
    }  # fmt: skip


async def test_the_plain_answer_says_what_the_stream_says(in_memory):
    async with in_memory(ScriptedEngine(CALLING)) as client:
        plain = (await client.post(MESSAGES, json=BODY)).json()
    assert plain["content"] == [
        {"thinking": "why", "signature": "luceasync", "type": "thinking"},
        {"text": "look", "type": "text"},
        {"id": "call_1", "name": "f", "input": {"a": 1}, "type": "tool_use"},
        {"id": "call_2", "name": "g", "input": {}, "type": "tool_use"},
    ]
    assert (plain["type"], plain["role"], plain["stop_reason"]) == (
        "message",
        "assistant",
        "tool_use",
    )
    assert plain["luceasync"]["restore"] is False


@pytest.mark.parametrize(
    ("reason", "stop", "told"),
    [("stop", None, "end_turn"), ("length", None, "max_tokens"), ("stop", "END", "stop_sequence")],
)
async def test_the_stop_reason(in_memory, reason: str, stop: str | None, told: str):
    script = [*answer("a")[:-1], Delta(0, finish=finish(reason, stop=stop))]
    async with in_memory(ScriptedEngine(script)) as client:
        plain = (await client.post(MESSAGES, json=BODY)).json()
    assert (plain["stop_reason"], plain["stop_sequence"]) == (told, stop)


async def test_the_fields_reach_the_engine(in_memory):
    engine = ScriptedEngine()
    fields = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "stop_sequences": ["a", "b"]}
    async with in_memory(engine) as client:
        await client.post(MESSAGES, json=BODY | fields)
    [request] = engine.requests
    assert (request.max_tokens, request.stop) == (10, ("a", "b"))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, 0.9)


async def test_tokens_are_counted_without_generating(in_memory):
    engine = ScriptedEngine()
    async with in_memory(engine) as client:
        counted = await client.post("/v1/messages/count_tokens", json=BODY)
    assert counted.json() == {"input_tokens": 10}
    assert not engine.streams


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(QueueFull(1, 1), 429, "rate_limit_error"), (Unavailable("gone"), 503, "overloaded_error")],
)
async def test_failures_have_anthropics_form(in_memory, error: Exception, status: int, kind: str):
    async with in_memory(ScriptedEngine(opening=error)) as client:
        response = await client.post(MESSAGES, json=BODY)
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert response.json()["type"] == "error"


async def test_a_failure_midway_is_the_last_event(in_memory):
    script = [*answer("a")[:-1], Unavailable("gone")]
    async with in_memory(ScriptedEngine(script)) as client:
        events = events_of(await client.post(MESSAGES, json=STREAM))
    assert events[-1]["error"]["type"] == "overloaded_error"
    assert "message_stop" not in [event["type"] for event in events]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": "other"}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "gone"}}, "tool_choice.name"),
        ({"output_format": {"type": "json"}}, "output_format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"effort": "much"}}, "output_config.effort"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"messages": "Hi"}, "messages"),
    ],
)
async def test_a_wrong_field_is_named(in_memory, change: dict[str, Any], param: str):
    async with in_memory(ScriptedEngine()) as client:
        response = await client.post(MESSAGES, json=BODY | change)
    assert response.status_code in (400, 404)
    assert param in response.json()["error"]["message"]


async def test_the_model_list_has_anthropics_form_for_its_clients(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        theirs = await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        others = await client.get("/v1/models")
        missing = await client.get("/v1/models/x", headers={"anthropic-version": "2023-06-01"})
    assert theirs.json()["data"][0]["display_name"] == "tiny"
    assert others.json()["object"] == "list"
    assert missing.status_code == 404 and missing.json()["type"] == "error"


async def test_a_prompt_that_is_all_kept_still_counts_one_token_as_computed(in_memory):
    """Claude Code takes a 0 for absent: it would count the prompt twice."""
    end = Finish("stop", Usage(10, 1, cached_tokens=10), TIMINGS)
    engine = ScriptedEngine([Delta(0, finish=end)])
    async with in_memory(engine) as client:
        events = events_of(await client.post(MESSAGES, json=STREAM))
    counted: dict[str, int] = {}
    for event in events:
        usage = event.get("message", event).get("usage") or {}
        counted |= {name: value for name, value in usage.items() if value}
    assert counted["input_tokens"] + counted["cache_read_input_tokens"] == 10


async def test_a_call_comes_back_whatever_its_input_was(in_memory):
    engine = ScriptedEngine()
    blocks = [
        {"type": "tool_use", "id": str(i), "name": "f", "input": given}
        for i, given in enumerate(({"a": 1}, {}, None, [1], "text"))
    ]
    said = [*BODY["messages"], {"role": "assistant", "content": blocks}, *BODY["messages"]]
    async with in_memory(engine) as client:
        assert (await client.post(MESSAGES, json=BODY | {"messages": said})).status_code == 200
    calls = engine.requests[0].prompt.messages[1]["tool_calls"]
    sent = [call["function"]["arguments"] for call in calls]
    assert sent == ['{"a": 1}', "{}", "null", "[1]", '"text"']


async def test_arguments_with_half_of_a_surrogate_pair_are_told_and_taken_back(in_memory):
    arguments = '{"old": "\\ud83d", "new": "\\ud83d\\ude00"}'
    pieces = (CallPiece(0, "c", "f"), ArgumentsPiece(0, arguments))
    engine = ScriptedEngine([Delta(0, pieces, (1,)), Delta(0, finish=finish("stop", 1))])
    async with in_memory(engine) as client:
        plain = (await client.post(MESSAGES, json=BODY)).json()
        events = events_of(await client.post(MESSAGES, json=STREAM))
    read = {"old": "\ufffd", "new": "\U0001f600"}
    assert plain["content"][0]["input"] == read
    [told] = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
    assert json.loads(told) == read


@pytest.mark.parametrize(
    ("field", "value"),
    [("mirostat", 2), ("seed", 7), ("grammar", ""), ("enable_thinking", False), ("stop", ["a"])],
)
async def test_a_field_of_another_api_that_would_change_the_answer_is_named(
    in_memory, field: str, value: Any
):
    async with in_memory(ScriptedEngine()) as client:
        for path in (MESSAGES, "/v1/messages/count_tokens"):
            response = await client.post(path, json=BODY | {field: value})
            assert response.status_code == 400
            assert f"'{field}' is not served" in response.json()["error"]["message"]
        unused = {"repetition_penalty": 1.0, "n": 1, "stop": None, "seed": None, "mirostat": 0}
        assert (await client.post(MESSAGES, json=BODY | unused)).status_code == 200
