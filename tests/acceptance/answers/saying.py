"""An engine whose model says given texts; prompts, tokens, stop strings and parsers are real."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from luceasync.engine.prepare import prepare
from luceasync.engine.prompts import Language, Prompts
from luceasync.engine.sequence import Generation
from luceasync.errors import TemplateRefusal
from luceasync.prefix_cache.tenants import Tenants
from luceasync.request import ChatPrompt, Delta, ModelCard, Request
from luceasync.text.answer.answer_format import AnswerFormat
from luceasync.text.answer.pieces import ReasoningWords
from luceasync.text.history import History
from luceasync.text.past_calls import with_parsed_arguments
from luceasync.text.prompt import RenderedPrompt
from luceasync.text.roles import Roles
from luceasync.text.template import TurnBoundaries
from luceasync.text.tokenizer import Tokenizer
from tests.acceptance.answers.cases import Case, Wrong
from tests.server.scripted import ScriptedEngine, ScriptedStream
from tests.text.answer.written import IN_CHANNELS, WRITERS, Call, a_call

MAX_CTX_TOKENS = 1 << 16
START, END = "<|im_start|>", "<|im_end|>"
CHANNEL_WORDS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")


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
        if answers.calls is None or answers.calls.name != name or not answers.reasons:
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
