"""Indexes the prompts of choices, so that proposals can be copied from them.

Knows which text of a prompt is worth indexing, but not lanes or how proposals are made.
"""

from __future__ import annotations

import logging
import re
import threading
from array import array
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from luceasync.cyext.copies import CopyIndex
from luceasync.text.prompt import RenderedPrompt
from luceasync.text.tokenizer import Tokenizer

NUMBER = re.compile(r"[ \t]*(\d{1,7})(\t|→|[ ]?[:|])")  # before a line, as tools show files
MIN_LINES = 3
MAX_CHARS = 1 << 16  # of numbered text in one prompt; the last characters count
MAX_CHARS_HELD = 1 << 21  # of texts whose tokens are remembered
LATE_TOKENS = 8192  # longer prompts are indexed while they are restored or run

logger = logging.getLogger(__name__)


def unnumbered(text: str, max_chars: int = MAX_CHARS) -> list[str]:
    """The parts of `text` in which three or more lines in a row begin with rising numbers, without
    these numbers; at most `max_chars`, taken from the end."""
    found: list[str] = []
    run: list[tuple[str, str]] = []  # separator and rest of each line
    last = -1
    for line in (*text.split("\n"), ""):
        match = NUMBER.match(line)
        is_next = match is not None and int(match[1]) > last and (not run or match[2] == run[0][0])
        if not is_next:
            if len(run) >= MIN_LINES:
                found.append(_joined(run))
            run, last = [], -1
        if match is not None:
            run.append((match[2], line[match.end() :]))
            last = int(match[1])
    kept: list[str] = []
    for part in reversed(found):
        max_chars -= len(part)
        if max_chars < 0:
            break
        kept.append(part)
    return kept[::-1]


def _joined(run: list[tuple[str, str]]) -> str:
    """The rests of lines as one text. A space that follows every `:` or `|` is part of the
    separator."""
    rests = [rest for _, rest in run]
    if run[0][0] not in "\t→" and all(rest.startswith(" ") for rest in rests if rest):
        rests = [rest[1:] for rest in rests]
    return "".join(f"{rest}\n" for rest in rests)


@dataclass(frozen=True, slots=True)
class ComingIndex:
    """The index of one choice, which may still be in the making."""

    _coming: Future[list[CopyIndex] | None]
    _number: int

    @property
    def found(self) -> CopyIndex | None:
        """The index; None: nothing can be copied, or not yet."""
        if not self._coming.done() or self._coming.cancelled():
            return None
        made = self._coming.result()
        return None if made is None else made[self._number]


class PromptCopies:
    """Makes indexes of prompts. Safe to call from any thread; call `close` when done.

    An index covers one prompt only and never contains text of another. Only the tokens of texts are
    remembered, by tenant, since the next prompt of a conversation repeats them.
    """

    def __init__(self, tokenizer: Tokenizer, max_chars_held: int = MAX_CHARS_HELD) -> None:
        self._tokenizer = tokenizer
        self._max_chars_held = max_chars_held
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[bytes, str], array[int]] = OrderedDict()
        self._num_chars = 0
        self._late = ThreadPoolExecutor(1, "index-copies")
        self._num_failed = 0

    @property
    def num_failed(self) -> int:
        """Prompts without an index, because making it raised."""
        return self._num_failed

    def coming(
        self, prompt: RenderedPrompt, stop_ids: frozenset[int], num_choices: int
    ) -> list[ComingIndex]:
        """An index for each choice, made in a thread if the prompt is long: no first token waits
        for it. What making it raises is logged; the choices then do without. See `index`."""
        make = partial(self._indexes, prompt, stop_ids, num_choices)
        coming: Future[list[CopyIndex] | None]
        if len(prompt.ids) > LATE_TOKENS:
            coming = self._late.submit(make)
        else:
            coming = Future()
            coming.set_result(make())
        return [ComingIndex(coming, number) for number in range(num_choices)]

    def close(self) -> None:
        """Wait for the index in the making, and make no more."""
        self._late.shutdown(cancel_futures=True)

    def _indexes(
        self, prompt: RenderedPrompt, stop_ids: frozenset[int], num_choices: int
    ) -> list[CopyIndex] | None:
        try:
            first = self.index(prompt, stop_ids)
            return [first, *(first.copy() for _ in range(num_choices - 1))]
        except Exception as error:  # the answer is the same without, and only slower
            with self._lock:
                self._num_failed += 1
            size = len(prompt.ids)
            logger.error("A prompt of %d tokens is not indexed for lookup: %r", size, error)
            return None

    def index(self, prompt: RenderedPrompt, stop_ids: frozenset[int]) -> CopyIndex:
        """An index of the prompt's tokens, and of text in it that has line numbers, without these.
        Nothing is proposed after `stop_ids`. Takes 50 ns a token, plus the time to encode the text
        without line numbers."""
        index = CopyIndex(stop_ids)
        for text in unnumbered(prompt.text or ""):
            index.put_before(self._encoded(prompt.tenant.key, text))
        index.extend(prompt.ids)
        return index

    def _encoded(self, tenant: bytes, text: str) -> array[int]:
        key = tenant, text
        with self._lock:
            ids = self._known.get(key)
            if ids is not None:
                self._known.move_to_end(key)
                return ids
        ids = array("i", self._tokenizer.encode(text, special=False))
        with self._lock:
            if key not in self._known:
                self._known[key] = ids
                self._num_chars += len(text)
            while self._num_chars > self._max_chars_held:
                (_, oldest), _ = self._known.popitem(last=False)
                self._num_chars -= len(oldest)
        return ids
