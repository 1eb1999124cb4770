"""`luceasync serve` as a user runs it: a process, a port, the bundled model, a client."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from luceasync.config import BUNDLED_MODEL_DIR
from tests.children import url_of

pytestmark = pytest.mark.slow

START_DEADLINE_S = 120.0
QUESTION = [{"role": "user", "content": "What does json.dumps do?"}]
GREEDY = {"model": "stdlib-15m", "messages": QUESTION, "temperature": 0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "luceasync", "serve", "--port", "0", "--dtype", "fp32"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        address = url_of(process)
        _wait_until_ready(address)
        try:
            yield address
        finally:
            process.terminate()
            process.communicate(timeout=START_DEADLINE_S)
    assert process.returncode == 0


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while httpx.get(f"{url}/ready").status_code != 200:
        assert time.monotonic() < deadline, "the model was not loaded in time"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def whole(client: openai.OpenAI) -> str:
    answer = client.chat.completions.create(**GREEDY, max_tokens=40)
    return answer.choices[0].message.content or ""


def test_the_answer_is_about_the_question(whole: str):
    assert whole.startswith("`json.dumps(obj, *, skipkeys=False")


def test_a_streamed_answer_is_the_plain_one(client: openai.OpenAI, whole: str):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**GREEDY, max_tokens=40, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 40
    # The plain answer's prompt was kept: nothing of it was run again.
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == chunks[-1].usage.prompt_tokens


def test_greedy_tokens_are_those_of_transformers(url: str):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL_DIR, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL_DIR)
    lines = (BUNDLED_MODEL_DIR / "eval.jsonl").read_text().splitlines()[:200:70]
    for messages in (json.loads(line)["messages"] for line in lines):
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        peer = model.generate(ids, max_new_tokens=32, do_sample=False)[0, ids.shape[1] :]
        body = {"messages": messages, "temperature": 0, "max_tokens": 32}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        text = tokenizer.decode(peer, skip_special_tokens=True)
        assert answer["choices"][0]["message"]["content"] == text
        assert answer["usage"]["completion_tokens"] == len(peer)


def test_stop(client: openai.OpenAI, whole: str):
    answer = client.chat.completions.create(**GREEDY, max_tokens=40, stop=["skipkeys"])
    assert answer.choices[0].message.content == whole[: whole.index("skipkeys")]
    assert answer.choices[0].finish_reason == "stop"


def test_seed_and_two_choices(client: openai.OpenAI):
    """Past the end of its answer the model is at a loss: hot samples differ."""
    sampled = GREEDY | {"temperature": 2.0, "seed": 3, "max_tokens": 130}
    beyond = {"extra_body": {"ignore_eos": True}}
    pair = client.chat.completions.create(**sampled, **beyond, n=2).choices
    single = client.chat.completions.create(**sampled, **beyond).choices
    assert [choice.index for choice in pair] == [0, 1]
    assert pair[0].message.content == single[0].message.content != pair[1].message.content


def test_logprobs(client: openai.OpenAI):
    answer = client.chat.completions.create(**GREEDY, max_tokens=5, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 5
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)


def test_a_prompt_that_is_too_long_is_refused_in_openais_words(client: openai.OpenAI):
    messages = [{"role": "user", "content": "json.dumps " * 5000}]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096") as refused:
        client.chat.completions.create(model="stdlib-15m", messages=messages)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_lane(url: str, stream: bool):
    body = GREEDY | {"ignore_eos": True, "stream": stream}
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=0.5) as response,
    ):
        for num_lines, _ in enumerate(response.iter_lines()):
            if num_lines > 5:
                raise httpx.ReadTimeout("seen enough")
    deadline = time.monotonic() + START_DEADLINE_S
    while "luceasync_running_lanes 0.0" not in httpx.get(f"{url}/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_answer_with_several_calls_is_found_again_in_every_api(url: str):
    """Whichever API sends it back: all but its last token, which was never computed."""
    name = {"type": "string", "maxLength": 20}
    schema = {"type": "object", "properties": {"name": name, "line": {"type": "integer"}}}
    schema |= {"required": ["name", "line"], "additionalProperties": False}
    function = {"name": "look_up", "parameters": schema}
    asked = [{"role": "user", "content": "How do I use itertools.chain?"}]
    tools = {"tools": [{"type": "function", "function": function}]}
    forced = {"tool_choice": "required", "min_tokens": 70, "max_tokens": 600, "temperature": 0}
    first = httpx.post(
        f"{url}/v1/chat/completions", json={"messages": asked, **tools, **forced}, timeout=60
    ).json()
    answer, usage = first["choices"][0]["message"], first["usage"]
    calls = [(call["id"], call["function"]["arguments"]) for call in answer["tool_calls"]]
    assert len(calls) > 1, "calls with something between them"
    results = [{"role": "tool", "tool_call_id": i, "content": "groups"} for i, _ in calls]
    chat = {"messages": [*asked, answer, *results], **tools, "max_tokens": 1}
    items = [
        {"type": "function_call", "call_id": i, "name": "look_up", "arguments": arguments}
        for i, arguments in calls
    ]
    outputs = [{"type": "function_call_output", "call_id": i, "output": "groups"} for i, _ in calls]
    responses = {
        "input": [*asked, *items, *outputs],
        "tools": [{"type": "function", **function}],
        "max_output_tokens": 1,
    }
    uses = [
        # Python's spacing of JSON is not the model's, nor is this order of keys.
        {"type": "tool_use", "id": i, "name": "look_up", "input": dict(reversed(pairs))}
        for i, arguments in calls
        for pairs in [list(json.loads(arguments).items())]
    ]
    found = [{"type": "tool_result", "tool_use_id": i, "content": "groups"} for i, _ in calls]
    messages = {
        "messages": [
            *asked,
            {"role": "assistant", "content": uses},
            {"role": "user", "content": found},
        ],
        "tools": [{"name": "look_up", "input_schema": schema}],
        "max_tokens": 1,
    }
    bodies = {"chat/completions": chat, "responses": responses, "messages": messages}
    for path, body in bodies.items():
        whole = {"model": "stdlib-15m", **body}
        said = httpx.post(f"{url}/v1/{path}", json=whole, timeout=60).json()["usage"]
        details = said.get("prompt_tokens_details") or said.get("input_tokens_details") or said
        cached = details.get("cached_tokens", details.get("cache_read_input_tokens"))
        assert cached >= usage["prompt_tokens"] + usage["completion_tokens"] - 1, path
