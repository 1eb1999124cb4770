"""From a request to what guides its choices: grammars and the limit of reasoning.

Decides what is asked of an answer; luceasync.grammar does what follows from it. Knows no lanes and
nothing of how tokens are chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from luceasync.engine.prompts import Language
from luceasync.errors import RequestError
from luceasync.grammar.compiler import Compiler
from luceasync.grammar.guide import Guide, Least, Limit, Thought
from luceasync.grammar.matcher import Matcher
from luceasync.grammar.program import Program, program
from luceasync.grammar.vocabulary import Vocabulary
from luceasync.request import ChatPrompt, Constraint, Request
from luceasync.text.answer.answer_format import AnswerFormat
from luceasync.text.answer.call_formats import CallFormat
from luceasync.text.answer.call_grammar import CallGrammar
from luceasync.text.answer.pieces import THINK_END
from luceasync.text.prompt import RenderedPrompt

NO_FORMAT = (
    "Invalid value for 'tool_choice': this model's chat template does not show how calls of tools "
    "are written, so none can be forced (the server's --tool-format may name a format)."
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer must be: text as `constraint` says, calls as `calls` says, or either."""

    constraint: Constraint | None
    calls: CallGrammar | None

    @property
    def is_nothing(self) -> bool:
        return self.constraint is None and self.calls is None


NewGuide = Callable[[], Guide | None]


def unguided() -> None:
    """Any token may come."""


class Guidance:
    """Makes guides of one model's answers."""

    def __init__(self, language: Language) -> None:
        self._answers = language.answers
        self._vocabulary = Vocabulary(language.tokenizer, language.vocab_size)
        self._compiler = Compiler(self._vocabulary)
        self._close_ids = tuple(language.tokenizer.encode(f"\n{THINK_END}"))

    async def close(self) -> None:
        """Let go of what compiles."""
        await self._compiler.close()

    def known(self, request: Request, prompt: RenderedPrompt) -> NewGuide | None:
        """What `of` gives; None where that has to be compiled. From any thread."""
        asked = asked_of(request, self._answers)
        if asked.is_nothing:
            return self._guides(request, prompt, None)
        matcher = self._compiler.kept(self._program(asked, prompt))
        return None if matcher is None else self._guides(request, prompt, matcher)

    async def of(self, request: Request, prompt: RenderedPrompt) -> NewGuide:
        """What makes a guide for each choice of the request. Raises RequestError for what does not
        compile, Unavailable where that cannot be found out now.
        """
        asked = await asyncio.to_thread(asked_of, request, self._answers)
        matcher: Matcher | None = None
        if not asked.is_nothing:
            matcher = await self._compiler.matcher(lambda: self._program(asked, prompt))
        return self._guides(request, prompt, matcher)

    def _program(self, asked: Asked, prompt: RenderedPrompt) -> Program:
        # A model that would not think is not to begin with it because little else may come.
        is_silent = prompt.before == "perhaps" and not self._answers.opens
        return program(asked.constraint, asked.calls, "nothing" if is_silent else prompt.before)

    def _guides(
        self, request: Request, prompt: RenderedPrompt, matcher: Matcher | None
    ) -> NewGuide:
        """Each with a copy of `matcher`."""
        most, before = request.most_reasoning_tokens, prompt.before
        thought: Thought | None = None
        if most is not None and before != "nothing":
            limit = Limit(most, self._close_ids, self._vocabulary.tokenizer.token_bytes)
            thought = Thought(limit, before)
        num_words = self._vocabulary.num_words
        least: Least | None = None
        if request.min_tokens:
            end_ids = self._vocabulary.tokenizer.eos_ids
            least = Least.of(request.min_tokens, end_ids, num_words)
        if matcher is None and thought is None and least is None:
            return unguided
        return lambda: Guide(
            None if matcher is None else matcher.another(), thought, num_words, least
        )


def is_guided(request: Request) -> bool:
    """Whether anything is asked of its answers."""
    if request.constraint is not None or request.most_reasoning_tokens is not None:
        return True
    if request.min_tokens:
        return True
    chat = request.prompt
    if not isinstance(chat, ChatPrompt):
        return False
    strict = (tool["function"].get("strict") is True for tool in chat.tools or ())
    return bool(chat.must_call) or any(strict)


def asked_of(request: Request, answers: AnswerFormat) -> Asked:
    """What the request asks of an answer. Raises RequestError for calls in no known format."""
    chat = request.prompt
    if not isinstance(chat, ChatPrompt) or not chat.tools:
        return Asked(request.constraint, None)
    places = chat.schema_places
    if chat.must_call:
        form = _known(answers.calls)
        return Asked(None, form.must_call(chat.tools, chat.must_call, chat.max_calls, places))
    if answers.calls is None:
        return Asked(request.constraint, None)
    if request.constraint is None:
        return Asked(None, answers.calls.may_call(chat.tools, chat.max_calls, places))
    names = [tool["function"]["name"] for tool in chat.tools]
    calls = answers.calls.must_call(chat.tools, names, chat.max_calls, places)
    return Asked(request.constraint, calls)


def _known(calls: CallFormat | None) -> CallFormat:
    if calls is None:
        raise RequestError(NO_FORMAT, param="tool_choice")
    return calls
