"""Answers of every format of calls, whole and broken at random, through every API.

    python -m tests.acceptance.fuzz_answers [--texts 10000] [--seed 0] [--formats harmony,...]
        [--model 60]

All but the model is the server's own: routes, prompts, tokens, stop strings, parsers and events.
`--model N`: as many texts are also said by a real model (tests/crafted.py) in a whole engine.
For each text: every API tells the same, streamed or not; arguments of calls are JSON objects;
nothing that was written is lost; the answer can be sent back, and the next prompt has all of it;
OpenAI's and Anthropic's own types take every answer and event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.types import ASGIApp
from tokenizers import decoders, models, pre_tokenizers, trainers

from luceasync.config import Config, EngineConfig, ModelConfig, ServerConfig
from luceasync.engine.prepare import prepare
from luceasync.engine.prompts import Language, Prompts
from luceasync.engine.sequence import Generation
from luceasync.engine.start import build_engine
from luceasync.errors import TemplateRefusal
from luceasync.prefix_cache.tenants import Tenants
from luceasync.request import ChatPrompt, Delta, ModelCard, Request
from luceasync.server.app import create_app
from luceasync.text.answer.answer_format import REASONING_WORDS, AnswerFormat
from luceasync.text.answer.call_formats import FORMATS
from luceasync.text.answer.pieces import THINK, ReasoningWords
from luceasync.text.history import History
from luceasync.text.past_calls import with_parsed_arguments
from luceasync.text.prompt import RenderedPrompt
from luceasync.text.roles import Roles
from luceasync.text.template import TurnBoundaries
from luceasync.text.tokenizer import Tokenizer
from tests import crafted
from tests.acceptance.fuzz_requests import post
from tests.server.scripted import ScriptedEngine, ScriptedStream
from tests.text.answer.written import (
    IN_CHANNELS,
    SCHEMA,
    TOOL,
    WRITERS,
    Call,
    a_call,
    a_string,
)

MAX_CTX_TOKENS = 1 << 16
START, END = "<|im_start|>", "<|im_end|>"
CHANNEL_WORDS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
STOP = "STOP here"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TOOLS = {
    CHAT: [{"type": "function", "function": {"name": TOOL, "parameters": SCHEMA}}],
    MESSAGES: [{"name": TOOL, "input_schema": SCHEMA}],
    RESPONSES: [{"type": "function", "name": TOOL, "parameters": SCHEMA}],
}
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
MODEL_FORMATS = ["qwen-json", "qwen-xml", "glm-xml", "mistral", "pythonic", "kimi-k2"]
PLAIN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}<|im_start|>assistant\n"
)
NUM_TOLD = 20
TOLD_EVERY = 500


class Wrong(Exception):
    """What an answer should not be."""


class Seen(NamedTuple):
    """What a client sees of an answer; a call is its name and arguments."""

    reasoning: str
    content: str
    calls: list[tuple[str, dict[str, Any]]]
    finish: str  # in OpenAI's words


@dataclass(frozen=True)
class Case:
    """`text`: what the model writes, of which `words` are outside of calls; the prompt has opened
    reasoning if it `is_opened`.
    """

    text: str
    words: tuple[str, ...]
    is_opened: bool
    has_tools: bool
    is_parallel: bool
    stop: str | None
    max_tokens: int | None
    odd_bytes: bool


class FormatTemplate:
    """A chat template in Python, which writes calls in one format and reasoning between words."""

    def __init__(self, name: str, words: ReasoningWords) -> None:
        self._write = WRITERS[name]
        self._words = words
        self._in_channels = name in IN_CHANNELS
        self.opens = False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """As ChatTemplate.render."""
        turns = [f"{START}system\n{json.dumps(tools)}{END}\n"] if tools else []
        for message in with_parsed_arguments(messages):
            parts = [START, str(message["role"]), "" if self._in_channels else "\n"]
            if thought := message.get("reasoning_content"):
                parts += [self._words.begin, thought, self._words.end, self._words.after]
            if message.get("content") or not message.get("tool_calls"):
                parts += [self._words.lead, str(message.get("content") or "")]
            for call in message.get("tool_calls") or ():
                function = call["function"]
                if not isinstance(function["arguments"], dict):
                    raise TemplateRefusal("Arguments are an object.")
                parts.append(self._write(Call(function["name"], function["arguments"])))
            turns += [*parts, END, "\n"]
        if add_generation_prompt:
            turns.append(f"{START}assistant" + ("" if self._in_channels else "\n"))
            turns.append(self._words.begin if self.opens else "")
        return "".join(turns)


@cache
def a_tokenizer() -> Tokenizer:
    """Some bytes a token, and a few control tokens, which formats are written with."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([write(a_call(rng)) for write in WRITERS.values()], trainer)
    special = [START, END, *CHANNEL_WORDS, "[THINK]", "[/THINK]", "<|tool_call|>", "[TOOL_CALLS]"]
    backend.add_special_tokens(special)
    backend.add_tokens(["<tool_call>", "</tool_call>"])
    end = backend.token_to_id(END)
    assert end is not None
    return Tokenizer(backend.to_str(), [end])


