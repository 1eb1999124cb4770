"""Chat answers: their events and the plain form."""

from __future__ import annotations

import json
from typing import Any

import httpx

from luceasync.request import (
    ArgumentsPiece,
    CallPiece,
    Delta,
    ReasoningPiece,
    TextPiece,
    TokenLogprob,
)
from tests.deltas import text_delta
from tests.server.scripted import ScriptedEngine, answer, finish

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
STREAM = BODY | {"stream": True}
USAGE = {"stream_options": {"include_usage": True}}


def events_of(response: httpx.Response) -> list[Any]:
    """The data of each event; "[DONE]" stays text."""
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    texts = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> list[Any]:
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return events_of(response)


async def test_a_stream_is_role_text_finish_done(in_memory):
    async with in_memory(ScriptedEngine(answer("Hel", "lo"))) as client:
        *chunks, done = await ask(client, STREAM)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {},
    ]  # fmt: skip
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert "usage" not in chunks[0]
    assert chunks[-1]["timings"]["prompt_ms"] == 100.0


async def test_usage_comes_last_without_choices_and_is_null_before(in_memory):
    async with in_memory(ScriptedEngine(answer("a", "b"))) as client:
        *chunks, last, _ = await ask(client, STREAM | USAGE)
    assert [chunk["usage"] for chunk in chunks] == [None] * 4
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    assert "timings" in last


async def test_continuous_usage(in_memory):
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with in_memory(ScriptedEngine(answer("a", "b"))) as client:
        *chunks, _, _ = await ask(client, STREAM | {"stream_options": options})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 2]


async def test_the_plain_answer_says_what_the_stream_says(in_memory):
    script = [*answer("b", index=1, reason="length"), *answer("a1", "a2", index=0)]
    async with in_memory(ScriptedEngine(script)) as client:
        plain = (await client.post(CHAT, json=BODY | {"n": 2})).json()
        *_, usage, _ = await ask(client, STREAM | USAGE | {"n": 2})
    choices = [(c["message"]["content"], c["finish_reason"]) for c in plain["choices"]]
    assert choices == [("a1a2", "stop"), ("b", "length")]
    assert [choice["index"] for choice in plain["choices"]] == [0, 1]
    assert plain["usage"] == usage["usage"]
    assert plain["usage"]["completion_tokens"] == 3
    assert plain["timings"] == usage["timings"]
    assert plain["luceasync"] == usage["luceasync"]
    assert plain["object"] == "chat.completion"


async def test_every_choice_begins_with_its_role_and_ends_once(in_memory):
    script = [
        text_delta(0, "a", (1,)),
        text_delta(1, "b", (2,)),
        *answer(index=1),
        *answer(index=0),
    ]
    async with in_memory(ScriptedEngine(script)) as client:
        *chunks, _ = await ask(client, STREAM | {"n": 2})
    told = [(chunk["choices"][0]["index"], chunk["choices"][0]) for chunk in chunks]
    assert [i for i, choice in told if "role" in choice["delta"]] == [0, 1]
    assert [i for i, choice in told if choice["finish_reason"]] == [1, 0]
    assert ["timings" in chunk for chunk in chunks] == [False] * 5 + [True]
    assert ["luceasync" in chunk for chunk in chunks] == [False] * 5 + [True]


async def test_text_and_finish_in_one_delta_become_two_chunks(in_memory):
    async with in_memory(ScriptedEngine([text_delta(0, "end", (1,), finish=finish())])) as client:
        *chunks, _ = await ask(client, STREAM)
    assert [chunk["choices"][0]["delta"] for chunk in chunks][1:] == [{"content": "end"}, {}]


