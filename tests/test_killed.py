"""A server that is killed with SIGKILL, and what the next one finds."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.engine.engine import LocalEngine
from tests.children import url_of
from tests.engines import Answer, running, user
from tests.engines import ask as asked

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0
NUM_TOKENS = 24
SYSTEM = {"role": "system", "content": "You explain functions of Python's library. " * 12}
QUESTIONS = ["What does json.dumps do?", "What does os.path.join do?"]


@contextmanager
def server(cache_dir: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server over the directory, and where it listens; killed in the end."""
    command = [sys.executable, "-m", "luceasync", "serve", "--port", "0", "--dtype", "fp32"]
    command += ["--kv-cache-dir", str(cache_dir), "--kv-cache-min-tokens", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        url = url_of(process)
        until(lambda: httpx.get(f"{url}/ready").status_code == 200, pause_s=0.1)
        try:
            yield process, url
        finally:
            process.kill()
            process.communicate()


def until(is_so: Callable[[], bool], *, pause_s: float = 0.002) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(pause_s)


def body(question: str, **fields: Any) -> dict[str, Any]:
    messages = [SYSTEM, {"role": "user", "content": question}]
    return {"messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS, **fields}


def ask(url: str, question: str) -> tuple[str, int]:
    """The answer, and how much of the prompt was cached."""
    answer = httpx.post(f"{url}/v1/chat/completions", json=body(question), timeout=60).json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], cached


def stream(url: str, question: str) -> str:
    """All of a streamed answer, as it came; the server is busy writing still."""
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body(question, stream=True), timeout=60
    ) as response:
        return "".join(response.iter_text())


async def answer(engine: LocalEngine, question: str) -> Answer:
    return await asked(engine, [SYSTEM, *user(question)], NUM_TOKENS, ignore_eos=False)


def files(cache_dir: Path, pattern: str) -> list[Path]:
    return list(cache_dir.glob(f"*/{pattern}"))


@pytest.fixture(scope="module")
def cold() -> dict[str, str]:
    """What is said where nothing is kept."""

    async def said() -> dict[str, str]:
        async with running(BUNDLED_MODEL_DIR, memory_bytes=0) as engine:
            return {q: (await answer(engine, q)).text for q in QUESTIONS}

    return asyncio.run(said())


async def test_a_kill_amid_a_write_leaves_a_miss_and_what_was_written_is_taken_up(cold, tmp_path):
    with server(tmp_path) as (process, url):
        assert ask(url, QUESTIONS[0])[0] == cold[QUESTIONS[0]]
        until(lambda: len(files(tmp_path, "*.safetensors")) >= 3)  # system, prompt and answer
        num_files = len(files(tmp_path, "*.safetensors"))
        assert "[DONE]" in stream(url, QUESTIONS[1])
        until(
            lambda: (
                bool(files(tmp_path, ".*.tmp")) or len(files(tmp_path, "*.safetensors")) > num_files
            )
        )
        process.kill()
    temporary = next(tmp_path.glob("*/quarantine")).with_name(f".{'ab' * 32}.{process.pid}.01.tmp")
    temporary.write_bytes(b"the beginning of a node")  # where the kill came too late to leave one
    async with running(BUNDLED_MODEL_DIR, tmp_path) as engine:
        assert not files(tmp_path, ".*.tmp")
        for question in QUESTIONS:
            told = await answer(engine, question)
            assert told.text == cold[question]
            assert told.num_cached > 100  # at least the system prompt
            assert told.finish.restore.tier == "disk"
        assert not files(tmp_path, "quarantine/*")
