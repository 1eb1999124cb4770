"""Indexes the prompts of choices, so that proposals can be copied from them.

Knows which text of a prompt is worth indexing, but nothing of lanes and of how proposals are made.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict

from luceasync.cyext.copies import CopyIndex
from luceasync.text.prompt import RenderedPrompt
from luceasync.text.tokenizer import Tokenizer

NUMBER = re.compile(r"[ \t]*(\d{1,7})(\t|→|[ ]?[:|])")  # before a line, as tools show files
MIN_LINES = 3
MAX_CHARS = 1 << 16  # of numbered text in one prompt, the last ones
MAX_CHARS_HELD = 1 << 21  # of texts whose tokens are remembered


def unnumbered(text: str, max_chars: int = MAX_CHARS) -> list[str]:
    """The parts of `text` whose lines have rising numbers before them, three or more in a row,
    without these; `max_chars` of them at most, and the last ones if there are more.
    """
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
    """The rests of lines as one text. A space that follows every `:` or `|` belongs to it."""
    rests = [rest for _, rest in run]
    if run[0][0] not in "\t→" and all(rest.startswith(" ") for rest in rests if rest):
        rests = [rest[1:] for rest in rests]
    return "".join(f"{rest}\n" for rest in rests)


class PromptCopies:
    """Makes indexes of prompts. Safe to call from any thread.

    A prompt is indexed for itself: nothing of another prompt is ever in its index. What is
    remembered are tokens of texts, by tenant, since the next prompt of a conversation has them too.
    """

    def __init__(self, tokenizer: Tokenizer, max_chars_held: int = MAX_CHARS_HELD) -> None:
        self._tokenizer = tokenizer
        self._max_chars_held = max_chars_held
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[bytes, str], array[int]] = OrderedDict()
        self._num_chars = 0

    def index(self, prompt: RenderedPrompt, stop_ids: frozenset[int]) -> CopyIndex:
        """An index of the prompt's tokens, and of text in it that has line numbers, without these.
        Nothing is proposed behind `stop_ids`. Takes 50 ns a token, and the encoding of such text.
        """
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
