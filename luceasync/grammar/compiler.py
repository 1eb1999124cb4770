"""Compiles grammars to matchers: tried in another process first, then compiled here, and cached.

Owns the limits: the length of a program, the time it may take, and how many may wait. Also
describes the tokenizer to llguidance.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from luceasync.errors import RequestError, Unavailable
from luceasync.grammar.matcher import WORD_BITS, Matcher
from luceasync.grammar.program import GrammarProgram
from luceasync.grammar.proving import LIMITS, GrammarProver, shorten
from luceasync.text.tokenizer import Tokenizer

MAX_PROGRAM_BYTES = 512 << 10
CACHED_BYTES = 8 << 20  # of programs; a compiled program is some ten times as large
MAX_WAITING = 16
# Attributes of Lark rules that llguidance evaluates only after the tokens of the rule.
STEPWISE = re.compile(r"(max_tokens|stop)(\s|\\[nrt])*=")


class Compiler:
    """Compiles programs for one model in threads. Used from the event loop, except for `cached`."""

    def __init__(self, vocabulary: GrammarVocabulary, prover: GrammarProver | None = None) -> None:
        self._vocabulary = vocabulary
        self._prover = prover or GrammarProver()
        self._cache = _MatcherCache(CACHED_BYTES)
        self._num_waiting = 0

    async def close(self) -> None:
        """Stop the process that tries programs."""
        await self._prover.close()

    def cached(self, program: GrammarProgram) -> Matcher | None:
        """The result of `matcher` if it is cached, otherwise None. Callable from any thread."""
        return self._cache.get(_digest_of(program.text.encode()))

    async def matcher(self, make: Callable[[], GrammarProgram]) -> Matcher:
        """A matcher at the start of the program that `make` returns; `make` runs in a thread.

        Raises RequestError, which names the field and the position of the error, if the program
        does not compile; Unavailable if too many programs wait, or this machine is too busy.
        """
        program = await asyncio.to_thread(make)
        text = program.text.encode()
        if len(text) > MAX_PROGRAM_BYTES:
            words = f"'{program.param}' compiles to {len(text)} bytes; at most {MAX_PROGRAM_BYTES}."
            raise RequestError(words, param=program.param)
        digest = _digest_of(text)
        if (matcher := self._cache.get(digest)) is None:
            matcher = await self._compiled(program)
            self._cache.put(digest, matcher, len(text))
        return matcher

    async def _compiled(self, program: GrammarProgram) -> Matcher:
        if self._num_waiting >= MAX_WAITING:
            raise Unavailable("Too many schemas and grammars wait to be compiled.")
        self._num_waiting += 1
        try:
            text = await self._prover.prove(program)
            return await asyncio.to_thread(self._compile, replace(program, text=text))
        finally:
            self._num_waiting -= 1

    def _compile(self, program: GrammarProgram) -> Matcher:
        limits = LLParserLimits(verbose_errors=False, **LIMITS)
        compiled = LLMatcher(self._vocabulary.table, program.text, log_level=0, limits=limits)
        matcher = Matcher(
            compiled,
            self._vocabulary.num_words,
            self._vocabulary.end_ids,
            self._vocabulary.tokenizer.token_bytes,
            is_stepwise=STEPWISE.search(program.text) is not None,
        )
        matcher.warm_up()
        if matcher.failure is not None:  # an error with this vocabulary only
            words = f"'{program.param}' does not compile: {shorten(matcher.failure)}"
            raise RequestError(words, param=program.param)
        return matcher


def _digest_of(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=32).digest()


class _MatcherCache:
    """Matchers at the start of their programs, by digest; evicts the least recently used.
    Thread-safe.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._matchers: OrderedDict[bytes, tuple[Matcher, int]] = OrderedDict()

    def get(self, digest: bytes) -> Matcher | None:
        with self._lock:
            if digest not in self._matchers:
                return None
            self._matchers.move_to_end(digest)
            return self._matchers[digest][0]

    def put(self, digest: bytes, matcher: Matcher, num_bytes: int) -> None:
        with self._lock:
            if digest in self._matchers:  # two threads have compiled it concurrently
                return
            self._matchers[digest] = matcher, num_bytes
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes and len(self._matchers) > 1:
                _, (_, freed) = self._matchers.popitem(last=False)
                self._num_bytes -= freed


class GrammarVocabulary:
    """The tokens of one model, for llguidance. The table is built on first use, which takes a
    second for a large vocabulary. Thread-safe.
    """

    def __init__(
        self, tokenizer: Tokenizer, num_logits: int, shown: frozenset[str] = frozenset()
    ) -> None:
        """`num_logits` is the number of tokens that the model's logits cover; others are never
        allowed. `shown` are special tokens that appear as text in an answer.
        """
        self.tokenizer = tokenizer
        self._shown = shown
        self.num_words = -(-num_logits // WORD_BITS)
        self._num_logits = num_logits
        self._lock = threading.Lock()
        self._table: LLTokenizer | None = None

    @property
    def table(self) -> LLTokenizer:
        """The tokenizer that matchers are created with."""
        with self._lock:
            if self._table is None:
                self._table = self._make_table()
            return self._table

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end a text. If there are none, a token that no model can generate, since
        llguidance requires one.
        """
        known = sorted(i for i in self.tokenizer.eos_ids if i < self._num_logits)
        return known or [self.num_words * WORD_BITS]

    def _make_table(self) -> LLTokenizer:
        wrapper = _ModelTokenizer(self.tokenizer, self._num_logits, self.end_ids, self._shown)
        table = LLTokenizer(wrapper, n_vocab=len(wrapper.tokens), eos_token=self.end_ids)
        wrapper("a")  # the first text takes a second with a large vocabulary: not in the engine
        return table


class _ModelTokenizer(TokenizerWrapper):
    """A model's tokenizer with the interface that llguidance expects."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_logits: int,
        end_ids: Sequence[int],
        shown: frozenset[str],
    ) -> None:
        self._tokenizer = tokenizer
        self.is_tokenizer_wrapper = True
        self.eos_token_id, self.bos_token_id = end_ids[0], None
        num_tokens = max(-(-num_logits // WORD_BITS) * WORD_BITS, end_ids[-1] + 1)
        self.tokens = [
            tokenizer.token_bytes(i) if i < num_logits else b"" for i in range(num_tokens)
        ]
        special = {i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)}
        special -= {i for i in special if tokenizer.token_text(i) in shown}
        self.special_token_ids = sorted((special & set(range(num_tokens))) | set(end_ids))
        for i in self.special_token_ids:
            self.tokens[i] = self.tokens[i] or b"<|end|>"

    def __call__(self, text: str) -> list[int]:
        """The ids of `text` as the model would write it, without control tokens."""
        return self._tokenizer.encode(text, special=False)
