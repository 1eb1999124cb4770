"""Prompts are kept before lanes are left, each once, and nothing of what cannot be trusted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from luceasync.engine.steps import Leftovers


class Listener:
    """In place of prefixes and roster: what it was told, in order; can be made to fail."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.failing = ""

    def _hear(self, name: str, *args) -> None:
        self.calls.append((name, *args))
        if name == self.failing:
            raise ZeroDivisionError("no room")

    def prefilled(self, lease, lane, end, logits) -> None:
        self._hear("prefilled", lease, lane, end)

    def finished(self, lease, lane, end, *, is_cut) -> None:
        self._hear("finished", lease, end, is_cut)

    def disown(self, lease) -> None:
        self._hear("disown", lease)

    def release(self, lease) -> None:
        self._hear("release", lease)

    def vacate(self, lane) -> None:
        self._hear("vacate", lane)

    def free(self, lane) -> None:
        self._hear("free", lane)


def choice(name: str, lane: int = 0, *, is_sound=True, is_restoring=False):
    return SimpleNamespace(
        lease=name,
        lane=lane,
        is_sound=is_sound,
        is_restoring=is_restoring,
        num_committed=9,
        prepared=SimpleNamespace(detokenizer=SimpleNamespace(stopped=False)),
    )


@pytest.fixture
def heard() -> Listener:
    return Listener()


@pytest.fixture
def leftovers(heard) -> Leftovers:
    return Leftovers(heard, heard, heard)


def test_prompts_are_kept_first_then_lanes_are_freed(leftovers, heard):
    ending = choice("a", lane=2)
    leftovers.ended(ending)
    leftovers.prefilled(choice("b", lane=1), 64, None)
    assert leftovers
    leftovers.clear()
    assert heard.calls == [
        ("prefilled", "b", 1, 64),
        ("finished", "a", 9, False),
        ("free", 2),
        ("release", "a"),
    ]
    assert ending.lane is None
    assert not leftovers
    leftovers.clear()
    assert len(heard.calls) == 4


def test_what_has_been_told_waits_no_more_until_it_is_done(leftovers):
    leftovers.told()
    assert not leftovers.are_told  # there is nothing
    leftovers.ended(choice("a"))
    assert not leftovers.are_told
    leftovers.told()
    assert leftovers.are_told
    leftovers.clear()
    leftovers.ended(choice("b"))
    assert not leftovers.are_told


def test_a_lane_is_free_whoever_cannot_be_told_that_it_is_empty(heard):
    leftovers = Leftovers(heard, heard, heard)
    heard.failing = "vacate"
    leftovers.ended(choice("a", lane=2))
    with pytest.raises(ZeroDivisionError):
        leftovers.clear()
    assert [call[0] for call in heard.calls] == ["finished", "vacate", "free", "release"]
    assert not leftovers


@pytest.mark.parametrize(
    ("state", "first"),
    [({"is_sound": False}, [("disown", "a")]), ({"is_restoring": True}, [])],
)
def test_a_lane_without_a_sound_end_is_freed_without_being_kept(leftovers, heard, state, first):
    leftovers.ended(choice("a", **state))
    leftovers.clear()
    assert heard.calls == [*first, ("free", 0), ("release", "a")]


def test_after_a_failure_nothing_is_kept(leftovers, heard):
    leftovers.prefilled(choice("b"), 64, None)
    leftovers.ended(choice("a"))
    leftovers.distrust()
    leftovers.clear()
    assert heard.calls == [("disown", "a"), ("free", 0), ("release", "a")]


def test_what_has_failed_once_is_not_tried_again(leftovers, heard):
    leftovers.prefilled(choice("b"), 64, None)
    leftovers.ended(choice("a"))
    heard.failing = "prefilled"
    with pytest.raises(ZeroDivisionError):
        leftovers.clear()
    leftovers.clear()
    assert [call[0] for call in heard.calls] == ["prefilled", "finished", "free", "release"]


@pytest.mark.parametrize(("failing", "is_sound"), [("finished", True), ("disown", False)])
def test_a_lane_that_could_not_be_kept_is_free_all_the_same(leftovers, heard, failing, is_sound):
    leftovers.ended(choice("a", lane=2, is_sound=is_sound))
    heard.failing = failing
    with pytest.raises(ZeroDivisionError):
        leftovers.clear()
    assert heard.calls == [
        (failing, "a", *((9, False) if is_sound else ())),
        ("free", 2),
        ("release", "a"),
    ]
    assert not leftovers