class SayingEngine(ScriptedEngine):
    """Says a text where a real engine would ask its model."""

    def __init__(self, name: str, words: ReasoningWords) -> None:
        super().__init__()
        tokenizer, self.template = a_tokenizer(), FormatTemplate(name, words)
        self.card = ModelCard("tiny", 0, MAX_CTX_TOKENS, 1, "qwen3")
        answers = AnswerFormat.of(self.template, tokenizer)
        if answers.calls is not FORMATS[name] or not answers.reasons:
            raise Wrong(f"the template of {name} is read as {answers}")
        self.language = Language(
            self.card,
            tokenizer,
            self.template,
            tokenizer.vocab_size,
            1,
            answers=answers,
            roles=Roles.of(self.template),
            turns=TurnBoundaries.of(self.template, tokenizer),
        )
        self._prompts = Prompts(self.language, Tenants(lambda: History(tokenizer)))
        self.ids: list[int] = []
        self.prompt = ""
        self._rng = random.Random(0)
        self._said: dict[object, list[Delta]] = {}  # by request

    def say(self, case: Case, rng: random.Random) -> None:
        """Answer all requests with the text of `case` from now on."""
        self.template.opens = case.is_opened
        self._said.clear()
        self.ids = self.language.tokenizer.encode(case.text)
        if case.odd_bytes:  # which are no UTF-8
            place = rng.randrange(len(self.ids) + 1)
            byte = self.language.tokenizer.encode("é")[0]
            self.ids[place:place] = [byte]

    async def open(self, request: Request) -> ScriptedStream:
        prompt = self._prompts.render(request)
        self.prompt = prompt.text or ""
        assert isinstance(request.prompt, ChatPrompt), "there are only chats"
        is_first = len(request.prompt.messages) == 1
        asked = (is_first, request.stop, request.max_tokens, request.prompt.max_calls)
        if asked not in self._said:
            said = self.ids if is_first else self.language.tokenizer.encode("I see.")
            self._said[asked] = self._deltas(request, prompt, said)
        return ScriptedStream(self._said[asked])

    def _deltas(self, request: Request, prompt: RenderedPrompt, ids: Sequence[int]) -> list[Delta]:
        """The answer as the engine tells it; its history learns it."""
        [prepared] = prepare(self.language, request, prompt, 0)
        generation = Generation(prepared)
        deltas: list[Delta | None] = []
        [end] = self.language.tokenizer.eos_ids
        spoken = array("i")
        for token in [*ids, end]:
            spoken.append(token)
            if not generation.append(token, None):
                break
            if self._rng.random() < 0.15:
                deltas.append(generation.shown())
        deltas.append(generation.shown())
        prompt.tenant.history.remember(self.prompt, prompt.ids, spoken)
        return [delta for delta in deltas if delta is not None]


def words_of(name: str, rng: random.Random) -> ReasoningWords:
    """Words around reasoning for a format; those of channels belong to their format."""
    rows = [row for row in REASONING_WORDS if row.has_channels == (name in IN_CHANNELS)]
    return rng.choice([row for row in rows if not row.answer_end])


