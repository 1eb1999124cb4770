"""Answers of every format of calls, whole and broken at random, are told alike by every API,
streamed or not, and OpenAI's and Anthropic's own types parse them.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from luceasync.request import Delta, Piece
from luceasync.text.answer.call_formats import FORMATS
from luceasync.text.answer.pieces import AnswerPieces
from tests.server.conftest import Clients
from tests.server.scripted import ScriptedEngine, finish
from tests.text.answer.written import SCHEMA, SCHEMAS, TOOL, WRITERS, a_call, a_string

NUM_TEXTS = 5  # of each format
WORDS = ["<think>", "</think>\n\n", "so ", "\n\n", "{", "é😀", '"', "<tool_call>"]
CHAT_TOOLS = [{"type": "function", "function": {"name": TOOL, "parameters": SCHEMA}}]
MESSAGES_TOOLS = [{"name": TOOL, "input_schema": SCHEMA}]
RESPONSES_TOOLS = [{"type": "function", "name": TOOL, "parameters": SCHEMA}]
Seen = tuple[str, str, list[dict[str, Any]]]  # reasoning, content, arguments of calls


def a_text(rng: random.Random, call_format: str) -> str:
    parts = []
    for _ in range(rng.randrange(1, 5)):
        call = WRITERS[call_format](a_call(rng))
        place = rng.randrange(len(call))
        broken = rng.choice([call[:place], call[place:], call[:place] + call[place + 1 :]])
        parts.append(rng.choice([call, call, broken, rng.choice(WORDS), a_string(rng)]))
    return "".join(parts)


def deltas_of(text: str, call_format: str, rng: random.Random, reason: str) -> list[Delta]:
    maker = AnswerPieces(
        calls=FORMATS[call_format], schemas=SCHEMAS, is_reasoning=rng.random() < 0.3
    )
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(4))
    deltas, begin = [], 0
    for end in [*cuts, len(text)]:
        pieces: tuple[Piece, ...] = maker.make(text[begin:end], is_last=False)
        deltas.append(Delta(0, pieces, token_ids=(1,)))
        begin = end
    deltas.append(Delta(0, maker.make("", is_last=True), finish=finish(reason)))
    return deltas


def events_of(text: str) -> list[dict[str, Any]]:
    lines = (line[6:] for line in text.splitlines() if line.startswith("data: {"))
    return [json.loads(line) for line in lines]


def seen_in_chunks(events: list[dict[str, Any]]) -> Seen:
    reasoning = content = ""
    calls: dict[int, str] = {}
    from openai.types.chat import ChatCompletionChunk

    for event in events:
        ChatCompletionChunk.model_validate(event)
        for choice in event["choices"]:
            delta = choice["delta"]
            reasoning += delta.get("reasoning_content") or ""
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                written = call["function"].get("arguments") or ""
                calls[call["index"]] = calls.get(call["index"], "") + written
    return reasoning, content, [json.loads(each) for each in calls.values()]


@pytest.mark.slow
@pytest.mark.parametrize("call_format", sorted(WRITERS))
async def test_every_api_tells_any_answer_alike(in_memory: Clients, call_format: str) -> None:
    from anthropic.types import Message
    from openai.types.chat import ChatCompletion
    from openai.types.responses import Response

    rng = random.Random(11)
    asked = [{"role": "user", "content": "x"}]
    for _ in range(NUM_TEXTS):
        reason = rng.choice(["stop", "length"])
        script = deltas_of(a_text(rng, call_format), call_format, rng, reason)
        engine = ScriptedEngine(script)
        async with in_memory(engine) as client:
            chat = {"model": "tiny", "messages": asked, "tools": CHAT_TOOLS}
            plain = (await client.post("/v1/chat/completions", json=chat)).json()
            ChatCompletion.model_validate(plain)
            [choice] = plain["choices"]
            message = choice["message"]
            calls = message.get("tool_calls") or []
            seen: Seen = (
                message.get("reasoning_content") or "",
                message["content"] or "",
                [json.loads(call["function"]["arguments"]) for call in calls],
            )
            assert (choice["finish_reason"] == "tool_calls") == (bool(calls) and reason == "stop")
            streamed = await client.post("/v1/chat/completions", json={**chat, "stream": True})
            assert seen_in_chunks(events_of(streamed.text)) == seen

            body = {"model": "tiny", "messages": asked, "max_tokens": 9, "tools": MESSAGES_TOOLS}
            blocks = (await client.post("/v1/messages", json=body)).json()
            Message.model_validate(blocks)
            found = blocks["content"]
            assert [b["input"] for b in found if b["type"] == "tool_use"] == seen[2]
            assert "".join(b["text"] for b in found if b["type"] == "text") == seen[1]

            body = {"model": "tiny", "input": "x", "tools": RESPONSES_TOOLS}
            items = (await client.post("/v1/responses", json=body)).json()
            Response.model_validate(items)
            told = [json.loads(i["arguments"]) for i in items["output"] if "arguments" in i]
            assert told == seen[2]

            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls
            ]
            chat["messages"] = [*asked, message, *results, *asked]
            again = await client.post("/v1/chat/completions", json=chat)
            assert again.status_code == 200, again.text
