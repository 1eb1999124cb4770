"""The map of one lane, compared with a plain list of chunks and pages."""

from __future__ import annotations

import math
import os
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from luceasync.kv.residency import (
    SINK_CHUNKS,
    TAIL_CHUNKS,
    NoVictim,
    Residency,
    ResidencyChange,
    chunks_of,
    min_pages,
)

# 10,000 steps in the long form: LUCEASYNC_TEST_STEPS=10000.
NUM_STEPS = int(os.environ.get("LUCEASYNC_TEST_STEPS", "60"))


def grown(num_pages: int, num_chunks: int, batch_chunks: int = 1) -> Residency:
    """A lane that has grown chunk by chunk."""
    residency = Residency(num_pages, batch_chunks=batch_chunks)
    for end in range(1, num_chunks + 1):
        residency.apply(residency.extension(end))
    return residency


def test_pages_are_handed_out_in_order_while_there_are_any():
    residency = Residency(8, order=[3, 1, 0, 2, 7, 6, 5, 4])
    assert residency.extension(3).given == ((0, 3), (1, 1), (2, 0))


def test_the_oldest_leaves_and_neither_sink_nor_tail_does():
    residency = grown(7, 7)
    assert residency.extension(8).evicted == (1,)
    assert sorted(grown(7, 20).pages) == [0, 14, 15, 16, 17, 18, 19]


def test_what_is_worth_least_leaves_first_and_what_nobody_valued_last():
    residency = grown(8, 8)
    residency.score_all({1: 0.5, 2: 0.1, 3: 0.1})
    assert residency.extension(9).evicted == (2,)
    residency.score_all({1: 0.5})
    assert residency.extension(9).evicted == (1,)


def test_what_is_pinned_stays_and_comes_with_a_restore():
    residency = Residency(9)
    residency.pin([1, 12])
    for end in range(1, 21):
        residency.apply(residency.extension(end))
    assert {0, 1, 12} <= residency.pages.keys()
    residency.clear()
    residency.pin([1, 12])
    assert {0, 1, 12, 16, 17, 18, 19} <= {c for c, _ in residency.placement(20).given}


def test_a_restored_lane_holds_what_was_worth_most_and_else_the_newest():
    residency = Residency(8)
    residency.score_all({3: 2.0, 5: 1.0})
    assert [c for c, _ in residency.placement(20).given] == [0, 3, 5, 15, 16, 17, 18, 19]


def test_a_challenger_takes_a_page_by_a_margin_and_the_worst_one_first():
    residency = grown(9, 20)  # 0, 12 to 19
    residency.score_all({12: 1.0, 13: 0.4, 14: 0.5, 15: 0.1, 3: 1.2, 4: 0.45, 5: 0.49})
    change = residency.reselection(1.25, 4)  # 5 is worth less than 1.25 times what 13 is
    assert change == ResidencyChange(20, (15,), ((3, residency.pages[15]),), change.version)


def test_no_more_than_so_many_move():
    residency = grown(16, 40)
    residency.score_all({c: float(c < 20) for c in range(40)})
    assert len(residency.reselection(1.25, 4).given) == 4


def test_a_change_without_a_victim_is_refused_whole():
    residency = grown(7, 7)
    before = dict(residency.pages)
    with pytest.raises(NoVictim, match="chunks need pages"):
        residency.extension(14)
    assert residency.pages == before and residency.num_chunks == 7
    with pytest.raises(NoVictim, match="0 may be"):
        residency.pin([3])
    assert not residency.pinned


def test_a_change_of_another_map_is_refused():
    residency = grown(7, 7)
    stale = residency.extension(8)
    residency.score_all({})
    with pytest.raises(ValueError, match="version"):
        residency.apply(stale)


def test_a_worth_that_is_no_number_is_none():
    residency = grown(8, 8)
    residency.score_all({1: 0.5, 2: math.nan})
    assert residency.extension(9).evicted == (2,)


@pytest.mark.parametrize("batch", [1, 2, 5, 40])
def test_from_the_least_pages_on_a_lane_always_grows(batch: int):
    residency = Residency(min_pages(batch), batch_chunks=batch)
    for end in range(0, 400, batch):
        residency.apply(residency.extension(end))
    with pytest.raises(AssertionError, match="at least"):
        Residency(min_pages(batch) - 1, batch_chunks=batch)


def test_spans_are_told_as_the_chunks_that_they_touch():
    assert chunks_of([(0, 1), (63, 65), (640, 640)], 64) == {0, 1}


