"""Fields that clients of other servers send: served, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from luceasync.request import Delta, ReasoningPiece, TextPiece
from tests.server.scripted import ScriptedEngine, answer, finish

CHAT = "/v1/chat/completions"
HI = {"role": "user", "content": "Hi"}
THOUGHT = [
    Delta(0, (ReasoningPiece("hm"),), (1, 2)),
    Delta(0, (), (3,)),
    Delta(0, (ReasoningPiece("m"), TextPiece("So")), (4,)),
    Delta(0, (TextPiece("."),), (5,), finish=finish("stop", 5, stop="END")),
]


async def ask(in_memory, engine: ScriptedEngine, **fields: Any) -> dict[str, Any]:
    async with in_memory(engine) as client:
        response = await client.post(CHAT, json={"messages": [HI], **fields})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"think": False},
        {"thinking": {"type": "disabled"}},
        {"thinking": False},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False}},
        {"think": "none"},
        {"reasoning_effort": "none"},
    ],
)
async def test_thinking_is_switched_off_under_every_name(in_memory, fields):
    engine = ScriptedEngine()
    await ask(in_memory, engine, **fields)
    [asked] = engine.requests
    assert asked.prompt.template_kwargs["enable_thinking"] is False
    assert asked.most_reasoning_tokens == 0


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"enable_thinking": True}, None),
        ({"think": True}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
        ({"reasoning": {"enabled": True, "max_tokens": 9}}, 9),
    ],
)
async def test_thinking_is_switched_on_under_every_name(in_memory, fields, most):
    engine = ScriptedEngine()
    await ask(in_memory, engine, **fields)
    [asked] = engine.requests
    assert asked.prompt.template_kwargs == {"enable_thinking": True}
    assert asked.most_reasoning_tokens == most


async def test_an_effort_may_stand_in_think_or_reasoning(in_memory):
    for fields in ({"think": "low"}, {"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}):
        engine = ScriptedEngine()
        await ask(in_memory, engine, **fields)
        assert engine.requests[0].most_reasoning_tokens == 2048
        assert engine.requests[0].prompt.template_kwargs == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"think": "much"}, "think"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"n_predict": -2}, "n_predict"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ],
)
async def test_a_wrong_value_is_named(in_memory, fields, param):
    async with in_memory(ScriptedEngine()) as client:
        response = await client.post(CHAT, json={"messages": [HI], **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
async def test_reasoning_that_is_not_wanted_is_counted_but_not_sent(in_memory, fields):
    told = await ask(in_memory, ScriptedEngine(THOUGHT), **fields)
    [choice] = told["choices"]
    assert choice["message"] == {"role": "assistant", "content": "So.", "refusal": None}
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


async def test_reasoning_tokens_are_counted(in_memory):
    told = await ask(in_memory, ScriptedEngine(THOUGHT))
    assert told["choices"][0]["message"]["reasoning_content"] == "hmm"
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


async def test_the_stop_string_is_part_of_the_answer_if_asked_for(in_memory):
    told = await ask(in_memory, ScriptedEngine(THOUGHT), include_stop_str_in_output=True)
    assert told["choices"][0]["message"]["content"] == "So.END"
    script = [*answer("a")[:-1], Delta(0, finish=finish("stop", 1, stop="END"))]
    async with in_memory(ScriptedEngine(script)) as client:
        body = {"prompt": "x", "stop": "END", "include_stop_str_in_output": True}
        told = (await client.post("/v1/completions", json=body)).json()
    assert told["choices"][0]["text"] == "aEND"


async def test_names_of_llama_cpp_mean_the_same(in_memory):
    engine = ScriptedEngine()
    fields = {"repeat_penalty": 1.5, "n_predict": 7, "stop_token_ids": [5, 6], "top_p": 0}
    await ask(in_memory, engine, **fields)
    [asked] = engine.requests
    assert asked.sampling.repetition_penalty == 1.5
    assert (asked.max_tokens, asked.stop_token_ids) == (7, (5, 6))
    assert 0 < asked.sampling.top_p < 1e-6


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
async def test_minus_one_is_no_limit(in_memory, name):
    engine = ScriptedEngine()
    await ask(in_memory, engine, **{name: -1})
    assert engine.requests[0].max_tokens is None


async def test_a_completion_without_limit(in_memory):
    engine = ScriptedEngine()
    async with in_memory(engine) as client:
        for fields in ({"max_tokens": -1}, {}, {"n_predict": 3}):
            await client.post("/v1/completions", json={"prompt": "x", **fields})
    assert [request.max_tokens for request in engine.requests] == [None, 16, 3]


async def test_an_answer_that_was_begun_is_continued(in_memory):
    engine = ScriptedEngine()
    begun = [HI, {"role": "assistant", "content": "Once"}]
    await ask(in_memory, engine, messages=begun, continue_final_message=True)
    await ask(in_memory, engine, messages=begun)
    assert [request.prompt.is_begun for request in engine.requests] == [True, False]


async def test_a_result_without_text_and_sixteen_stops_are_taken(in_memory):
    engine = ScriptedEngine()
    result = {"role": "tool", "tool_call_id": "c", "content": None}
    await ask(in_memory, engine, messages=[HI, result], stop=[str(i) for i in range(16)])
    assert engine.requests[0].prompt.messages[1]["content"] == ""
    assert len(engine.requests[0].stop) == 16


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
async def test_a_messages_reasoning_may_have_any_of_its_names(in_memory, name):
    engine = ScriptedEngine()
    await ask(in_memory, engine, messages=[HI, {"role": "assistant", name: "hm"}, HI])
    message = engine.requests[0].prompt.messages[1]
    assert message == {"role": "assistant", "content": "", "reasoning_content": "hm"}


async def test_templates_get_a_description_and_a_schema_of_every_tool(in_memory):
    engine = ScriptedEngine()
    functions = [
        {"name": "f"},
        {"name": "g", "description": None, "parameters": None, "strict": True},
        {"name": "h", "description": "d", "parameters": {"type": "object"}},
    ]
    await ask(in_memory, engine, tools=[{"type": "function", "function": f} for f in functions])
    empty = {"type": "object", "properties": {}}
    assert [tool["function"] for tool in engine.requests[0].prompt.tools] == [
        {"name": "f", "description": "", "parameters": empty},
        {"name": "g", "description": "", "parameters": empty, "strict": True},
        {"name": "h", "description": "d", "parameters": empty},
    ]


async def test_a_compressed_body_is_a_415(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        for route in (CHAT, "/v1/messages"):
            for encoding, body in (("", b"\x1f\x8b\x08rest"), ("gzip", b"{}"), ("zstd", b"{}")):
                headers = {"content-encoding": encoding} if encoding else {}
                response = await client.post(route, content=body, headers=headers)
                assert response.status_code == 415
                assert "compressed" in response.text
            plain = await client.post(
                route, content=b"{}", headers={"content-encoding": "identity"}
            )
            assert plain.status_code == 400


async def test_completions_have_at_most_five_log_probabilities(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        for number, status in ((5, 200), (6, 400)):
            body = {"prompt": "x", "logprobs": number}
            assert (await client.post("/v1/completions", json=body)).status_code == status
