"""Qwen2.5-Coder-0.5B-Instruct, a K-quant mix: its numbers and ids beside transformers', and what it
is for. Skipped where `python -m tests.acceptance.fetch_models qwen2.5-coder-0.5b` has not been run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer
from tests.acceptance.fetch_models import MODELS
from tests.acceptance.quantised.texts import nfc_texts
from tests.children import url_of
from tests.gguf.real import as_transformers_runs_it
from tests.test_gguf_models import open_backend

FILE = MODELS["qwen2.5-coder-0.5b"].path
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILE.exists(), reason=f"{FILE} is not there: see fetch_models"),
]
DEADLINE_S = 900.0
NUM_ANSWER = 24
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CODE = [{"role": "user", "content": "Write a Python function that reverses a string."}]
ASKED = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
SCRIPTS = [
    "👩‍👩‍👧 🇫🇷 🧑🏽‍🚀 ok",
    "中文字符和标点。日本語のテキスト、한국어 문장",
    "def f(x: int) -> str:\n\treturn f'{x:>{10}}'  # ok\r\n\r\n",
    "x = 3.14159e-10; y[0x1F] <<= 12345678",
    "Ünïcödé ẞ ǅ नमस्ते שלום \u202e abc",
]


def test_ids_of_2000_texts_are_those_of_transformers():
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)
    ours = Tokenizer.load(FILE)
    for text in [*SCRIPTS, *nfc_texts(2000)]:
        assert ours.encode(text, special=False) == theirs.encode(text, add_special_tokens=False), (
            text
        )


def test_logits_along_an_answer_are_those_of_its_dequantised_numbers():
    tokenizer = Tokenizer.load(FILE)
    ids = tokenizer.encode(ChatTemplate.load(FILE).render(CODE))
    backend, found = open_backend(FILE, 3, 128), []
    logits = backend.prefill(0, 0, ids, project=True).flatten()
    for step in range(NUM_ANSWER):
        found.append(logits.clone())
        logits = backend.decode([0], [len(ids) + step], [int(logits.argmax())]).whole()[0]
    backend.close()
    answer = [int(row.argmax()) for row in found]
    with torch.inference_mode():
        expected = as_transformers_runs_it(FILE)(torch.tensor([ids + answer[:-1]])).logits[
            0, len(ids) - 1 :
        ]
    assert expected.argmax(-1).tolist() == answer
    assert (torch.stack(found) - expected).abs().max() < 1e-3
    assert "Python" in tokenizer.decode(answer)


@contextmanager
def server(cache_dir: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server over the directory, and where it listens; killed in the end."""
    command = [sys.executable, "-m", "luceasync", "serve", str(FILE), "--port", "0"]
    command += ["--dtype", "fp32", "--parallel", "1", "--kv-cache-min-tokens", "1", *flags]
    command += ["--kv-cache-dir", str(cache_dir)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        url = url_of(process)
        deadline = time.monotonic() + DEADLINE_S
        while httpx.get(f"{url}/ready", timeout=60).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        try:
            yield process, url
        finally:
            process.kill()
            process.communicate()


def body(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"messages": messages, "temperature": 0, "max_tokens": NUM_ANSWER, **fields}


def ask(url: str, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    answer = httpx.post(
        f"{url}/v1/chat/completions", json=body(messages, **fields), timeout=DEADLINE_S
    )
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def streamed(url: str, messages: list[dict[str, Any]]) -> str:
    """The content of a streamed answer."""
    pieces = []
    with httpx.stream(
        "POST",
        f"{url}/v1/chat/completions",
        json=body(messages, stream=True),
        timeout=DEADLINE_S,
    ) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    pieces.append(choice["delta"].get("content") or "")
    assert len(pieces) > 4, "an answer comes in pieces"
    return "".join(pieces)


def calls_of(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = answer["choices"][0]["message"].get("tool_calls") or []
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def cached(answer: dict[str, Any]) -> int:
    number: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


def test_it_calls_tools_streams_is_killed_and_goes_on_under_another_split(tmp_path: Path):
    forced = {"type": "function", "function": {"name": "get_weather"}}
    with server(tmp_path) as (process, url):
        said = streamed(url, CODE)
        call = ask(url, ASKED, tools=[WEATHER], tool_choice=forced, max_tokens=64)
        assert calls_of(call) == [("get_weather", {"city": "Paris"})]
        free = ask(url, ASKED, tools=[WEATHER], max_tokens=64)
        assert calls_of(free) == calls_of(call) and not free["choices"][0]["message"]["content"]
        deadline = time.monotonic() + DEADLINE_S
        while len(list(tmp_path.glob("*/*.safetensors"))) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.kill()
    split = ("--target-devices", "cpu:0,cpu:1,cpu:2")
    with server(tmp_path, *split) as (_, url):
        again = ask(url, CODE)
        assert text_of(again) == said
        assert cached(again) > 20
        assert calls_of(ask(url, ASKED, tools=[WEATHER], tool_choice=forced, max_tokens=64)) == (
            calls_of(call)
        )


def test_it_answers_with_an_eighth_of_its_context_on_the_device(tmp_path: Path):
    facts = [f"The code of room {room} is {room * 37 % 1000}." for room in range(50)]
    facts.insert(20, "The password of Anna is 'sunflower'.")
    question = "\n".join([*facts, "What is the password of Anna?"])
    with server(tmp_path, "--max-ctx", "4096", "--kvflash", "512") as (_, url):
        answer = ask(url, [{"role": "user", "content": question}])
    assert answer["usage"]["prompt_tokens"] > 512
    assert "sunflower" in text_of(answer)
