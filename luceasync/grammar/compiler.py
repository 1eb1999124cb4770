"""Programs become matchers: tried elsewhere first, then compiled here, and kept.

Owns the bounds: how long a program may be, how long it may take, how many wait. What is compiled
here has been compiled by a process that can be killed, within the same limits.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits

from luceasync.errors import RequestError, Unavailable
from luceasync.grammar.matcher import Matcher
from luceasync.grammar.program import Program
from luceasync.grammar.proving import LIMITS, Proving, cut
from luceasync.grammar.vocabulary import Vocabulary

MAX_PROGRAM_BYTES = 512 << 10
KEPT_BYTES = 8 << 20  # of programs; what llguidance makes of one is some ten times as large
MAX_WAITING = 16
# Attributes of Lark's rules whose effect llguidance sees once their tokens have come.
STEPWISE = re.compile(r"(max_tokens|stop)(\s|\\[nrt])*=")


class Compiler:
    """Of one model's programs. Used from the event loop, but for `kept`; compiling is done in
    threads.
    """

    def __init__(self, vocabulary: Vocabulary, proving: Proving | None = None) -> None:
        self._vocabulary = vocabulary
        self._proving = proving or Proving()
        self._kept = _Kept(KEPT_BYTES)
        self._num_waiting = 0

    async def close(self) -> None:
        """Let the process go that tries programs."""
        await self._proving.close()

    def kept(self, program: Program) -> Matcher | None:
        """What `matcher` gives for it; None where it is not compiled. From any thread."""
        return self._kept.get(_digest_of(program.text.encode()))

    async def matcher(self, make: Callable[[], Program]) -> Matcher:
        """A matcher at the beginning of the program that `make` gives, in a thread. Raises
        RequestError, which names the field and the place in its schema, for one that does not
        compile; Unavailable where too many wait for that.
        """
        program = await asyncio.to_thread(make)
        text = program.text.encode()
        if len(text) > MAX_PROGRAM_BYTES:
            words = f"'{program.param}' becomes {len(text)} bytes; {MAX_PROGRAM_BYTES} may be."
            raise RequestError(words, param=program.param)
        digest = _digest_of(text)
        if (kept := self._kept.get(digest)) is None:
            kept = await self._compiled(program)
            self._kept.put(digest, kept, len(text))
        return kept

    async def _compiled(self, program: Program) -> Matcher:
        if self._num_waiting >= MAX_WAITING:
            raise Unavailable("Too many schemas and grammars wait to be compiled.")
        self._num_waiting += 1
        try:
            await self._proving.prove(program)
            return await asyncio.to_thread(self._compile, program)
        finally:
            self._num_waiting -= 1

    def _compile(self, program: Program) -> Matcher:
        limits = LLParserLimits(verbose_errors=False, **LIMITS)
        made = LLMatcher(self._vocabulary.table, program.text, log_level=0, limits=limits)
        if made.is_error():  # with this vocabulary alone
            words = f"'{program.param}' does not compile: {cut(made.get_error())}"
            raise RequestError(words, param=program.param)
        known = self._vocabulary
        return Matcher(
            made,
            known.num_words,
            known.end_ids,
            known.tokenizer.token_bytes,
            is_stepwise=STEPWISE.search(program.text) is not None,
        )


def _digest_of(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=32).digest()


class _Kept:
    """Matchers that stand at the beginning, by the digest of their program; the least lately used
    goes first. From any thread.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
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
            if digest in self._matchers:  # two have come at once
                return
            self._matchers[digest] = matcher, num_bytes
            self._num_bytes += num_bytes
            while self._num_bytes > self._most_bytes and len(self._matchers) > 1:
                _, (_, freed) = self._matchers.popitem(last=False)
                self._num_bytes -= freed
