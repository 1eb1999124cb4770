"""Prompts of every form are continued, and each choice has the index of its prompt."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from luceasync.errors import Unavailable
from luceasync.request import InfillPrompt, TextPrompt, TokenLogprob, TokenPrompt
from luceasync.server.openai.completions import merge_streams
from tests.deltas import text_delta
from tests.server.scripted import ScriptedEngine, ScriptedStream, answer

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "Once"}


def events_of(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    texts = [line.removeprefix("data: ") for line in response.text.strip().split("\n\n")]
    assert texts[-1] == "[DONE]"
    return [json.loads(text) for text in texts[:-1]]


async def plain(in_memory, body: dict[str, Any], engine: ScriptedEngine | None = None) -> Any:
    async with in_memory(engine or ScriptedEngine()) as client:
        response = await client.post(COMPLETIONS, json=BODY | body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_the_plain_answer_says_what_the_stream_says(in_memory):
    async with in_memory(ScriptedEngine(answer("Hel", "lo"))) as client:
        told = (await client.post(COMPLETIONS, json=BODY)).json()
        events = events_of(await client.post(COMPLETIONS, json=BODY | {"stream": True}))
    assert told["object"] == "text_completion"
    assert told["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}
    ]
    assert told["usage"]["total_tokens"] == 12
    assert [choice["text"] for event in events for choice in event["choices"]] == ["Hel", "lo", ""]
    assert "usage" not in events[-1] and "timings" in events[-1]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [TextPrompt("a")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2], [TokenPrompt((1, 2))]),
        ([[1], [2, 3]], [TokenPrompt((1,)), TokenPrompt((2, 3))]),
    ],
)
async def test_prompts_may_be_texts_or_token_ids(in_memory, prompt: Any, expected: list[Any]):
    engine = ScriptedEngine()
    told = await plain(in_memory, {"prompt": prompt}, engine)
    assert [request.prompt for request in engine.requests] == expected
    assert [choice["index"] for choice in told["choices"]] == list(range(len(expected)))
    assert told["usage"]["prompt_tokens"] == 10 * len(expected)


async def test_each_prompt_has_its_choices(in_memory):
    script = [*answer("b", index=1), *answer("a", index=0)]
    told = await plain(in_memory, {"prompt": ["x", "y"], "n": 2}, ScriptedEngine(script))
    assert [choice["text"] for choice in told["choices"]] == ["a", "b", "a", "b"]


async def test_a_prompt_is_echoed_as_text(in_memory):
    told = await plain(in_memory, {"prompt": [7, 8], "echo": True})
    assert told["choices"][0]["text"] == "<7><8>Hello!"


async def test_logprobs_are_lists_of_the_same_length(in_memory):
    top = (TokenLogprob("a", b"a", -0.5), TokenLogprob("b", b"b", -float("inf")))
    one = TokenLogprob("a", b"a", -0.5, top)
    script = [text_delta(0, "a", (1,), (one,)), text_delta(0, "a", (1,), (one,)), *answer("")]
    told = await plain(in_memory, {"logprobs": 2}, ScriptedEngine(script))
    assert told["choices"][0]["logprobs"] == {
        "tokens": ["a", "a"], "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -9999.0}] * 2, "text_offset": [0, 1],
    }  # fmt: skip


async def test_a_suffix_stands_after_what_is_written(in_memory):
    engine = ScriptedEngine()
    await plain(in_memory, {"prompt": ["a", "b"], "suffix": "z"}, engine)
    await plain(in_memory, {"prompt": "a", "suffix": ""}, engine)
    prompts = [request.prompt for request in engine.requests]
    assert prompts == [InfillPrompt("a", "z"), InfillPrompt("b", "z"), TextPrompt("a")]


async def test_sixteen_tokens_by_default(in_memory):
    engine = ScriptedEngine()
    await plain(in_memory, {}, engine)
    await plain(in_memory, {"max_tokens": 3}, engine)
    assert [request.max_tokens for request in engine.requests] == [16, 3]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"model": "other"}, "model"),
        ({"prompt": ["a"] * 5, "n": 16}, "n"),
        ({"suffix": "x", "echo": True}, "echo"),
        ({"suffix": "x", "prompt": [1, 2]}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 6}, "logprobs"),
    ],
)
async def test_a_wrong_field_is_named(in_memory, change: dict[str, Any], param: str):
    async with in_memory(ScriptedEngine()) as client:
        response = await client.post(COMPLETIONS, json=BODY | change)
    assert response.status_code in (400, 404)
    assert (response.json()["error"]["param"] or "").startswith(param)


async def test_tokenize_and_detokenize(in_memory):
    engine = ScriptedEngine()
    async with in_memory(engine) as client:
        told = (
            await client.post("/tokenize", json={"prompt": "Hi", "return_token_strs": True})
        ).json()
        chat = await client.post(
            "/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}
        )
        back = await client.post("/detokenize", json={"tokens": [1, 2]})
        neither = await client.post("/tokenize", json={})
        info = await client.get("/tokenizer_info")
    assert told["tokens"] == list(range(10)) and told["token_strs"][1] == "<1>"
    assert told["max_model_len"] == 4096 and told["count"] == chat.json()["count"] == 10
    assert back.json() == {"prompt": "<1><2>"}
    assert neither.status_code == 400
    assert "chat_template" in info.json()


async def test_a_waiting_stream_does_not_block_others() -> None:
    gate = asyncio.Event()
    slow = ScriptedStream([gate, text_delta(0, "slow")])
    quick = ScriptedStream([text_delta(0, "a"), text_delta(0, "b")])
    told = []
    async for number, delta in merge_streams([slow, quick]):
        told.append((number, delta.text))
        if len(told) == 2:
            gate.set()
    assert told == [(1, "a"), (1, "b"), (0, "slow")]


async def test_the_exception_of_a_stream_is_raised() -> None:
    streams = [ScriptedStream([Unavailable("gone")]), ScriptedStream([asyncio.Event()])]
    with pytest.raises(Unavailable):
        async for _ in merge_streams(streams):
            pass
    assert len(asyncio.all_tasks()) == 1


async def test_closing_the_merged_stream_leaves_no_task() -> None:
    streams = [ScriptedStream([text_delta(0, "a")]), ScriptedStream([asyncio.Event()])]
    async with aclosing(merge_streams(streams)) as deltas:
        await anext(deltas)
    assert len(asyncio.all_tasks()) == 1
