"""Maps text that a client sends back to the ids that the model generated for it.

Encoding it again could merge byte pairs across the boundary, and computed state would not be found.
Owns which texts of one tenant are remembered, and for how long. Independent of caches, engines and
templates.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import NamedTuple

from luceasync.text.control_tokens import BREAK
from luceasync.text.tokenizer import Tokenizer

MAX_TOKENS_HELD = 2**22  # 16 MiB
_DIGEST_BYTES = 16
_BREAK = BREAK.encode("utf-8", "surrogatepass")


@dataclass(eq=False, frozen=True, slots=True)
class _Sequence:
    """The ids of one prompt and its answer; immutable, so reading takes no lock."""

    ids: array[int]


class _Match(NamedTuple):
    """A text of `num_bytes` bytes, spelled by the first `num_ids` ids of `sequence`."""

    num_bytes: int
    sequence: _Sequence
    num_ids: int


class _Key(NamedTuple):
    """A remembered text, identified by its length in bytes of UTF-8 and its digest."""

    num_bytes: int
    digest: bytes


class History:
    """The texts that a tenant's prompts may begin with, and their ids. Thread-safe.

    Beyond `max_tokens_held` ids, the least recently used sequence is dropped.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens_held: int = MAX_TOKENS_HELD) -> None:
        self._tokenizer = tokenizer
        self._max_tokens_held = max_tokens_held
        self._added = tuple(text.encode() for text in tokenizer.added_texts if text)
        self._cut_anywhere = all(
            _spell(tokenizer, tokenizer.encode(text)) == text.encode() for text in ("a", " a")
        )
        self._lock = threading.Lock()
        self._matches: dict[int, dict[bytes, _Match]] = {}  # by length, then by digest
        self._lengths: list[int] = []  # the keys of `_matches`, ascending
        self._keys: OrderedDict[_Sequence, list[_Key]] = OrderedDict()  # most recently used last
        self._num_tokens_held = 0

    @property
    def num_tokens_held(self) -> int:
        """The number of ids held."""
        return self._num_tokens_held

    def remember(
        self, prompt_text: str, prompt_ids: Sequence[int], generated_ids: Sequence[int]
    ) -> None:
        """After an answer, remember its ids for texts that begin with `prompt_text` followed by the
        text of `generated_ids`.

        They are also remembered without the last id: the model has not processed it, and if it ends
        the answer, a template may spell the end differently. Trailing ids without text are left
        out: the text is the same without them, and a prompt must not grow when it is sent again.
        """
        self._hold(prompt_text.encode("utf-8", "surrogatepass"), prompt_ids, generated_ids)

    def relearn(self, token_ids: Sequence[int]) -> None:
        """Remember a sequence whose text is known only from its ids, such as one restored after a
        restart. It ends with generated ids.
        """
        self._hold(b"", (), token_ids)

    def recall(self, text: str) -> array[int]:
        """The ids of `text`: those of the longest remembered text that it begins with, then those
        of the rest, encoded separately; without a match, those of `Tokenizer.encode`. Raises
        RequestError like that method.
        """
        return self.recalled(text)[0]

    def recalled(self, text: str) -> tuple[array[int], int]:
        """The ids of `text`, see `recall`, and how many of them were remembered."""
        spelled = text.encode("utf-8", "surrogatepass")
        for match in self._beginnings_of(spelled):
            rest = self._encode_rest(spelled, match.num_bytes)
            if rest is not None:
                return match.sequence.ids[: match.num_ids] + array("i", rest), match.num_ids
        return array("i", self._tokenizer.encode(text)), 0

    def _encode_rest(self, spelled: bytes, seam: int) -> list[int] | None:
        """The ids of `spelled[seam:]`; None if the text must not be split there: within an added
        token such as "<|im_end|>", or, with a tokenizer that prepends a space to a text, anywhere
        except before a special token.
        """
        if any(
            token in spelled[max(0, seam - len(token) + 1) : seam + len(token) - 1]
            for token in self._added
        ):
            return None
        rest = self._tokenizer.encode(spelled[seam:].decode("utf-8", "surrogatepass"))
        if self._cut_anywhere or not rest or self._tokenizer.is_special(rest[0]):
            return rest
        return None

    def _beginnings_of(self, spelled: bytes) -> list[_Match]:
        """The remembered texts that `spelled` begins with, longest first; the longest is marked as
        used.

        Hashes `spelled` once, with a lookup at each remembered length.
        """
        found, num_hashed = [], 0
        content, running = memoryview(spelled), blake2b(digest_size=_DIGEST_BYTES)
        with self._lock:
            for length in self._lengths[: bisect_right(self._lengths, len(spelled))]:
                running.update(content[num_hashed:length])
                num_hashed = length
                match = self._matches[length].get(running.digest())
                if match is not None:
                    found.append(match)
            if found:
                self._keys.move_to_end(found[-1].sequence)
        return found[::-1]

    def _hold(self, prompt: bytes, prompt_ids: Sequence[int], generated_ids: Sequence[int]) -> None:
        sequence = _Sequence(array("i", prompt_ids) + array("i", generated_ids))
        if len(sequence.ids) > self._max_tokens_held:
            return
        control, texts = self._tokenizer.control, list[bytes]()
        for generated in (generated_ids[:-1], generated_ids):
            num_generated = self._num_spelling(generated)
            if texts and num_generated and control.is_control(generated[-1]):
                texts.append(texts[0] + self._tokenizer.spell(generated[-1:]))  # by itself
            else:
                texts.append(_spell(self._tokenizer, generated[:num_generated]))
            spelled = prompt + texts[-1]
            if spelled and _is_text(spelled):
                key = _Key(len(spelled), blake2b(spelled, digest_size=_DIGEST_BYTES).digest())
                num_ids = len(prompt_ids) + num_generated
                with self._lock:
                    self._insert(key, _Match(len(spelled), sequence, num_ids))

    def _num_spelling(self, ids: Sequence[int]) -> int:
        """The number of `ids` up to the last one that has text."""
        spelling = (i for i in range(len(ids), 0, -1) if self._tokenizer.token_bytes(ids[i - 1]))
        return next(spelling, 0)

    def _insert(self, key: _Key, match: _Match) -> None:
        """Insert a match. The newest ids of a text replace older ones: their state is the most
        likely to be still cached.
        """
        if key.digest in self._matches.get(key.num_bytes, {}):
            self._remove(key)
        if key.num_bytes not in self._matches:
            self._matches[key.num_bytes] = {}
            insort(self._lengths, key.num_bytes)
        self._matches[key.num_bytes][key.digest] = match
        if match.sequence not in self._keys:
            self._keys[match.sequence] = []
            self._num_tokens_held += len(match.sequence.ids)
        self._keys[match.sequence].append(key)
        while self._num_tokens_held > self._max_tokens_held:
            for old_key in tuple(next(iter(self._keys.values()))):
                self._remove(old_key)

    def _remove(self, key: _Key) -> None:
        """Forget the text, and its sequence if no other text refers to it."""
        of_length = self._matches[key.num_bytes]
        sequence = of_length.pop(key.digest).sequence
        if not of_length:
            del self._matches[key.num_bytes]
            del self._lengths[bisect_left(self._lengths, key.num_bytes)]
        self._keys[sequence].remove(key)
        if not self._keys[sequence]:
            del self._keys[sequence]
            self._num_tokens_held -= len(sequence.ids)


def _spell(tokenizer: Tokenizer, ids: Iterable[int]) -> bytes:
    """The text of `ids` as in a prompt, with a BREAK in text that merely spells a control token."""
    parts = []
    for is_control, run in groupby(ids, tokenizer.control.is_control):
        spelled = tokenizer.spell(run)
        parts.append(spelled if is_control else _broken(tokenizer, spelled))
    return b"".join(parts)


def _broken(tokenizer: Tokenizer, spelled: bytes) -> bytes:
    """`ControlTokens.broken` for bytes, some of which may not be UTF-8."""
    text = tokenizer.control.broken(spelled.decode("utf-8", "surrogateescape"))
    return _BREAK.join(part.encode("utf-8", "surrogateescape") for part in text.split(BREAK))


def _is_text(spelled: bytes) -> bool:
    """Whether a text can begin with `spelled`: it must not end within a character."""
    try:
        spelled.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True
