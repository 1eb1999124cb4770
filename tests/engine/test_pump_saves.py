"""When a lane's prompt and its answer are saved, with a target that counts instead of computing."""

from __future__ import annotations

import pytest

from luceasync.engine.pump import LINGER_S, Fault, Pump
from tests.engine.pumps import CountingTarget, make_pump


def test_a_prompt_is_saved_while_the_device_computes_or_after_the_delivery(
    make_prepared,
):
    for beside, kinds in ((True, ["reset", "prefill", "save"]), (False, ["reset", "prefill"])):
        target = CountingTarget()
        pump = make_pump(target, memory_bytes=2**20, runs_async=beside)
        pump.submit([make_prepared(0, [0] * 10)])
        assert [delta.token_ids for _, delta in pump.step()] == [(1,)]
        assert [call[0] for call in target.calls] == kinds


def kinds_of(target: CountingTarget) -> list[str]:
    return [call[0] for call in target.calls]


@pytest.mark.parametrize(
    ("recurrent", "kinds"),
    [(False, ["reset", "prefill", "decode", "save"]), (True, ["reset", "prefill", "save"])],
)
def test_rows_of_a_prompt_are_saved_beside_the_next_step_and_states_before_it(
    make_prepared, recurrent, kinds
):
    target, emitted = CountingTarget(), []
    pump = make_pump(target, memory_bytes=2**20, runs_async=True, recurrent=recurrent)
    pump.submit([make_prepared(0, [0] * 10)])
    pump.step(emitted.extend), pump.step(emitted.extend)
    assert [delta.token_ids for _, delta in emitted] == [(1,)]
    assert kinds_of(target)[: len(kinds)] == kinds
    assert kinds_of(target).count("save") == 1


def test_a_choice_that_waits_finds_the_prompt_that_was_to_be_saved_late(make_prepared):
    target, emitted = CountingTarget(), []
    pump = make_pump(target, memory_bytes=2**20, runs_async=True)
    pump.submit([make_prepared(0, [0] * 10)])
    pump.step(emitted.extend)
    pump.submit([make_prepared(1, [*[0] * 10, 3])])
    pump.step(emitted.extend)
    assert kinds_of(target)[:5] == ["reset", "prefill", "save", "reset", "restore"]


def test_a_prompt_that_was_to_be_saved_late_is_saved_if_its_choice_ends(make_prepared):
    for end in (lambda pump: pump.cancel(0), lambda pump: pump.save_all()):
        target = CountingTarget()
        pump = make_pump(target, memory_bytes=2**20, runs_async=True)
        pump.submit([make_prepared(0, [0] * 10)])
        pump.step(lambda emitted: None)
        assert "save" not in kinds_of(target)
        end(pump)
        assert ("save", 0, 0, 10) in target.calls


def test_after_a_failed_step_nothing_is_saved_late(make_prepared):
    target = CountingTarget()
    pump = make_pump(target, memory_bytes=2**20, runs_async=True)
    pump.submit([make_prepared(0, [0] * 10)])
    pump.step(lambda emitted: None)
    pump.recover(Fault("broken", "failed", "decode"))
    pump.begin_again()
    pump.step(lambda emitted: None)
    assert "save" not in kinds_of(target)


def ask_once(pump: Pump, prepared) -> None:
    """Answer one request with two tokens; its lane is still to be saved."""
    pump.submit([prepared])
    for _ in range(2):
        pump.step(lambda emitted: None)
    assert not pump.scheduler.running
    pump.lanes.delivered()


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_lane_is_saved_beside_the_next_requests_decode_steps(make_prepared, recurrent):
    target = CountingTarget()
    pump = make_pump(target, memory_bytes=2**20, runs_async=True, recurrent=recurrent)
    ask_once(pump, make_prepared(0, [0] * 10, max_tokens=2))
    assert 0 < pump.pause_s <= LINGER_S
    del target.calls[:]
    pump.submit([make_prepared(1, [3] * 10, max_tokens=9)])
    for _ in range(4):
        pump.step(lambda emitted: None)
    before = target.calls[: target.calls.index(("save", 0, 10, 11))]
    assert [call for call in before if call[0] != "save"] == [
        ("reset", 1),
        ("prefill", 1, 0, 10),
        ("decode", (1,), (10,)),
        *([] if recurrent else [("decode", (1,), (11,))]),  # the prompt's rows came first
    ]


@pytest.mark.parametrize(
    ("num_lanes", "prompt"),
    [(2, [*[0] * 10, 1, 2, 3]), (1, [3] * 10), (2, [3] * 300)],
    ids=["continued", "no lane is free", "a long prompt"],
)
def test_a_lane_that_is_needed_is_saved_first(make_prepared, num_lanes, prompt):
    target = CountingTarget()
    pump = make_pump(target, num_lanes, memory_bytes=2**20, runs_async=True)
    ask_once(pump, make_prepared(0, [0] * 10, max_tokens=2))
    del target.calls[:]
    pump.submit([make_prepared(1, prompt, max_tokens=9)])
    pump.step(lambda emitted: None)
    assert target.calls[0] == ("save", 0, 10, 11)
    is_continued = prompt[:11] == [*[0] * 10, 1]
    assert is_continued == (("restore", 0, 11) in target.calls)


def test_without_another_request_a_lane_is_saved_when_the_engine_has_nothing_else_to_do(
    make_prepared,
):
    target = CountingTarget()
    pump = make_pump(target, memory_bytes=2**20, runs_async=True)
    ask_once(pump, make_prepared(0, [0] * 10, max_tokens=2))
    pump.step(lambda emitted: None)
    assert ("save", 0, 10, 11) in target.calls
    assert not pump.lanes.has_deferred


def test_a_free_lane_is_emptied_before_the_next_request_comes(make_prepared):
    target = CountingTarget()
    pump = make_pump(target, runs_async=True)
    for stream in range(2):
        pump.submit([make_prepared(stream, [0], max_tokens=1)])
        for _ in range(4):
            pump.step(lambda emitted: None)
    assert kinds_of(target) == ["reset", "prefill", "reset", "prefill", "reset"]