def a_case(name: str, words: ReasoningWords, rng: random.Random) -> Case:
    """An answer with numbered words between thoughts, calls, parts of calls, tags and odd text."""
    written: list[str] = []
    kept: list[str] = []

    def word() -> str:
        kept.append(f"word{len(kept)}x")
        return f"\n{kept[-1]}\n"

    has_channels = words.has_channels
    is_opened = rng.random() < 0.3
    if is_opened or rng.random() < 0.4:
        written += ["" if is_opened else words.begin, word()]
        written += rng.choice([[words.end, words.after], [words.end, words.after], [words.end], []])
    if has_channels and rng.random() < 0.9:
        written.append(words.lead)
    for _ in range(rng.randrange(5)):
        call = WRITERS[name](a_call(rng))
        place = rng.randrange(len(call))
        broken = rng.choice([call[:place], call[place:], call[:place] + call[place + 1 :]])
        odd = rng.choice([words.end, words.begin, "{", "[", '"', "é😀", "\n\n", "<tool_call>", " "])
        written.append(rng.choice([call, call, call, broken, odd, a_string(rng)]))
        if rng.random() < 0.7:
            written.append(word())
    stop = STOP if rng.random() < 0.1 else None
    if stop:
        written.insert(rng.randrange(len(written) + 1), rng.choice([STOP, STOP, STOP[:6]]))
    text = "".join(written)
    return Case(
        text,
        tuple(kept),
        is_opened,
        has_tools=rng.random() < 0.9,
        is_parallel=rng.random() < 0.85,
        stop=stop,
        max_tokens=rng.randrange(1, len(text) + 2) if rng.random() < 0.15 else None,
        odd_bytes=rng.random() < 0.05,
    )


# What is asked, and what clients see of the answers


def body_of(path: str, case: Case, asks: str) -> dict[str, Any]:
    """A request that gets the answer of `case`."""
    most = case.max_tokens or MAX_CTX_TOKENS // 2
    body: dict[str, Any] = {"model": "tiny", "temperature": 0}
    if case.has_tools:
        body["tools"] = TOOLS[path]
    if path == CHAT:
        body |= {"messages": [{"role": "user", "content": asks}], "max_tokens": most}
        body |= {"stop": case.stop, "parallel_tool_calls": case.is_parallel}
    elif path == MESSAGES:
        body |= {"messages": [{"role": "user", "content": asks}], "max_tokens": most}
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        body |= {"stop_sequences": [case.stop]} if case.stop else {}
        if case.has_tools and not case.is_parallel:
            body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    else:
        body |= {"input": [{"role": "user", "content": asks}], "max_output_tokens": most}
        body["parallel_tool_calls"] = case.is_parallel
    return body


def parsed(written: str) -> dict[str, Any]:
    """The arguments of a call, which are an object."""
    try:
        found = json.loads(written)
    except ValueError as error:
        raise Wrong(f"arguments do not parse: {written!r}") from error
    if not isinstance(found, dict):
        raise Wrong(f"arguments are no object: {written!r}")
    return found


def seen_in_chat(answer: dict[str, Any]) -> Seen:
    ChatCompletion.model_validate(answer)
    [choice] = answer["choices"]
    message = choice["message"]
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    return Seen(
        message.get("reasoning_content") or "",
        message["content"] or "",
        [(each["name"], parsed(each["arguments"])) for each in calls],
        choice["finish_reason"],
    )


def seen_in_chunks(events: list[dict[str, Any]]) -> Seen:
    reasoning = content = finish = ""
    calls: dict[int, list[str]] = {}
    for event in events:
        ChatCompletionChunk.model_validate(event)
        for choice in event["choices"]:
            delta = choice["delta"]
            reasoning += delta.get("reasoning_content") or ""
            content += delta.get("content") or ""
            finish = choice["finish_reason"] or finish
            for call in delta.get("tool_calls") or ():
                parts = calls.setdefault(call["index"], ["", ""])
                parts[0] += call["function"].get("name") or ""
                parts[1] += call["function"].get("arguments") or ""
    return Seen(reasoning, content, [(n, parsed(a)) for n, a in calls.values()], finish)


FINISHES = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls"}


