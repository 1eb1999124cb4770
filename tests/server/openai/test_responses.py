"""OpenAI's own client reads every event of a response; the plain answer has the same content."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from luceasync.errors import Unavailable
from luceasync.request import ArgumentsPiece, CallPiece, Delta, ReasoningPiece, TextPiece
from luceasync.server_config import ServerConfig
from tests.server.scripted import ScriptedEngine, answer, finish

RESPONSES = "/v1/responses"
BODY = {"model": "tiny", "input": "Hi"}
CALLING = [
    Delta(0, (ReasoningPiece("w"),), token_ids=(1,)),
    Delta(0, (ReasoningPiece("hy"), TextPiece("look")), token_ids=(2,)),
    Delta(0, (TextPiece("!"), CallPiece(0, "call_1", "f"), ArgumentsPiece(0, '{"a": 1'))),
    Delta(0, (ArgumentsPiece(0, "}"), CallPiece(1, "call_2", "g"), ArgumentsPiece(1, "{}"))),
    Delta(0, finish=finish("stop", 4)),
]


@pytest.fixture
def connect(on_port):
    @asynccontextmanager
    async def open_client(engine: ScriptedEngine) -> AsyncIterator[openai.AsyncOpenAI]:
        async with (
            on_port(engine, ServerConfig()) as http,
            openai.AsyncOpenAI(
                base_url=f"{http.base_url}/v1", api_key="one", max_retries=0
            ) as client,
        ):
            yield client

    return open_client


def events_of(response: httpx.Response) -> list[Any]:
    """The data of each event, whose name is its type; their numbers rise by one."""
    assert response.status_code == 200, response.text
    events = []
    for number, lines in enumerate(response.text.strip().split("\n\n")):
        name, data = lines.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        assert events[-1]["sequence_number"] == number
    return events


async def test_every_item_is_added_streamed_and_done(in_memory):
    async with in_memory(ScriptedEngine(CALLING)) as client:
        events = events_of(await client.post(RESPONSES, json=BODY | {"stream": True}))
    told = [event["type"].removeprefix("response.") for event in events]
    assert told == [
        "created", "in_progress",
        "output_item.added", "reasoning_summary_part.added",
        *["reasoning_summary_text.delta"] * 2, "reasoning_summary_text.done",
        "reasoning_summary_part.done", "output_item.done",
        "output_item.added", "content_part.added",
        *["output_text.delta"] * 2, "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", *["function_call_arguments.delta"] * 2,
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    added = [event["output_index"] for event in events if event["type"].endswith("item.added")]
    assert added == [0, 1, 2, 3]
    usage = events[-1]["response"]["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 4, "cache_write_tokens": 0}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 1}


@pytest.mark.slow
async def test_the_client_reads_the_stream_and_the_plain_answer(connect):
    async with connect(ScriptedEngine(CALLING)) as client:
        plain = await client.responses.create(**BODY)
        async with client.responses.stream(**BODY) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_response()
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in plain.output] == kinds
    assert [item.type for item in streamed.output] == kinds
    assert plain.output_text == streamed.output_text == "look!"
    assert plain.output[2].arguments == streamed.output[2].arguments == '{"a": 1}'
    assert plain.output[0].summary[0].text == "why"
    assert plain.status == streamed.status == "completed"


async def test_an_answer_that_is_too_long_is_incomplete(in_memory):
    async with in_memory(ScriptedEngine(answer("a", reason="length"))) as client:
        plain = (await client.post(RESPONSES, json=BODY)).json()
    assert plain["status"] == "incomplete"
    assert plain["incomplete_details"] == {"reason": "max_output_tokens"}
    assert plain["output"][0]["status"] == "incomplete"


async def test_a_failure_midway_is_an_event(in_memory):
    script = [*answer("a")[:-1], Unavailable("gone")]
    async with in_memory(ScriptedEngine(script)) as client:
        events = events_of(await client.post(RESPONSES, json=BODY | {"stream": True}))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "unavailable", "message": "gone"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"thinking": {"type": "disabled"}}, "thinking"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"seed": 7}, "seed"),
        ({"guided_choice": []}, "guided_choice"),
        ({"background": True}, "background"),
        ({"model": "other"}, "model"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "gone"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"input": 5}, "input"),
    ],
)
async def test_a_wrong_field_is_named(in_memory, change: dict[str, Any], param: str):
    async with in_memory(ScriptedEngine()) as client:
        response = await client.post(RESPONSES, json=BODY | change)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def text(said: str) -> dict[str, str]:
    return {"type": "input_text", "text": said}


async def test_a_coding_agents_request_is_accepted(in_memory):
    engine = ScriptedEngine()
    body = BODY | {
        "input": [
            {"type": "message", "id": "m", "role": "developer", "content": [text("D")]},
            {"type": "message", "role": "user", "content": [text("Q")]},
        ],
        "tools": [
            {"type": "function", "name": "f", "strict": False, "parameters": {}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"},
        "store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
        "client_metadata": {"a": "b"}, "stream": True,
    }  # fmt: skip
    async with in_memory(engine) as client:
        events_of(await client.post(RESPONSES, json=body))
    assert [tool["function"]["name"] for tool in engine.requests[0].prompt.tools] == ["f", "n__g"]
