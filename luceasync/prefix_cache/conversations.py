"""Which conversation of a client a prompt continues, by the names that clients give in their
requests.

Owns, for each name, the lines of prompts that continue one another, and decides which of these is
the main one: requests for a title or by a sub-agent use the same name. Knows the keys of nodes, but
no clock.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from luceasync.nodes import NodeKey

MAX_NAMES = 256
MAX_LINES = 8  # of one name
MAX_PLACES = 3  # of a line, at which another prompt may continue it
# Of other lines: a line that has missed more was abandoned, for example after a summary.
MAX_MISSED_TURNS = 16
CLAIM_S = 3600.0  # since its last turn: after that, a line is treated like any other


class ConversationName(NamedTuple):
    """A client's name for a conversation; the same word from another client is another name."""

    tenant: bytes
    client: str
    word: str


class ConversationTurn(NamedTuple):
    """One prompt of a conversation: the next one may share its first `num_tokens` tokens."""

    name: ConversationName
    num_tokens: int


class PrefixDigest(NamedTuple):
    """The hash of the first `num_tokens` tokens of a prompt."""

    num_tokens: int
    digest: bytes


@dataclass(slots=True)
class ConversationLine:
    """Prompts each of which continues the one before. `places`: where the last of them ended,
    without the opening of the answer; `ends`: the nodes from which the next one may continue."""

    places: list[PrefixDigest]
    ends: tuple[NodeKey, ...]
    last_used_s: float
    num_turns: int = 1
    num_missed: int = 0

    @property
    def was_continued(self) -> bool:
        """Whether the line has a second prompt: a title request has none."""
        return self.num_turns > 1


@dataclass(slots=True)
class Conversations:
    """Lines by name, the most recently used name last."""

    _lines: OrderedDict[ConversationName, list[ConversationLine]] = field(
        default_factory=OrderedDict
    )

    def __repr__(self) -> str:
        return f"Conversations({len(self._lines)})"

    def line_of(
        self, name: ConversationName, prompt: array[int]
    ) -> tuple[bool, tuple[NodeKey, ...]]:
        """Whether the prompt continues the name's main line; if not, the ends of that line, which
        must not be evicted to make room for this prompt."""
        main = _main(self._lines.get(name, ()))
        if main is None:
            return False, ()
        found = _beginnings(prompt, [place.num_tokens for place in main.places])
        is_main = any(place in found for place in main.places)
        return is_main, () if is_main else main.ends

    def end_turn(
        self, turn: ConversationTurn, sequence: array[int], ends: Sequence[NodeKey], now_s: float
    ) -> None:
        """The turn was answered: `sequence` is its prompt and answer; `ends`: see
        ConversationLine."""
        name, num_tokens = turn
        lines = self._lines.setdefault(name, [])
        self._lines.move_to_end(name)
        asked = {place.num_tokens for line in lines for place in line.places}
        found = _beginnings(sequence, [num_tokens, *(n for n in asked if n <= num_tokens)])
        [here] = (place for place in found if place.num_tokens == num_tokens)
        line = _continued(lines, found)
        if line is None:
            _drop_oldest(lines)
            lines.append(ConversationLine([here], tuple(ends), now_s))
        else:
            _extend(line, lines, found, here)
            line.ends, line.last_used_s = tuple(ends), now_s
        while len(self._lines) > MAX_NAMES:
            self._lines.popitem(last=False)

    def words(self) -> dict[NodeKey, str]:
        """By end, the name (as its client wrote it) of the line that continues there; if several
        do, the most recently used one."""
        pairs = ((name.word, line) for name, lines in self._lines.items() for line in lines)
        return {end: word for word, line in pairs for end in line.ends}

    def claims(self, now_s: float) -> list[tuple[NodeKey, ...]]:
        """Ends of the main lines whose claims have not expired, most recently used first."""
        mains = (_main(lines) for lines in reversed(self._lines.values()))
        return [line.ends for line in mains if line and abs(now_s - line.last_used_s) <= CLAIM_S]


def _main(lines: Collection[ConversationLine]) -> ConversationLine | None:
    """The oldest line that was continued and was not abandoned."""
    return next(
        (line for line in lines if line.was_continued and line.num_missed <= MAX_MISSED_TURNS), None
    )


def _continued(
    lines: Collection[ConversationLine], found: Collection[PrefixDigest]
) -> ConversationLine | None:
    """The line that shares most with a prompt whose known beginnings are `found`."""

    def shared(line: ConversationLine) -> int:
        return max((place.num_tokens for place in line.places if place in found), default=0)

    best = max(lines, key=shared, default=None)
    return best if best is not None and shared(best) else None


def _extend(
    line: ConversationLine,
    lines: Collection[ConversationLine],
    found: Collection[PrefixDigest],
    here: PrefixDigest,
) -> None:
    """Add the line's next turn, or repeat one of its last turns, which does not count as a new
    one."""
    kept = [place for place in line.places if place in found and place != here]
    if here.num_tokens > max(place.num_tokens for place in line.places):
        line.num_turns += 1
        for other in lines if line.was_continued else ():
            other.num_missed += 1
    line.num_missed = 0
    line.places = [*kept, here][-MAX_PLACES:]


def _drop_oldest(lines: list[ConversationLine]) -> None:
    """Make room for one more line; the main line stays."""
    if len(lines) >= MAX_LINES:
        main = _main(lines)
        lines.remove(min((x for x in lines if x is not main), key=lambda x: x.last_used_s))


def _beginnings(sequence: array[int], lengths: Collection[int]) -> set[PrefixDigest]:
    """Beginnings of the sequence of these lengths, for lengths that it has."""
    places, begin, digest = set(), 0, hashlib.blake2b(digest_size=16)
    with memoryview(sequence) as tokens:
        for end in sorted(set(lengths)):
            if end > len(tokens):
                break
            digest.update(tokens[begin:end])
            places.add(PrefixDigest(end, digest.digest()))
            begin = end
    return places
