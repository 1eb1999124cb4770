"""Prefixes are saved before lanes are freed, each once, and nothing that cannot be trusted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from luceasync.engine.lanes import LaneContents


class Recorder:
    """A prefix cache, paging and a scheduler that record their calls; one of these may fail."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.failing = ""

    def _record(self, name: str, *args) -> None:
        self.calls.append((name, *args))
        if name == self.failing:
            raise ZeroDivisionError("no room")

    def save_prompt(self, lease, lane, end, logits) -> None:
        self._record("save_prompt", lease, lane, end)

    def save_sequence(self, lease, lane, end, *, is_cut=False, is_ahead=False) -> None:
        assert not is_ahead
        self._record("save_sequence", lease, end, is_cut)

    def drop(self, lease) -> None:
        self._record("drop", lease)

    def release(self, lease) -> None:
        self._record("release", lease)

    def admit(self, lease) -> None:
        self._record("admit", lease)

    def vacate(self, lane) -> None:
        self._record("vacate", lane)

    def free(self, lane) -> None:
        self._record("free", lane)


class Choice:
    """A generation, as far as lanes look at it."""

    num_committed = 9
    is_ahead = False
    prepared = SimpleNamespace(detokenizer=SimpleNamespace(stopped=False))

    def __init__(self, lease: str, lane: int = 0, *, is_sound=True, is_restoring=False) -> None:
        self.lease, self.lane = lease, lane
        self.is_sound, self.is_restoring = is_sound, is_restoring

    @property
    def on_lane(self) -> int:
        return self.lane

    def leave_lane(self, speculation) -> None:
        self.lease, self.lane = f"next {self.lease}", None


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def lanes(recorder) -> LaneContents:
    return LaneContents(recorder, recorder, recorder.free)


def test_prompts_are_saved_first_then_lanes_are_freed(lanes, recorder):
    ending = Choice("a", lane=2)
    lanes.release_later(ending)
    lanes.save_later(Choice("b", lane=1), 64, None)
    assert lanes.has_deferred
    lanes.release_deferred()
    assert recorder.calls == [
        ("save_prompt", "b", 1, 64),
        ("save_sequence", "a", 9, False),
        ("vacate", 2),
        ("free", 2),
        ("release", "a"),
    ]
    assert ending.lane is None
    assert not lanes.has_deferred
    lanes.release_deferred()
    assert len(recorder.calls) == 5


def test_what_is_deferred_waits_for_its_delivery(lanes):
    lanes.delivered()
    assert lanes.delivered_at_s is None  # nothing is deferred
    lanes.release_later(Choice("a"))
    assert lanes.delivered_at_s is None
    lanes.delivered()
    assert lanes.delivered_at_s is not None
    lanes.release_deferred()
    lanes.release_later(Choice("b"))
    assert lanes.delivered_at_s is None


@pytest.mark.parametrize("failing", ["save_sequence", "vacate"])
def test_a_preempted_lane_is_saved_and_free_whatever_fails(lanes, recorder, failing):
    generation = Choice("a", lane=2)
    recorder.failing = failing
    with pytest.raises(ZeroDivisionError):
        lanes.preempt(generation, None)
    names = [("save_sequence", "a", 9, False), ("vacate", 2), ("free", 2)]
    assert recorder.calls == [*names, ("release", "a"), ("admit", "next a")]
    assert generation.lane is None


@pytest.mark.parametrize(
    ("state", "first"),
    [({"is_sound": False}, [("drop", "a")]), ({"is_restoring": True}, [])],
)
def test_a_lane_without_a_sound_end_is_freed_without_being_saved(lanes, recorder, state, first):
    lanes.release_later(Choice("a", **state))
    lanes.release_deferred()
    assert recorder.calls == [*first, ("vacate", 0), ("free", 0), ("release", "a")]


def test_after_a_failure_nothing_is_saved(lanes, recorder):
    lanes.save_later(Choice("b"), 64, None)
    lanes.release_later(Choice("a"))
    lanes.distrust()
    lanes.release_deferred()
    assert [call[0] for call in recorder.calls] == ["drop", "vacate", "free", "release"]


def test_what_has_failed_once_is_not_tried_again(lanes, recorder):
    lanes.save_later(Choice("b"), 64, None)
    lanes.release_later(Choice("a"))
    recorder.failing = "save_prompt"
    with pytest.raises(ZeroDivisionError):
        lanes.release_deferred()
    lanes.release_deferred()
    names = ["save_prompt", "save_sequence", "vacate", "free", "release"]
    assert [call[0] for call in recorder.calls] == names


@pytest.mark.parametrize(
    ("failing", "is_sound"), [("save_sequence", True), ("drop", False), ("vacate", True)]
)
def test_a_lane_that_could_not_be_saved_is_free_all_the_same(lanes, recorder, failing, is_sound):
    lanes.release_later(Choice("a", lane=2, is_sound=is_sound))
    recorder.failing = failing
    with pytest.raises(ZeroDivisionError):
        lanes.release_deferred()
    assert recorder.calls[1:] == [("vacate", 2), ("free", 2), ("release", "a")]
    assert not lanes.has_deferred