async def test_a_prompt_kept_without_an_answer_ends_at_its_length(in_memory):
    script = [Delta(0, finish=finish("length", num_tokens=0))]
    body = BODY | {"max_tokens": 0, "keep_prefix": True}
    async with in_memory(ScriptedEngine(script)) as client:
        plain = (await client.post(CHAT, json=body)).json()
        role, end, _ = await ask(client, body | {"stream": True})
    [choice] = plain["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert plain["usage"]["completion_tokens"] == 0
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert end["choices"][0]["finish_reason"] == "length"


async def test_held_back_text_sends_no_event(in_memory):
    script = [text_delta(0, "", (1,)), *answer("x")]
    async with in_memory(ScriptedEngine(script)) as client:
        assert len(await ask(client, STREAM)) == 4


async def test_logprobs_have_openais_form(in_memory):
    top = (TokenLogprob("a", b"a", -0.5), TokenLogprob("\ufffd", b"\xc3", float("-inf")))
    script = [text_delta(0, "a", (1,), (TokenLogprob("a", b"a", -0.5, top),)), *answer()]
    async with in_memory(ScriptedEngine(script)) as client:
        plain = (await client.post(CHAT, json=BODY | {"logprobs": True})).json()
    [entry] = plain["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("a", -0.5, [97])
    assert entry["top_logprobs"][1] == {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xC3]}


async def test_each_piece_is_a_chunk_and_the_first_has_the_logprobs(in_memory):
    logprobs = (TokenLogprob("a", b"a", -0.5), TokenLogprob("b", b"b", -0.5))
    script = [Delta(0, (TextPiece("a"), TextPiece("b")), (1, 2), logprobs), *answer()]
    async with in_memory(ScriptedEngine(script)) as client:
        _, first, second, *_ = await ask(client, STREAM | {"logprobs": True})
    choices = first["choices"] + second["choices"]
    assert [choice["delta"]["content"] for choice in choices] == ["a", "b"]
    assert [len((choice["logprobs"] or {}).get("content", ())) for choice in choices] == [2, 0]


async def test_logprobs_without_text_come_with_empty_content(in_memory):
    script = [Delta(0, (), (1,), (TokenLogprob("a", b"a", -0.5),)), *answer()]
    async with in_memory(ScriptedEngine(script)) as client:
        _, told, *_ = await ask(client, STREAM | {"logprobs": True})
    assert told["choices"][0]["delta"] == {"content": ""}
    assert told["choices"][0]["logprobs"]["content"][0]["token"] == "a"


CALLING = [
    Delta(0, (ReasoningPiece("why"),), token_ids=(1,)),
    Delta(0, (TextPiece("look"), CallPiece(0, "call_1", "f")), token_ids=(2,)),
    Delta(0, (ArgumentsPiece(0, '{"a": 1'), ArgumentsPiece(0, "}")), token_ids=(3,)),
    Delta(0, (CallPiece(1, "call_2", "g"), ArgumentsPiece(1, "{}")), token_ids=(4,)),
    Delta(0, finish=finish("stop", 4)),
]


async def test_reasoning_and_calls_have_their_own_fields(in_memory):
    async with in_memory(ScriptedEngine(CALLING)) as client:
        *chunks, _ = await ask(client, STREAM)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks][1:-1]
    begun = {"function": {"arguments": "", "name": "f"}, "id": "call_1", "type": "function"}
    assert deltas[:5] == [
        {"reasoning_content": "why"},
        {"content": "look"},
        {"tool_calls": [{"index": 0, **begun}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def test_the_plain_answer_has_whole_calls(in_memory):
    async with in_memory(ScriptedEngine(CALLING)) as client:
        [choice] = (await client.post(CHAT, json=BODY)).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant", "content": "look", "refusal": None, "reasoning_content": "why",
        "tool_calls": [
            call("call_1", "f", '{"a": 1}'), call("call_2", "g", "{}"),
        ],
    }  # fmt: skip


async def test_an_answer_of_calls_alone_has_no_content(in_memory):
    script = [Delta(0, CALLING[1].pieces[1:]), Delta(0, finish=finish("length", 1))]
    async with in_memory(ScriptedEngine(script)) as client:
        [choice] = (await client.post(CHAT, json=BODY)).json()["choices"]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "length"  # its arguments were cut off


async def test_parallel_calls_can_be_disabled(in_memory):
    engine = ScriptedEngine()
    async with in_memory(engine) as client:
        await client.post(CHAT, json=BODY | {"parallel_tool_calls": False})
        await client.post(CHAT, json=BODY | {"parallel_tool_calls": True})
    assert [request.prompt.max_calls for request in engine.requests] == [1, None]
