"""Editors ask for text in llama.cpp's form, and are answered in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from luceasync.errors import RequestError
from luceasync.request import Delta, InfillPrompt, Restore, TextPrompt, TokenPrompt
from tests.deltas import text_delta
from tests.server.scripted import TIMINGS, ScriptedEngine, answer, finish

INFILL = {"input_prefix": "def f():\n", "input_suffix": "\n"}
# What each client sends; its own values in the fields that are read.
VSCODE = {
    "id_slot": 0, "input_prefix": "def f():\n", "input_suffix": "\n", "input_extra": [],
    "prompt": "    ret", "n_predict": 128, "n_cmpl": 3, "top_k": 40, "top_p": 0.99,
    "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True,
    "n_indent": 4, "t_max_prompt_ms": 500, "t_max_predict_ms": 2500,
}  # fmt: skip
VSCODE_WARM = {
    "id_slot": 0, "input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0,
    "input_extra": [{"text": "a = 1\n", "time": 1764215000000, "filename": "a.py"}],
    "samplers": [], "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1,
}  # fmt: skip
VIM = {
    "input_prefix": "def f():\n", "input_suffix": "\n", "prompt": "    ret", "n_predict": 256,
    "input_extra": [{"text": "a = 1\n", "time": [3, 5], "filename": "a.py"}], "n_indent": 4,
    "top_k": 40, "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1500,
    "response_fields": [
        "content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms",
        "timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms",
        "timings/predicted_per_token_ms", "timings/predicted_per_second", "truncated",
        "tokens_cached",
    ],
}  # fmt: skip
CONTINUE = {
    "prompt": "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>", "stream": True, "n_predict": 4096,
    "stop": ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "\n\n"], "temperature": 0.01,
}  # fmt: skip
ZED = {
    "model": "tiny", "prompt": "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>", "max_tokens": 512,
    "stop": ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"],
}  # fmt: skip


async def asked(in_memory, path: str, body: dict[str, Any], engine: ScriptedEngine) -> Any:
    async with in_memory(engine) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_llama_vscode_gets_alternatives(in_memory):
    engine = ScriptedEngine([*answer("urn 1"), *answer("urn 2", index=1), *answer("", index=2)])
    told = await asked(in_memory, "/infill", VSCODE, engine)
    assert [each["content"] for each in told] == ["urn 1", "urn 2", ""]
    assert all(each["generation_settings"]["n_ctx"] == 4096 for each in told)
    [request] = engine.requests
    assert request.prompt == InfillPrompt(
        "def f():\n", "\n", "    ret", param="input_prefix", after_param="input_suffix"
    )
    assert (request.num_choices, request.max_tokens, request.least_indent) == (3, 128, 4)
    assert (request.sampling.temperature, request.sampling.min_p) == (1.0, 0.2)


async def test_llama_vscode_warms_the_cache_with_other_files(in_memory):
    engine = ScriptedEngine(answer(reason="length"))
    assert (await asked(in_memory, "/infill", VSCODE_WARM, engine))["content"] == ""
    [request] = engine.requests
    assert request.prompt.files == (("a.py", "a = 1\n"),)
    assert (request.max_tokens, request.keep_prefix) == (0, True)


async def test_llama_vim_gets_the_fields_that_it_names(in_memory):
    engine = ScriptedEngine(answer("urn ", "1"))
    told = await asked(in_memory, "/infill", VIM, engine)
    assert set(told) == set(VIM["response_fields"])
    assert (told["content"], told["truncated"], told["tokens_cached"]) == ("urn 1", False, 4)
    assert told["timings/prompt_n"] == TIMINGS.num_prefilled
    assert engine.requests[0].sampling.temperature == 0.0
    none = await asked(in_memory, "/infill", VIM | {"response_fields": [""]}, ScriptedEngine())
    assert none == {}


async def test_continue_reads_a_stream(in_memory):
    engine = ScriptedEngine(answer("x", "\n"))
    async with in_memory(engine) as client:
        response = await client.post("/completion", json=CONTINUE)
    events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data")]
    assert [(each["content"], each["stop"]) for each in events] == [
        ("x", False),
        ("\n", False),
        ("", True),
    ]
    last = events[-1]
    assert (last["stop_type"], last["has_new_line"], last["tokens_predicted"]) == ("eos", True, 2)
    [request] = engine.requests
    assert request.prompt == TextPrompt(CONTINUE["prompt"]) and request.stop[-1] == "\n\n"


async def test_zed_gets_a_completion(in_memory):
    told = await asked(in_memory, "/v1/completions", ZED, ScriptedEngine(answer("x")))
    assert told["choices"][0]["text"] == "x" and told["id"]


async def test_without_other_values_completions_have_llama_cpps(in_memory):
    engine = ScriptedEngine()
    for body in ({"prompt": [1, 2]}, {"prompt": "a", "temperature": 0, "n_predict": -1}):
        await asked(in_memory, "/completion", body, engine)
    first, second = engine.requests
    assert first.prompt == TokenPrompt((1, 2)) and first.max_tokens is second.max_tokens is None
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (
        0.8,
        40,
        0.95,
        0.05,
    )
    assert second.sampling.temperature == 0


@pytest.mark.parametrize(
    ("ending", "kind", "word"),
    [
        (finish("length"), "limit", ""),
        (finish("stop"), "eos", ""),
        (finish("stop", stop="}"), "word", "}"),
        (finish("stop", stop="\n"), "limit", ""),  # a line that is indented too little
    ],
)
async def test_it_says_why_it_ended(in_memory, ending: Any, kind: str, word: str):
    script = [text_delta(0, "x", (1,)), Delta(0, finish=ending)]
    told = await asked(in_memory, "/infill", INFILL | {"stop": ["}"]}, ScriptedEngine(script))
    assert (told["content"], told["stop_type"], told["stopping_word"]) == ("x", kind, word)


async def test_what_was_restored_is_stated(in_memory):
    restored = finish(restore=Restore("disk", 4, 0.01))
    engine = ScriptedEngine([Delta(0, finish=restored)])
    told = await asked(in_memory, "/infill", INFILL, engine)
    assert told["tokens_evaluated"] == 10
    assert told["tokens_cached"] == told["timings"]["cache_n"] == 4
    assert told["luceasync"]["tier"] == "disk"


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/infill", {"input_prefix": None}, "input_prefix"),
        ("/infill", {"input_suffix": 1}, "input_suffix"),
        ("/infill", {"input_extra": {}}, "input_extra"),
        ("/infill", {"input_extra": [{"filename": "a"}]}, "input_extra[0]"),
        ("/infill", {"input_extra": [{"filename": 1, "text": "a"}]}, "input_extra[0].filename"),
        ("/infill", {"prompt": ["a"]}, "prompt"),
        ("/infill", {"n_cmpl": 17}, "n_cmpl"),
        ("/infill", {"n_cmpl": 2, "n": 3}, "n"),
        ("/infill", {"n_predict": -2}, "n_predict"),
        ("/infill", {"n_indent": -1}, "n_indent"),
        ("/infill", {"n_probs": 2}, "n_probs"),
        ("/infill", {"lora": [{"id": 0, "scale": 0.5}]}, "lora"),
        ("/infill", {"model": "other"}, "model"),
        ("/completion", {"prompt": ["a", 1]}, "prompt"),
        ("/completion", {"mirostat": 2, "prompt": "a"}, "mirostat"),
    ],
)
async def test_a_wrong_field_is_named(in_memory, path: str, change: dict[str, Any], param: str):
    async with in_memory(ScriptedEngine()) as client:
        response = await client.post(path, json=INFILL | change)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"].startswith(param), response.text


async def test_a_failure_is_no_answer(in_memory):
    script = [text_delta(0, "x", (1,)), Delta(0, finish=finish("error", error="It broke."))]
    async with in_memory(ScriptedEngine(script)) as client:
        plain = await client.post("/infill", json=INFILL)
        streamed = await client.post("/infill", json=INFILL | {"stream": True})
    assert plain.status_code == 500
    assert '"error"' in streamed.text and '"stop":true' not in streamed.text


async def test_a_model_without_the_tokens_is_told_of(in_memory):
    refusal = RequestError("input_suffix: the model only continues text", param="input_suffix")
    async with in_memory(ScriptedEngine(opening=refusal)) as client:
        response = await client.post("/infill", json=INFILL)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input_suffix"