class LaneMachine(RuleBasedStateMachine):
    """`here` is a list of (chunk, page), in the order in which pages were given."""

    @initialize(extra=st.integers(0, 12), batch=st.integers(1, 6))
    def begin(self, extra: int, batch: int) -> None:
        self.batch = batch
        self.num_pages = min_pages(batch) + extra
        self.residency = Residency(self.num_pages, batch_chunks=batch)
        self.here: list[tuple[int, int]] = []
        self.num_chunks = 0
        self.scores: dict[int, float] = {}
        self.pinned: set[int] = set()

    def kept(self, kept_from: int) -> set[int]:
        tail = {c for c, _ in self.here if c >= kept_from}
        return {*range(SINK_CHUNKS), *tail, *self.pinned}

    def leaving(self, kept_from: int) -> list[int]:
        kept = self.kept(kept_from)
        here = [c for c, _ in self.here if c not in kept]
        return sorted(here, key=lambda c: self.scores.get(c, math.inf))  # stable: the oldest first

    def take(self, change: ResidencyChange) -> None:
        pages = dict(self.here)
        free = set(range(self.num_pages)) - set(pages.values())
        free |= {pages[c] for c in change.evicted}
        assert {page for _, page in change.given} <= free
        self.here = [(c, p) for c, p in self.here if c not in change.evicted] + [*change.given]
        self.num_chunks = change.num_chunks
        self.residency.apply(change)

    @rule(num_new=st.integers(0, 6))
    def extend(self, num_new: int) -> None:
        end = self.num_chunks + min(num_new, self.batch)
        kept_from = min(end - TAIL_CHUNKS, self.num_chunks - 1)
        num_missing = end - self.num_chunks - (self.num_pages - len(self.here))
        expected = sorted(self.leaving(kept_from)[: max(num_missing, 0)])
        cleared = self.residency.clearing(end)
        assert list(cleared.evicted) == expected and not cleared.given
        change = self.residency.extension(end)
        assert list(change.evicted) == expected
        assert [c for c, _ in change.given] == [*range(self.num_chunks, end)]
        self.take(change)

    @rule(num_new=st.integers(0, 6))
    def clear_room(self, num_new: int) -> None:
        self.take(self.residency.clearing(self.num_chunks + min(num_new, self.batch)))

    @rule(seed=st.integers(0, 2**32))
    def value(self, seed: int) -> None:
        worth = random.Random(seed).choices([0.0, 0.1, 0.2, 0.5, 1.0, math.nan], k=self.num_chunks)
        found = dict(enumerate(worth))
        self.residency.score_all(found)
        self.scores = {c: 0.0 if math.isnan(s) else s for c, s in found.items()}

    @precondition(lambda self: self.scores)
    @rule(num_most=st.integers(1, 8))
    def reselect(self, num_most: int) -> None:
        here = {c for c, _ in self.here}
        absent = [c for c in self.scores if c not in here and c < self.num_chunks]
        absent.sort(key=lambda c: (-self.scores[c], -c))
        victims = self.leaving(self.num_chunks - TAIL_CHUNKS)
        num_free = self.num_pages - len(here)
        chosen, gone = [], []
        for c in absent[:num_most]:
            if len(chosen) >= num_free:
                if not victims or self.scores[c] <= 1.25 * self.scores.get(victims[0], math.inf):
                    break
                gone.append(victims.pop(0))
            chosen.append(c)
        change = self.residency.reselection(1.25, num_most)
        assert list(change.evicted) == sorted(gone)
        assert [c for c, _ in change.given] == sorted(chosen)
        self.take(change)

    @rule(chunk=st.integers(0, 60))
    def pin(self, chunk: int) -> None:
        beside = {*self.pinned, chunk} - set(range(SINK_CHUNKS))
        if len(beside) > self.num_pages - min_pages(self.batch):
            with pytest.raises(NoVictim):
                self.residency.pin([chunk])
        else:
            self.residency.pin([chunk])
            self.pinned.add(chunk)

    @rule()
    def unpin(self) -> None:
        self.residency.unpin_all()
        self.pinned.clear()

    @rule(num_chunks=st.integers(0, 60))
    def restore(self, num_chunks: int) -> None:
        pinned, scores = self.pinned, self.scores
        self.reset()
        self.residency.pin(pinned)
        self.residency.score_all(scores)
        self.pinned, self.scores = pinned, scores
        change = self.residency.placement(num_chunks)
        assert len(change.given) == min(num_chunks, self.num_pages) and not change.evicted
        given = {c for c, _ in change.given}
        kept = {c for c in range(num_chunks) if c < SINK_CHUNKS or c >= num_chunks - TAIL_CHUNKS}
        kept |= {c for c in pinned if c < num_chunks}
        assert kept <= given
        left = [scores.get(c, 0.0) for c in range(num_chunks) if c not in given]
        assert all(scores.get(c, 0.0) >= max(left, default=0.0) for c in given - kept)
        self.take(change)

    @rule()
    def reset(self) -> None:
        self.residency.clear()
        self.here, self.num_chunks, self.scores, self.pinned = [], 0, {}, set()

    @invariant()
    def pages_are_those_of_the_list(self) -> None:
        if hasattr(self, "residency"):
            assert dict(self.residency.pages) == dict(self.here)
            assert len({p for _, p in self.here}) == len(self.here) <= self.num_pages
            assert self.residency.num_chunks == self.num_chunks
            assert self.residency.num_absent == self.num_chunks - len(self.here)


TestLane = LaneMachine.TestCase
TestLane.settings = settings(
    max_examples=max(20, NUM_STEPS // 200),
    stateful_step_count=min(NUM_STEPS, 200),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
