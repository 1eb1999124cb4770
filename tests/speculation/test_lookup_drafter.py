"""Proposals are copied from the lane's own text, and worth what the text itself has shown."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from luceasync.cyext.copies import CopyIndex
from luceasync.speculation.choice import LEAST_GAIN, Promise, RoundShape, StepCosts
from luceasync.speculation.drafter import Anchor, LiveText
from luceasync.speculation.lookup import (
    CLASSES,
    LookupDrafter,
    class_of,
    lookup_shapes,
    prior_of,
)
from luceasync.speculation.speculator import Speculator

SHAPES = lookup_shapes((32, 8))
BIG, SMALL = SHAPES


class Text:
    """A lane's tokens and their index."""

    def __init__(self, *tokens: int, lane: int = 0, num_tried: int = 16) -> None:
        self.lane = lane
        self.live = LiveText(array("i", tokens), CopyIndex(num_tried=num_tried))

    def say(self, *tokens: int) -> None:
        self.live.ids.extend(tokens)

    @property
    def anchor(self) -> Anchor:
        ids = self.live.ids
        return Anchor(self.lane, len(ids) - 1, ids[-1], self.live)


def rows_of(drafter: LookupDrafter, *texts: Text, shape: RoundShape = SMALL) -> list[list[int]]:
    return drafter.propose([text.anchor for text in texts], shape).tokens.tolist()


def promised(drafter: LookupDrafter, text: Text) -> Promise:
    promise = drafter.promise(text.anchor)
    assert promise is not None
    return promise


@pytest.fixture
def drafter() -> LookupDrafter:
    return LookupDrafter(SHAPES, num_lanes=3)


# --- proposals ----------------------------------------------------------------------------------


def test_what_followed_the_last_tokens_is_proposed(drafter):
    text = Text(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2)
    assert rows_of(drafter, text) == [[2, 3, 4, 5, 6, 7, 8, 9]]
    text.say(3)
    assert rows_of(drafter, text) == [[3, 4, 5, 6, 7, 8, 9, 10]]
    assert drafter.num_proposed(0, SMALL) == 7


def test_lanes_that_have_nothing_to_copy_repeat_their_last_token(drafter):
    nothing = Text(1, 2, 3, lane=1)
    assert drafter.promise(nothing.anchor) is None
    assert rows_of(drafter, Text(4, 5, 6, 4, 5), nothing) == [[5, 6, 4, 5, 6, 4, 5, 6], [3] * 8]
    assert (drafter.num_proposed(0, SMALL), drafter.num_proposed(1, SMALL)) == (7, 0)


def test_a_lane_without_an_index_has_nothing_to_copy(drafter):
    anchor = Anchor(0, 5, 9)
    assert drafter.promise(anchor) is None
    assert drafter.propose([anchor], SMALL).tokens.tolist() == [[9] * 8]


def test_a_lane_never_copies_from_another_one(drafter):
    assert drafter.promise(Text(*range(50), lane=0).anchor) is None
    assert drafter.promise(Text(7, 8, 9, lane=1).anchor) is None


def test_beside_trees_the_copy_is_a_chain_no_longer_than_they_are_deep(drafter):
    text = Text(1, 2, 3, 4, 5, 6, 7, 1, 2)
    proposal = drafter.propose([text.anchor], RoundShape(4, 6))
    assert proposal.tokens.tolist() == [[2, 3, 4, 5, 2, 2, 2]]
    assert proposal.parents is not None and proposal.parents.tolist() == [[-1, 0, 1, 2, 0, 0, 0]]


# --- promises -----------------------------------------------------------------------------------


def test_longer_matches_promise_more(drafter):
    promises = []
    for length in CLASSES:
        start = 1000 * length
        said = [*range(start, start + length + 40)]
        text = Text(*said, *said[:length])
        promises.append(promised(drafter, text).tau(BIG))
    assert promises == sorted(promises) and promises[0] > 1


def test_a_promise_ends_with_what_can_be_copied(drafter):
    text = Text(lane=0)
    text.live.copies.put_before(array("i", [1, 2, 3, 4]))
    text.say(1, 2)
    promise = promised(drafter, text)
    assert promise.tau(BIG) == promise.tau(SMALL) == promise.taus[2]


