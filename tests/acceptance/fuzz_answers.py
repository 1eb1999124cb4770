"""Answers of every format of calls, whole and broken at random, through every API.

Every API tells the same, streamed or not; arguments of calls are JSON objects; nothing that was
written is lost; the answer can be sent back, and the next prompt has all of it; OpenAI's and
Anthropic's own types take every answer and event. Texts of `--model` are said by a real one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from luceasync.config import Config, EngineConfig, ModelConfig
from luceasync.engine.start import build_engine
from luceasync.server.app import create_app
from luceasync.server_config import ServerConfig
from luceasync.text.answer.pieces import THINK
from tests import crafted
from tests.acceptance.answers.cases import CUSTOM, Case, Seen, Wrong, a_case, words_of
from tests.acceptance.answers.clients import (
    OLLAMA,
    READERS,
    RESPONSES,
    body_of,
    events_of,
    next_body,
)
from tests.acceptance.answers.saying import SayingEngine
from tests.acceptance.fuzz_requests import post
from tests.text.answer.written import TOOL, WRITERS

MODEL_FORMATS = ["qwen-json", "qwen-xml", "glm-xml", "mistral", "pythonic", "kimi-k2"]
PLAIN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}<|im_start|>assistant\n"
)
NUM_TOLD = 20
TOLD_EVERY = 500


async def asked(app: ASGIApp, path: str, body: dict[str, Any]) -> bytes:
    status, raw = await post(app, json.dumps(body).encode(), path)
    if status != 200:
        raise Wrong(f"{path}: {status} {raw[:300]!r}")
    return raw


async def check(app: ASGIApp, engine: SayingEngine | None, case: Case, asks: str = "x") -> Seen:
    """Ask every API, and compare what clients see. Raises Wrong. `engine`: whose prompts are
    looked at; `asks`: what gets the answer.
    """
    first: Seen | None = None
    for path, (plain, streamed) in READERS.items():
        if path == RESPONSES and case.stop:
            continue  # it has no stop strings
        if path == OLLAMA and case.has_tools and not case.is_parallel:
            continue  # it cannot ask for one call
        body = body_of(path, case, asks)
        answer = json.loads(await asked(app, path, body))
        seen = plain(answer)
        events = events_of(await asked(app, path, {**body, "stream": True}))
        if (told := streamed(events)) != seen:
            raise Wrong(f"{path}: streamed {told}, plain {seen}")
        first = first or seen
        if (path != RESPONSES and seen != first) or seen[:3] != first[:3]:
            raise Wrong(f"{path}: {seen}, and the first {first}")
        await asked(app, path, next_body(path, body, answer))
        if engine is not None:
            _check_prompt(path, engine.prompt, seen)
    assert first is not None
    _check_whole(case, first)
    return first


def _check_whole(case: Case, seen: Seen) -> None:
    """Nothing that was written is lost."""
    if (seen.finish == "tool_calls" and not seen.calls) or (seen.calls and seen.finish == "stop"):
        raise Wrong(f"finish {seen.finish} with {len(seen.calls)} calls")
    if not case.is_parallel and len(seen.calls) > 1:
        raise Wrong("several calls where one was asked for")
    if not case.has_tools and seen.calls:
        raise Wrong("calls without tools")
    if case.stop is None and case.max_tokens is None and not case.odd_bytes:
        said = seen.reasoning + seen.content + json.dumps(seen.calls)
        if lost := [word for word in case.words if word not in said]:
            raise Wrong(f"lost: {lost}")


def _check_prompt(path: str, prompt: str, seen: Seen) -> None:
    """The next prompt has what was said."""
    said = {word for word in seen.content.split() if word.startswith("word") and word.isalnum()}
    if lost := [word for word in said if word not in prompt]:
        raise Wrong(f"{path}: the next prompt lacks {lost}")
    if prompt.count(TOOL) + prompt.count(CUSTOM) < len(seen.calls):
        raise Wrong(f"{path}: the next prompt lacks calls")


async def fuzz(
    num_texts: int, seed: int, names: Sequence[str], told_every: int = 0
) -> tuple[Counter[str], list[str]]:
    """What the answers had, by kind, and what was wrong."""
    found, wrong = Counter[str](), list[str]()
    for name in names:
        rng = random.Random(f"{seed} {name}")
        for number in range(-(-num_texts // len(names))):
            if number % 50 == 0:
                words = words_of(name, rng)
                engine = SayingEngine(name, words)
                app = create_app(engine, ServerConfig())
            case = a_case(name, words, rng)
            engine.say(case, rng)
            try:
                seen = await check(app, engine, case)
            except Exception as error:  # of any kind: it is told with its text
                wrong.append(f"{name} {words.begin!r} {case}: {error!r}")
                if len(wrong) <= NUM_TOLD:
                    print(wrong[-1], flush=True)
                continue
            found += _kinds(case, seen)
            if told_every and found["answers"] % told_every == 0:
                told = f"{found['answers']} answers, {len(wrong)} wrong"
                print(told, file=sys.stderr, flush=True)
    return found, wrong


def _kinds(case: Case, seen: Seen) -> Counter[str]:
    """What the answer had."""
    kinds = {
        "answers": 1,
        "with calls": bool(seen.calls),
        "calls": len(seen.calls),
        "calls of a custom tool": sum(n == CUSTOM for n, _ in seen.calls) if case.custom else 0,
        "with reasoning": bool(seen.reasoning),
        "with text": bool(seen.content),
        "cut by max_tokens": seen.finish == "length",
        "with a stop string": case.stop is not None,
        "of invalid UTF-8": case.odd_bytes,
    }
    return Counter({kind: int(count) for kind, count in kinds.items()})


async def fuzz_model(num_texts: int, seed: int, names: Sequence[str]) -> tuple[int, list[str]]:
    """The same through a whole engine, whose model says each text: how many, and what was wrong."""
    num_said, wrong = 0, list[str]()
    for name in names if num_texts else ():
        rng, cases = random.Random(f"{seed} model {name}"), dict[str, Case]()
        while len(cases) < -(-num_texts // len(names)):
            case = replace(a_case(name, THINK, rng), is_opened=False, odd_bytes=False)
            if case.custom:  # no grammar, which would change what the model says
                case = replace(case, custom="text")
            cases[f"c{len(cases):02}"] = case
        with tempfile.TemporaryDirectory() as directory:
            texts = {key: f"{key}: {case.text}" for key, case in cases.items()}
            model = crafted.save(Path(directory), texts, PLAIN_TEMPLATE)
            config = Config(
                model=ModelConfig(model_dir=model, dtype="fp32", names=("tiny",), tool_format=name),  # type: ignore[arg-type]
                engine=EngineConfig(max_ctx_tokens=4096, parallel=2),
            )
            async with build_engine(config) as engine:
                await engine.load()
                app = create_app(engine, ServerConfig())
                for key, case in cases.items():
                    try:
                        await check(app, None, replace(case, text=texts[key]), f"~{key}")
                    except Exception as error:  # as above
                        wrong.append(f"model, {name} {case}: {error!r}")
                        print(wrong[-1], flush=True)
                    num_said += 1
    return num_said, wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=int, default=60, metavar="N")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=sorted(WRITERS))
    options = parser.parse_args()
    begin = time.perf_counter()
    found, wrong = asyncio.run(fuzz(options.texts, options.seed, options.formats, TOLD_EVERY))
    num_said, of_model = asyncio.run(fuzz_model(options.model, options.seed, MODEL_FORMATS))
    wrong += of_model
    for kind, count in [*found.items(), ("said by a model", num_said)]:
        print(f"{kind:22}{count:8}")
    print(f"{len(wrong)} answers were wrong, in {time.perf_counter() - begin:.0f} s")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