def seen_in_message(answer: dict[str, Any]) -> Seen:
    Message.model_validate(answer)
    blocks = answer["content"]
    calls = [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
    return Seen(
        "".join(b["thinking"] for b in blocks if b["type"] == "thinking"),
        "".join(b["text"] for b in blocks if b["type"] == "text"),
        calls,
        _finish(answer["stop_reason"], has_calls=bool(calls)),
    )


def _finish(reason: str, *, has_calls: bool) -> str:
    """A stop reason of Anthropic's in OpenAI's words, where a call comes before a stop string."""
    if reason == "stop_sequence" and has_calls:
        return "tool_calls"
    return FINISHES.get(reason, "length")


def seen_in_message_events(events: list[dict[str, Any]]) -> Seen:
    texts: dict[str, str] = {"thinking": "", "text": ""}
    calls: list[list[str]] = []
    finish = ""
    for event in events:
        if event["type"] != "ping":  # which the library drops
            MESSAGE_EVENT.validate_python(event)
        match event:
            case {"type": "content_block_start", "content_block": {"type": "tool_use"} as block}:
                calls.append([block["name"], ""])
            case {"delta": {"type": "input_json_delta", "partial_json": part}}:
                calls[-1][1] += part
            case {"delta": {"type": "text_delta", "text": part}}:
                texts["text"] += part
            case {"delta": {"type": "thinking_delta", "thinking": part}}:
                texts["thinking"] += part
            case {"delta": {"stop_reason": reason}}:
                finish = _finish(reason, has_calls=bool(calls))
    named = [(name, parsed(written)) for name, written in calls]
    return Seen(texts["thinking"], texts["text"], named, finish)


def seen_in_response(answer: dict[str, Any]) -> Seen:
    Response.model_validate(answer)
    items = answer["output"]
    calls = [(i["name"], parsed(i["arguments"])) for i in items if i["type"] == "function_call"]
    finish = "tool_calls" if calls else "stop"
    return Seen(
        "".join(s["text"] for i in items if i["type"] == "reasoning" for s in i["summary"]),
        "".join(c["text"] for i in items if i["type"] == "message" for c in i["content"]),
        calls,
        "length" if answer["status"] == "incomplete" else finish,
    )


def seen_in_response_events(events: list[dict[str, Any]]) -> Seen:
    for event in events:
        RESPONSE_EVENT.validate_python(event)
    deltas = Counter[str]()
    texts: dict[str, str] = {}
    for event in events:
        if isinstance(event.get("delta"), str):
            deltas[event["type"]] += 1
            texts[event["type"]] = texts.get(event["type"], "") + event["delta"]
    seen = seen_in_response(events[-1]["response"])
    told = (
        texts.get("response.output_text.delta", ""),
        texts.get("response.reasoning_summary_text.delta", ""),
    )
    if told != (seen.content, seen.reasoning):
        raise Wrong(f"deltas of a response: {told} and not {seen}")
    return seen


def events_of(raw: bytes) -> list[dict[str, Any]]:
    lines = (line[6:] for line in raw.decode().split("\n") if line.startswith("data: {"))
    return [json.loads(line) for line in lines]


def next_body(path: str, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The request that sends the answer back, with the results of its calls."""
    user = {"role": "user", "content": "y"}
    if path == CHAT:
        message = answer["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "done"}
            for call in message.get("tool_calls") or ()
        ]
        return {**body, "messages": [*body["messages"], message, *results, user]}
    if path == MESSAGES:
        said = {"role": "assistant", "content": answer["content"] or "nothing"}
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "done"}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        user["content"] = [*results, {"type": "text", "text": "y"}]  # type: ignore[assignment]
        return {**body, "messages": [*body["messages"], said, user]}
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
        for item in answer["output"]
        if item["type"] == "function_call"
    ]
    return {**body, "input": [*body["input"], *answer["output"], *results, user]}


READERS = {
    CHAT: (seen_in_chat, seen_in_chunks),
    MESSAGES: (seen_in_message, seen_in_message_events),
    RESPONSES: (seen_in_response, seen_in_response_events),
}


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
    if prompt.count(TOOL) < len(seen.calls):
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
