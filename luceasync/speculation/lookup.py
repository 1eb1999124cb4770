"""Proposes what followed the lane's last tokens where they stood before, in its own text.

Needs no weights and no device: everything is known on the host before a round. What a proposal is
worth depends on how many tokens match, so each class of lengths has a record, which is kept from
the text itself: it shows what would have been accepted, whether or not a round was run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_

import numpy as np

from luceasync.cyext.copies import CopyIndex
from luceasync.pipeline.transfer import on_host
from luceasync.ranking.proposals import Proposal
from luceasync.speculation.choice import PRIOR_ROUNDS, DepthRates, Promise, RoundShape
from luceasync.speculation.drafter import Anchor, Tapped

LOOKUP = "lookup"
BLOCKS = (32, 16, 8, 4)  # rows of rounds if no other drafter says which
# Matches of so many tokens and more are a class; shorter ones are nothing.
CLASSES = (2, 3, 4, 6, 9, 16, 32)
NUM_CLASSES = len(CLASSES) + 2  # those that were resumed are apart: of one token, and of more
# Before a text has shown anything: the share of first tokens that are right, and of each further
# one if those before it are. Of new code (docs/speculation.md); where text is copied it is more.
FIRST_RIGHT = (0.33, 0.47, 0.62, 0.73, 0.81, 0.91, 0.92, 0.60, 0.80)
NEXT_RIGHT = (0.63, 0.70, 0.76, 0.80, 0.87, 0.93, 0.95, 0.85, 0.90)


def lookup_shapes(blocks: Sequence[int] = BLOCKS) -> tuple[RoundShape, ...]:
    """Rounds of so many rows, largest first."""
    return tuple(RoundShape(block, None, LOOKUP) for block in blocks)


def prior_of(kind: int, num_slots: int) -> DepthRates:
    """What a class is expected to give before anything has shown it."""
    shares = (FIRST_RIGHT[kind] * NEXT_RIGHT[kind] ** depth for depth in range(num_slots))
    return DepthRates(tuple(PRIOR_ROUNDS * s for s in shares), (PRIOR_ROUNDS,) * num_slots)


@dataclass(slots=True)
class _ClassRecord:
    """What matches of one class of lengths gave."""

    rates: DepthRates
    num_slots: int
    _taus: list[float] | None = None
    _prior: DepthRates | None = None  # each new text asks for it, few change it

    @property
    def taus(self) -> list[float]:
        """See Promise."""
        if self._taus is None:
            self._taus = self.rates.taus(self.num_slots)
        return self._taus

    def observe(self, num_slots: int, num_right: int) -> None:
        """Enter that the first `num_right` of so many tokens were right."""
        self.rates, self._taus = self.rates.after(num_slots, num_right), None
        self._prior = None

    def as_prior(self) -> _ClassRecord:
        if self._prior is None:
            self._prior = self.rates.as_prior()
        return _ClassRecord(self._prior, self.num_slots)


@dataclass(slots=True)
class _Watched:
    """A match whose worth the text is about to show: the tokens from number `begin` on are compared
    with those from `place` on, at most `num_slots`; the first `num_right` are equal.
    """

    place: int
    begin: int
    num_slots: int
    num_right: int = 0


@dataclass(slots=True)
class _LaneCopies:
    """Of one lane: a record by class, the matches that are watched, and what follows the match at
    the text's end, token number `end`.
    """

    records: list[_ClassRecord]
    watched: dict[int, _Watched] = field(default_factory=dict)
    end: int = -1
    length: int = 0
    kind: int = 0  # of the match
    is_lost: bool = False  # a match may be resumed after one more token
    tokens: list[int] = field(default_factory=list)
    num_filled: int = 0  # rows of the last proposal
    # What `promise_after` said last, and of which records' numbers, which it seldom has to find.
    after: tuple[list[list[float]], Promise] = ([], Promise((1.0,)))


class LookupDrafter:
    """See luceasync.speculation.drafter.Drafter."""

    name = LOOKUP
    promises = True
    tapped: Tapped | None = None
    off_reason: str | None = None
    num_unsettled = 0

    def __init__(self, shapes: Sequence[RoundShape], num_lanes: int) -> None:
        """`shapes`: of its own rounds, largest first."""
        self.shapes = tuple(shapes)
        self._num_slots = shapes[0].block - 1
        kinds = range(NUM_CLASSES)
        # Of all lanes so far: the priors of a new text.
        self._common = [_ClassRecord(prior_of(k, self._num_slots), self._num_slots) for k in kinds]
        self._lanes = [_LaneCopies([]) for _ in range(num_lanes)]
        for lane in range(num_lanes):
            self.start(lane)

    def refresh(self) -> None:
        """Do nothing: it lives as long as this process."""

    def check_alive(self) -> None:
        """Do nothing: it lives as long as this process."""

    def start(self, lane: int) -> None:
        self._lanes[lane] = _LaneCopies([record.as_prior() for record in self._common])

    def promise(self, anchor: Anchor) -> Promise | None:
        if anchor.text is None:
            return None
        copies = self._lanes[anchor.lane]
        self._look(copies, anchor)
        if not copies.tokens:
            return None
        taus = copies.records[copies.kind].taus
        num_slots = len(copies.tokens)
        return Promise(taus if num_slots == self._num_slots else taus[: num_slots + 1])

    def promise_after(self, lane: int) -> Promise | None:
        """A match grows by one token at most, so that its class bounds what comes."""
        copies = self._lanes[lane]
        if copies.end < 0:
            return None
        kinds = [*range(class_of(max(copies.length, CLASSES[0] - 1) + 1) + 1)]
        kinds += range(len(CLASSES), NUM_CLASSES) if copies.is_lost else ()
        taus = [copies.records[kind].taus for kind in kinds]
        if len(taus) != len(copies.after[0]) or not all(map(is_, taus, copies.after[0])):
            copies.after = taus, Promise([max(each) for each in zip(*taus, strict=True)])
        return copies.after[1]

    def propose(self, anchors: Sequence[Anchor], shape: RoundShape) -> Proposal:
        """Chains of `shape.block` rows at most; rows for which there is nothing to copy repeat the
        anchor.
        """
        rows = []
        for anchor in anchors:
            copies = self._lanes[anchor.lane]
            if anchor.text is not None:
                self._look(copies, anchor)
            tokens = copies.tokens[: shape.block - 1] if anchor.text is not None else []
            copies.num_filled = len(tokens)
            padding = [anchor.token] * (shape.num_rows - 1 - len(tokens))
            rows.append([anchor.token, *tokens, *padding])
        parents = None
        if shape.budget is not None:
            chain = [row - 1 if row < shape.block else 0 for row in range(shape.num_rows)]
            parents = on_host([chain] * len(anchors), np.int32)
        return Proposal(on_host(rows, np.int64), parents)

    def in_rounds(self, shape: RoundShape, end: int) -> None:
        return None  # the host copies

    def num_proposed(self, lane: int, shape: RoundShape) -> int:
        return self._lanes[lane].num_filled

    def _look(self, copies: _LaneCopies, anchor: Anchor) -> None:
        """Take up the tokens that have come, and find what follows the text's end."""
        assert anchor.text is not None
        ids, index = anchor.text
        index.extend(ids, index.num_tokens)
        if index.end == copies.end:
            return
        self._learn(copies, index)
        place, copies.length, is_resumed = index.find()
        copies.kind = class_of(copies.length, is_resumed=is_resumed)
        copies.end, copies.is_lost = index.end, index.is_lost
        copies.tokens = index.copied(place, self._num_slots)
        if copies.tokens and copies.kind not in copies.watched:
            copies.watched[copies.kind] = _Watched(place, index.end, len(copies.tokens))

    def _learn(self, copies: _LaneCopies, index: CopyIndex) -> None:
        """Enter what the text has shown of the matches that are watched."""
        decided = []
        for kind, match in copies.watched.items():
            first, begin = match.num_right, match.begin + match.num_right
            most = match.num_slots - first
            num_right = index.num_equal(match.place + first, begin, most)
            match.num_right += num_right
            if num_right == most or begin + num_right < index.end:
                decided.append(kind)
                copies.records[kind].observe(match.num_slots, match.num_right)
                self._common[kind].observe(match.num_slots, match.num_right)
        for kind in decided:
            del copies.watched[kind]


def class_of(length: int, *, is_resumed: bool = False) -> int:
    """The class of a match of so many tokens, at least CLASSES[0] unless it `is_resumed`."""
    return len(CLASSES) + (length > 1) if is_resumed else bisect_right(CLASSES, length) - 1
