"""Ollama's API: lines that its clients read, options that are honoured or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from luceasync.errors import Unavailable
from luceasync.request import (
    ArgumentsPiece,
    CallPiece,
    ChatPrompt,
    Constraint,
    Delta,
    InfillPrompt,
    ReasoningPiece,
    Request,
    Sampling,
    TextPiece,
    TextPrompt,
    TokenLogprob,
)
from luceasync.server_config import ServerConfig
from tests.deltas import text_delta
from tests.server.scripted import ScriptedEngine, finish

HI = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "tiny", "messages": HI}
GENERATE = {"model": "tiny", "prompt": "Hi"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALLING = [
    Delta(0, (ReasoningPiece("Hm."), TextPiece("Let me look. "))),
    Delta(
        0, (CallPiece(0, "a1", "look"), ArgumentsPiece(0, '{"at":'), ArgumentsPiece(0, '\n"é"}'))
    ),
    Delta(0, (CallPiece(1, "b2", "look"), ArgumentsPiece(1, '{"at": 12345678901234567890123}'))),
    Delta(0, finish=finish()),
]


def thinking_engine(*script: Any) -> ScriptedEngine:
    engine = ScriptedEngine(script)
    engine.card = replace(
        engine.card, thinks=True, tool_format="qwen-json", chat_template="{{ think }}"
    )
    return engine


async def post(client: httpx.AsyncClient, path: str, body: Any, **more: Any) -> list[Any]:
    """The lines of a streamed answer, which is what clients get unless they ask for none."""
    response = await client.post(path, json={**body, **more})
    assert response.headers["content-type"] == "application/x-ndjson", response.text
    return [json.loads(line) for line in response.text.splitlines()]


async def plain(client: httpx.AsyncClient, path: str, body: Any, **more: Any) -> Any:
    response = await client.post(path, json={**body, "stream": False, **more})
    assert response.status_code == 200, response.text
    return response.json()


async def request_of(in_memory, path: str, body: Any, engine: Any = None, **more: Any) -> Request:
    engine = engine or ScriptedEngine()
    async with in_memory(engine) as client:
        await plain(client, path, body, **more)
    return engine.requests[-1]


async def error_of(in_memory, path: str, body: Any, **more: Any) -> tuple[int, str]:
    async with in_memory(ScriptedEngine()) as client:
        response = await client.post(path, json={**body, **more})
    [(name, message)] = response.json().items()
    assert name == "error" and isinstance(message, str)
    return response.status_code, message


# Answers


async def test_a_chat_is_lines_and_the_last_one_has_durations_that_were_measured(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        *parts, last = await post(client, "/api/chat", CHAT)
    assert [part["message"] for part in parts] == [
        {"role": "assistant", "content": text} for text in ("Hel", "lo", "!")
    ]
    assert all(part["model"] == "tiny" and not part["done"] for part in parts)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert (last["load_duration"], last["prompt_eval_duration"], last["eval_duration"]) == (
        1_000_000,
        100_000_000,
        500_000_000,
    )
    assert (last["prompt_eval_count"], last["eval_count"]) == (10, 3)
    assert 0 < last["total_duration"] < 60e9
    assert last["timings"]["prompt_n"] == 6 and last["luceasync"]["restore"] is False


async def test_the_plain_answer_is_the_lines_put_together(in_memory):
    async with in_memory(ScriptedEngine(CALLING)) as client:
        *parts, last = await post(client, "/api/chat", CHAT, tools=[TOOL])
        whole = await plain(client, "/api/chat", CHAT, tools=[TOOL])
    assert whole["message"] == {
        "role": "assistant",
        "content": "".join(part["message"]["content"] for part in parts),
        "thinking": "Hm.",
        "tool_calls": [call for part in parts for call in part["message"].get("tool_calls", ())],
    }
    varying = {"created_at", "message", "total_duration"}
    assert {k: v for k, v in whole.items() if k not in varying} == {
        k: v for k, v in last.items() if k not in varying
    }


async def test_a_call_is_one_line_with_an_object(in_memory):
    async with in_memory(ScriptedEngine(CALLING)) as client:
        lines = await post(client, "/api/chat", CHAT, tools=[TOOL])
    calls = [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]]
    assert calls == [
        [{"id": "a1", "function": {"index": 0, "name": "look", "arguments": {"at": "é"}}}],
        [
            {
                "id": "b2",
                "function": {
                    "index": 1,
                    "name": "look",
                    "arguments": {"at": 12345678901234567890123},
                },
            }
        ],
    ]


async def test_generate_has_its_text_in_another_field(in_memory):
    script = [Delta(0, (ReasoningPiece("Hm."),)), text_delta(0, "Yes"), Delta(0, finish=finish())]
    async with in_memory(ScriptedEngine(script)) as client:
        first, second, last = await post(client, "/api/generate", GENERATE)
        whole = await plain(client, "/api/generate", GENERATE)
    assert (first["thinking"], first["response"], second["response"]) == ("Hm.", "", "Yes")
    assert last["done"] and "message" not in last
    assert (whole["response"], whole["thinking"], whole["eval_count"]) == ("Yes", "Hm.", 3)


async def test_log_probabilities_are_told_with_the_text(in_memory):
    top = TokenLogprob("Ja", b"Ja", -float("inf"))
    one = TokenLogprob("Yes", b"Yes", -0.5, (top,))
    engine = ScriptedEngine([text_delta(0, "Yes", (1,), (one,)), Delta(0, finish=finish())])
    async with in_memory(engine) as client:
        body = {**GENERATE, "logprobs": True, "top_logprobs": 1}
        first, last = await post(client, "/api/generate", body)
    assert engine.requests[0].top_logprobs == 1 and "logprobs" not in last
    [told] = first["logprobs"]
    assert (told["token"], told["logprob"], told["bytes"]) == ("Yes", -0.5, [89, 101, 115])
    assert told["top_logprobs"][0]["logprob"] == -9999.0


async def test_a_failure_is_a_status_or_else_the_last_line(in_memory):
    async with in_memory(ScriptedEngine([Unavailable("gone")])) as client:
        early = await client.post("/api/chat", json=CHAT)
    async with in_memory(ScriptedEngine([text_delta(0, "a"), Unavailable("gone")])) as client:
        lines = await post(client, "/api/chat", CHAT)
    assert (early.status_code, early.json()) == (503, {"error": "gone"})
    assert lines[1:] == [{"error": "gone"}]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_a_body_without_a_prompt_loads_the_model_which_is_there(in_memory, path):
    engine = ScriptedEngine()
    async with in_memory(engine) as client:
        response = await client.post(path, json={"model": "tiny", "keep_alive": "5m"})
    told = response.json()
    assert (told["done"], told["done_reason"], engine.requests) == (True, "load", [])


# Requests


async def test_options_become_sampling_and_limits(in_memory):
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.4,
        "min_p": 0.1,
        "seed": 3,
        "num_predict": 9,
        "stop": ["END"],
        "repeat_penalty": 1.2,
        "repeat_last_n": -1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "num_ctx": 99999,
        "num_gpu": 1,
        "mirostat": 0,
        "tfs_z": 1.0,
    }
    request = await request_of(in_memory, "/api/chat", CHAT, options=options)
    assert request.sampling == Sampling(0.5, 7, 0.4, 0.1, 1.2, 0.2, 0.3, seed=3)
    assert (request.max_tokens, request.stop) == (9, ("END",))


async def test_without_options_ollamas_own_defaults_hold(in_memory):
    request = await request_of(in_memory, "/api/chat", CHAT, options={"num_predict": -1})
    assert request.sampling == Sampling(temperature=0.8, top_k=40, top_p=0.9)
    assert request.max_tokens is None


async def test_penalties_that_see_no_token_are_none(in_memory):
    options = {"repeat_last_n": 0, "repeat_penalty": 1.5, "presence_penalty": 1}
    request = await request_of(in_memory, "/api/chat", CHAT, options=options)
    assert (request.sampling.repetition_penalty, request.sampling.presence_penalty) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ({"options": {"temperature": 3}}, "options.temperature"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n"),
        ({"options": {"presence_penalty": 1, "penalize_newline": False}}, "penalize_newline"),
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"options": {"stop": [""]}}, "options.stop"),
        ({"options": {"num_ctx": 0}}, "options.num_ctx"),
        ({"options": [1]}, "options"),
        ({"temperature": 0.5}, "'temperature' belongs into 'options'"),
        ({"seed": 1}, "'seed' belongs into 'options'"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "none"}, "tool_choice"),
        ({"format": "yaml"}, "format"),
        ({"think": True}, "'tiny' does not support thinking"),
        ({"think": "much"}, "think"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"template": "{{ .Prompt }}"}, "template"),
        (
            {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
            "messages[0].images",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": "Hi"}, "messages"),
        ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"function": {}}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools[0]"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(in_memory, more, words):
    status, message = await error_of(in_memory, "/api/chat", CHAT, **more)
    assert status == 400 and words in message


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"images": ["aGk="]}, "images"),
        ({"context": [1, 2]}, "context"),
        ({"raw": True, "system": "Be brief."}, "system"),
        ({"prompt": ["Hi"]}, "prompt"),
    ],
)
async def test_so_it_is_in_generate(in_memory, more, words):
    status, message = await error_of(in_memory, "/api/generate", GENERATE, **more)
    assert status == 400 and words in message


async def test_a_model_that_is_not_served_is_a_404_and_the_tag_latest_is_no_other(in_memory):
    status, message = await error_of(in_memory, "/api/chat", CHAT, model="llama3")
    assert status == 404 and "'llama3' not found" in message
    status, message = await error_of(in_memory, "/api/chat", {"messages": HI})
    assert status == 400 and "model" in message
    async with in_memory(ScriptedEngine()) as client:
        told = await plain(client, "/api/chat", CHAT, model="tiny:latest")
    assert told["model"] == "tiny:latest"


async def test_format_is_any_object_or_a_schema(in_memory):
    request = await request_of(in_memory, "/api/chat", CHAT, format="json")
    assert request.constraint == Constraint("json_object", "", "format")
    request = await request_of(in_memory, "/api/generate", GENERATE, format={"type": "integer"})
    assert request.constraint == Constraint("json_schema", '{"type":"integer"}', "format")


@pytest.mark.parametrize(
    ("think", "kwargs", "most"),
    [
        (True, {"enable_thinking": True}, None),
        (False, {"enable_thinking": False}, 0),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}, 2048),
    ],
)
async def test_think_is_told_to_the_template_and_limits_reasoning(in_memory, think, kwargs, most):
    for path, body in (("/api/chat", CHAT), ("/api/generate", GENERATE)):
        engine = thinking_engine(*ScriptedEngine().script)
        request = await request_of(in_memory, path, body, engine, think=think)
        assert request.prompt.template_kwargs == kwargs
        assert request.most_reasoning_tokens == most


async def test_results_belong_to_calls_that_had_no_id(in_memory):
    calls = [{"function": {"name": name, "arguments": {"at": name}}} for name in ("one", "two")]
    messages = [
        *HI,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_name": "two", "content": "2"},
        {"role": "tool", "content": "1"},
    ]
    request = await request_of(in_memory, "/api/chat", CHAT, messages=messages, tools=[TOOL])
    _, said, two, one = request.prompt.messages
    ids = [call["id"] for call in said["tool_calls"]]
    assert said["tool_calls"][0]["function"] == {"name": "one", "arguments": '{"at":"one"}'}
    assert said["reasoning_content"] == "Hm."
    assert (two["tool_call_id"], two["name"]) == (ids[1], "two")
    assert (one["tool_call_id"], one["name"]) == (ids[0], "one")
    assert request.prompt.schema_places == ("tools[0].function.parameters",)


async def test_an_answer_that_was_begun_goes_on(in_memory):
    messages = [*HI, {"role": "assistant", "content": "It is"}]
    request = await request_of(in_memory, "/api/chat", CHAT, messages=messages)
    assert request.prompt.is_begun


async def test_generate_is_a_chat_unless_it_is_raw_or_fills_in(in_memory):
    request = await request_of(in_memory, "/api/generate", GENERATE, system="Be brief.")
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.messages == [{"role": "system", "content": "Be brief."}, *HI]
    request = await request_of(in_memory, "/api/generate", GENERATE, raw=True)
    assert request.prompt == TextPrompt("Hi")
    request = await request_of(in_memory, "/api/generate", GENERATE, suffix="!")
    assert request.prompt == InfillPrompt("Hi", "!")
    base = ScriptedEngine()
    base.card = replace(base.card, takes_chats=False)
    assert (await request_of(in_memory, "/api/generate", GENERATE, base)).prompt == TextPrompt("Hi")


# What is served


async def test_a_model_that_fills_in_can_insert(in_memory):
    engine = ScriptedEngine()
    engine.card = replace(engine.card, fills_in=True)
    async with in_memory(engine) as client:
        shown = (await client.post("/api/show", json={"name": "tiny"})).json()
    assert shown["capabilities"] == ["completion", "insert"]


async def test_the_model_is_listed_shown_and_running(in_memory):
    async with in_memory(thinking_engine()) as client:
        [listed] = (await client.get("/api/tags")).json()["models"]
        [running] = (await client.get("/api/ps")).json()["models"]
        shown = (await client.post("/api/show", json={"model": "tiny"})).json()
        version = (await client.get("/api/version")).json()
    assert (listed["model"], listed["details"]["parameter_size"]) == ("tiny", "1.0M")
    assert len(listed["digest"]) == 64 and listed["modified_at"] == "2023-11-14T22:13:20Z"
    assert (running["size"], running["size_vram"], running["context_length"]) == (1 << 20, 0, 4096)
    assert shown["model_info"]["qwen3.context_length"] == 4096
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert tuple(map(int, version["version"].split("."))) >= (0, 6, 4)  # VS Code asks


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/pull"),
        ("POST", "/api/create"),
        ("DELETE", "/api/delete"),
        ("POST", "/api/embed"),
        ("POST", "/api/embeddings"),
    ],
)
async def test_what_one_model_cannot_do_says_so(in_memory, method, path):
    async with in_memory(ScriptedEngine()) as client:
        response = await client.request(method, path, json={"model": "tiny"})
    assert response.status_code == 400
    assert response.json()["error"].startswith(f"{path} is not served: this server ")


async def test_a_key_and_a_method_are_refused_in_its_form(in_memory):
    async with in_memory(ScriptedEngine(), ServerConfig(api_keys=("k",))) as client:
        response = await client.post("/api/chat", json=CHAT)
    assert response.status_code == 401 and isinstance(response.json()["error"], str)
