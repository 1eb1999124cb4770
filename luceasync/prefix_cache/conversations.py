"""Which conversation of a client goes on, by the names that clients give their requests.

Owns, for each name, the lines of prompts that go on from one another, and which of these is the
main one: a title, or a helper's work, goes by the same name. Knows of nodes their keys, no clock.
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
MAX_PLACES = 3  # of a line at which another prompt goes on from it
MAX_MISSED_TURNS = 16  # of other lines: who has missed more was left, as by a summary
CLAIM_S = 3600.0  # since its last turn: then a line is like any other


class Name(NamedTuple):
    """What one client calls a conversation; names of two clients, or tenants, are two."""

    tenant: bytes
    client: str
    word: str


class Place(NamedTuple):
    """A beginning of so many tokens, by its hash."""

    num_tokens: int
    digest: bytes


class Talk(NamedTuple):
    """One prompt of a conversation: a next one may share its first `num_tokens` tokens."""

    name: Name
    num_tokens: int


@dataclass(slots=True)
class Line:
    """Prompts of which each goes on from the one before. `places` are where the last of them ended,
    without what opens the answer; `ends` the nodes at which the next one may begin.
    """

    places: list[Place]
    ends: tuple[NodeKey, ...]
    last_used_s: float
    num_turns: int = 1
    num_missed: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether it was ever continued: a title is not."""
        return self.num_turns > 1


@dataclass(slots=True)
class Conversations:
    """By name, the one used last at the end."""

    _lines: OrderedDict[Name, list[Line]] = field(default_factory=OrderedDict)

    def __repr__(self) -> str:
        return f"Conversations({len(self._lines)})"

    def standing(self, name: Name, prompt: array[int]) -> tuple[bool, tuple[NodeKey, ...]]:
        """Whether the prompt goes on from the name's main line; if not, the ends of that: they
        are not to make room for what is kept of the prompt.
        """
        main = _main(self._lines.get(name, ()))
        if main is None:
            return False, ()
        found = _beginnings(prompt, [place.num_tokens for place in main.places])
        goes_on = any(place in found for place in main.places)
        return goes_on, () if goes_on else main.ends

    def ended(
        self,
        name: Name,
        sequence: array[int],
        num_tokens: int,
        ends: Sequence[NodeKey],
        now_s: float,
    ) -> None:
        """A prompt of that name was answered, of whose `sequence` a next one may share `num_tokens`
        and more; `ends`: see Line.
        """
        lines = self._lines.setdefault(name, [])
        self._lines.move_to_end(name)
        asked = {place.num_tokens for line in lines for place in line.places}
        found = _beginnings(sequence, [num_tokens, *(n for n in asked if n <= num_tokens)])
        [here] = (place for place in found if place.num_tokens == num_tokens)
        line = _continued(lines, found)
        if line is None:
            _leave_out_oldest(lines)
            lines.append(Line([here], tuple(ends), now_s))
        else:
            _go_on(line, lines, found, here)
            line.ends, line.last_used_s = tuple(ends), now_s
        while len(self._lines) > MAX_NAMES:
            self._lines.popitem(last=False)

    def claims(self, now_s: float) -> list[tuple[NodeKey, ...]]:
        """Ends of the main lines, of those used last first, as far as their claims have not
        expired.
        """
        mains = (_main(lines) for lines in reversed(self._lines.values()))
        return [line.ends for line in mains if line and abs(now_s - line.last_used_s) <= CLAIM_S]


def _main(lines: Collection[Line]) -> Line | None:
    """The oldest of those that went on and were not left."""
    return next(
        (line for line in lines if line.goes_on and line.num_missed <= MAX_MISSED_TURNS), None
    )


def _continued(lines: Collection[Line], found: Collection[Place]) -> Line | None:
    """The line that shares most with a prompt that has the beginnings `found`."""

    def shared(line: Line) -> int:
        return max((place.num_tokens for place in line.places if place in found), default=0)

    best = max(lines, key=shared, default=None)
    return best if best is not None and shared(best) else None


def _go_on(line: Line, lines: Collection[Line], found: Collection[Place], here: Place) -> None:
    """Its next turn, or one of its last ones again, which are no turns more."""
    kept = [place for place in line.places if place in found and place != here]
    if here.num_tokens > max(place.num_tokens for place in line.places):
        line.num_turns += 1
        for other in lines if line.goes_on else ():
            other.num_missed += 1
    line.num_missed = 0
    line.places = [*kept, here][-MAX_PLACES:]


def _leave_out_oldest(lines: list[Line]) -> None:
    """Room for one more; the main one stays."""
    if len(lines) >= MAX_LINES:
        main = _main(lines)
        lines.remove(min((x for x in lines if x is not main), key=lambda x: x.last_used_s))


def _beginnings(sequence: array[int], lengths: Collection[int]) -> set[Place]:
    """The sequence's beginnings of these lengths, as far as it has them."""
    places, begin, digest = set(), 0, hashlib.blake2b(digest_size=16)
    with memoryview(sequence) as tokens:
        for end in sorted(set(lengths)):
            if end > len(tokens):
                break
            digest.update(tokens[begin:end])
            places.add(Place(end, digest.digest()))
            begin = end
    return places