def repeat(drafter: LookupDrafter, text: Text, num_times: int, is_right: bool) -> None:
    """A text that keeps coming back to two tokens, behind which the same follows or something new;
    the drafter sees each token.
    """
    new = iter(range(1000, 10**6))
    for _ in range(num_times):
        following = range(3, 60) if is_right else [next(new) for _ in range(3)]
        for token in (next(new), 1, 2, *following):
            text.say(token)
            drafter.promise(text.anchor)


@pytest.mark.parametrize("is_right", [True, False])
def test_the_text_shows_what_copies_are_worth_without_any_round(drafter, is_right):
    text = Text(1, 2, *range(3, 60))
    before = prior_of(0, 31).taus(31)[31]
    repeat(drafter, text, 12, is_right)
    text.say(999, 1, 2)
    after = promised(drafter, text).tau(BIG)
    assert after > 20 if is_right else after < 1.2 < before


def test_a_record_is_of_one_class_of_lengths(drafter):
    text = Text(1, 2, *range(3, 60))
    repeat(drafter, text, 12, is_right=False)
    text.say(*range(20, 30))  # a match of ten tokens
    assert promised(drafter, text).tau(BIG) > 4


def test_a_new_text_begins_with_what_all_have_shown(drafter):
    repeat(drafter, Text(1, 2, *range(3, 60)), 40, is_right=False)
    before = prior_of(0, 31).taus(31)[31]
    drafter.start(2)
    text = Text(5, 6, 7, 8, 5, 6, lane=2)
    assert promised(drafter, text).tau(BIG) < before
    repeat(drafter, text, 12, is_right=True)
    text.say(999, 1, 2)
    assert promised(drafter, text).tau(BIG) > 10, "its own text outweighs that"


def test_no_token_leads_to_more_than_was_foreseen(drafter, monkeypatch):
    monkeypatch.setattr(drafter, "_learn", lambda *args: None)  # records stay as they are
    choose = random.Random(0)
    text, copied = Text(1, num_tried=1000), 0
    for _ in range(600):
        if choose.random() < 0.1:
            copied = choose.randrange(len(text.live.ids))
        text.say(text.live.ids[copied] if choose.random() < 0.9 else choose.randrange(2, 99))
        copied += 1
        after = drafter.promise_after(0)
        promise = drafter.promise(text.anchor)
        if promise is not None and after is not None:
            assert all(x <= y for x, y in zip(promise.taus, after.taus, strict=False))


@pytest.mark.parametrize(
    ("length", "kind"), [(2, 0), (3, 1), (4, 2), (5, 2), (6, 3), (8, 3), (15, 4), (16, 5), (64, 6)]
)
def test_lengths_are_in_classes(length: int, kind: int):
    assert class_of(length) == kind


def test_copies_that_were_resumed_are_classes_of_their_own():
    assert [class_of(length, is_resumed=True) for length in (1, 2, 7)] == [7, 8, 8]


def test_behind_a_changed_word_a_copy_is_worth_more_than_a_match_of_one_token(drafter):
    text = Text(*range(10, 40), 7, *range(10, 25))
    drafter.promise(text.anchor)
    text.say(99)
    assert drafter.promise(text.anchor) is None
    text.say(26)
    assert promised(drafter, text).tau(BIG) > 3
    assert rows_of(drafter, text) == [[26, 27, 28, 29, 30, 31, 32, 33]]


def test_rounds_are_chains_named_by_the_drafter():
    shapes: Sequence[RoundShape] = lookup_shapes()
    assert [s.num_rows for s in shapes] == [32, 16, 8, 4]
    assert {s.drafter for s in shapes} == {"lookup"} and {s.budget for s in shapes} == {None}


def test_what_a_copy_has_to_gain_also_holds_in_rehearsals(drafter):
    costs, text = StepCosts(), Text(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2)
    for shape, seconds in ((None, 1.0), (SMALL, 1.2), (BIG, 30.0)):
        for _ in range(8):
            costs.observe(1, shape, seconds)
    tau = promised(drafter, text).tau(SMALL)
    for gain, pays in ((tau / 1.2 * 0.99, True), (tau / 1.2 * 1.01, False)):
        ahead_s = gain - LEAST_GAIN  # a plain step takes 1 s
        speculator = Speculator(None, [drafter], 3, costs, ahead_s=ahead_s).rehearsing()
        found = speculator.plan([0], alone=False, promises=speculator.promises([text.anchor]))
        assert bool(found.speculating) == pays
