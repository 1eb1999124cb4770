"""Makes the guides of a request's choices: grammar, limit of reasoning, minimum length.

Decides what a request demands of an answer; luceasync.grammar enforces it. Does not know lanes or
how tokens are chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from luceasync.engine.prompts import Language
from luceasync.errors import RequestError
from luceasync.grammar.compiler import Compiler, GrammarVocabulary
from luceasync.grammar.guide import Guide, MinTokens, ReasoningBudget, ReasoningLimit
from luceasync.grammar.matcher import Matcher
from luceasync.grammar.program import GrammarProgram, compose
from luceasync.request import ChatPrompt, Constraint, Request
from luceasync.text.answer.answer_format import AnswerFormat
from luceasync.text.answer.call_formats import CallFormat
from luceasync.text.answer.call_grammar import CallGrammar
from luceasync.text.answer.pieces import Before
from luceasync.text.prompt import RenderedPrompt
from luceasync.text.tokenizer import Tokenizer

NO_FORMAT = (
    "Invalid value for 'tool_choice': this model's chat template does not show how calls of tools "
    "are written, so none can be forced (the server's --tool-format may name a format)."
)


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """What an answer must be: text by `constraint`, tool calls by `calls`, or either."""

    constraint: Constraint | None
    calls: CallGrammar | None

    @property
    def is_free(self) -> bool:
        return self.constraint is None and self.calls is None


NewGuide = Callable[[], Guide | None]


def unguided() -> None:
    """No guide: any token is allowed."""


class Guidance:
    """Makes the guides of one model's answers."""

    def __init__(self, language: Language) -> None:
        self._answers = language.answers
        self._vocabulary = GrammarVocabulary(
            language.tokenizer, language.vocab_size, language.answers.shown
        )
        self._compiler = Compiler(self._vocabulary)
        end = self._answers.words.end
        written = end if self._answers.words.has_channels else f"\n{end}"
        self._close_ids = tuple(language.tokenizer.encode(written))

    async def close(self) -> None:
        """Close the compiler."""
        await self._compiler.close()

    def known(self, request: Request, prompt: RenderedPrompt) -> NewGuide | None:
        """The result of `of`; None if something has to be compiled first. Safe to call from any
        thread."""
        wanted = grammar_of(request, self._answers)
        if wanted.is_free:
            return self._guides(request, prompt, None)
        matcher = self._compiler.cached(self._program(wanted, prompt))
        return None if matcher is None else self._guides(request, prompt, matcher)

    async def of(self, request: Request, prompt: RenderedPrompt) -> NewGuide:
        """A factory of guides, one for each choice of the request. Raises RequestError for a
        grammar that does not compile, Unavailable if that cannot be tried now.
        """
        wanted = await asyncio.to_thread(grammar_of, request, self._answers)
        matcher: Matcher | None = None
        if not wanted.is_free:
            matcher = await self._compiler.matcher(lambda: self._program(wanted, prompt))
        return self._guides(request, prompt, matcher)

    def _program(self, wanted: AnswerGrammar, prompt: RenderedPrompt) -> GrammarProgram:
        # A grammar that leaves few tokens at the start should not make a model reason that
        # otherwise would not.
        is_silent = prompt.before == "perhaps" and not self._answers.opens
        before: Before = "nothing" if is_silent else prompt.before
        return compose(wanted.constraint, wanted.calls, before, self._answers.words)

    def _guides(
        self, request: Request, prompt: RenderedPrompt, matcher: Matcher | None
    ) -> NewGuide:
        """Guides, each with its own copy of `matcher`."""
        most, before = request.most_reasoning_tokens, prompt.before
        reasoning: ReasoningBudget | None = None
        if most is not None and before != "nothing":
            token_bytes = self._vocabulary.tokenizer.token_bytes
            limit = ReasoningLimit(most, self._close_ids, token_bytes, self._answers.words)
            reasoning = ReasoningBudget(limit, before)
        num_words = self._vocabulary.num_words
        min_tokens: MinTokens | None = None
        if request.min_tokens:
            tokenizer = self._vocabulary.tokenizer
            end_ids = tokenizer.eos_ids | prompt.ends | stop_ids_of(request, tokenizer)
            min_tokens = MinTokens.of(request.min_tokens, end_ids, num_words)
        if matcher is None and reasoning is None and min_tokens is None:
            return unguided
        return lambda: Guide(
            None if matcher is None else matcher.copy(), reasoning, num_words, min_tokens
        )


def stop_ids_of(request: Request, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end the answer by request: special tokens have no text in which a stop string
    could be found."""
    return tokenizer.special_ids(request.stop).union(request.stop_token_ids)


def is_guided(request: Request) -> bool:
    """Whether the request puts any constraint on its answers."""
    if request.constraint is not None or request.most_reasoning_tokens is not None:
        return True
    if request.min_tokens:
        return True
    chat = request.prompt
    if not isinstance(chat, ChatPrompt):
        return False
    strict = (tool["function"].get("strict") is True for tool in chat.tools or ())
    return bool(chat.must_call) or any(strict)


def grammar_of(request: Request, answers: AnswerFormat) -> AnswerGrammar:
    """What the request demands of an answer. Raises RequestError for tool calls if the model has no
    known format for them.
    """
    chat = request.prompt
    if not isinstance(chat, ChatPrompt) or not chat.tools:
        return AnswerGrammar(request.constraint, None)
    places, max_calls = chat.schema_places, answers.most_calls(chat.max_calls)
    if chat.must_call:
        known = _known(answers.calls)
        return AnswerGrammar(None, known.must_call(chat.tools, chat.must_call, max_calls, places))
    if answers.calls is None:
        return AnswerGrammar(request.constraint, None)
    if request.constraint is None:
        return AnswerGrammar(None, answers.calls.may_call(chat.tools, max_calls, places))
    names = [tool["function"]["name"] for tool in chat.tools]
    calls = answers.calls.must_call(chat.tools, names, max_calls, places)
    return AnswerGrammar(request.constraint, calls)


def _known(calls: CallFormat | None) -> CallFormat:
    if calls is None:
        raise RequestError(NO_FORMAT, param="tool_choice")
    return calls
