"""What a failed step ends, and what goes on after it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from luceasync.engine.pump import Fault, Pump
from luceasync.host_cache.copy_stream import Ticket
from luceasync.host_cache.nodes import Span
from tests.engine.pumps import CountingTarget, make_pump, run


class FailsOnce(CountingTarget):
    """The `number`th call of the named kind raises, after it was written down."""

    def __init__(self, kind: str, number: int = 1) -> None:
        super().__init__()
        self.kind, self.number = kind, number

    def _count(self, kind: str) -> None:
        num_calls = sum(call[0] == kind for call in self.calls)
        if kind == self.kind and num_calls == self.number:
            raise ZeroDivisionError("no way")

    def prefill(self, lane, begin, tokens, **asked):
        logits = super().prefill(lane, begin, tokens, **asked)
        self._count("prefill")
        return logits

    def decode(self, lanes, positions, tokens):
        logits = super().decode(lanes, positions, tokens)
        self._count("decode")
        return logits

    def reset(self, lane: int) -> None:
        super().reset(lane)
        self._count("reset")


FAULT = Fault("broken", "unavailable", "decode")


def fail_and_recover(pump: Pump, fault: Fault = FAULT) -> list:
    """Everything delivered until a step raises, and by the recovery."""
    emitted: list = []
    with pytest.raises(ZeroDivisionError):
        for _ in range(100):
            emitted += pump.step()
    emitted += pump.recover(replace(fault, during=pump.doing))
    pump.begin_again()
    return emitted


@pytest.mark.parametrize(("kind", "number"), [("prefill", 2), ("decode", 1), ("decode", 2)])
def test_a_failed_pass_ends_what_ran_and_waiting_choices_are_served(make_prepared, kind, number):
    asked = [([0] * 100, 3), ([3] * 70, 4), ([5] * 65, 2)]
    prepared = [make_prepared(i, ids, n) for i, (ids, n) in enumerate(asked)]
    target = FailsOnce(kind, number)
    pump = make_pump(target, memory_bytes=2**20)
    pump.submit(prepared)
    ended = {stream: d.finish for stream, d in fail_and_recover(pump) if d.finish}
    assert {(f.reason, f.error, f.error_kind) for f in ended.values()} == {
        ("error", "broken", "unavailable")
    }
    assert sorted(ended) == [0, 1]
    assert repr(pump) == "Pump(1 waiting, 0 prefilling, 0 decoding, 2 lanes free)"
    served = run(pump)
    assert [d.token_ids for _, d in served] == [(6,), (7,)]
    assert all(stream == 2 for stream, _ in served)


def test_what_a_failed_pass_left_is_not_restored(make_prepared):
    target = FailsOnce("decode")
    pump = make_pump(target, memory_bytes=2**20)
    pump.submit([make_prepared(0, [0] * 100, max_tokens=3)])
    fail_and_recover(pump)
    pump.submit([make_prepared(1, [0] * 100, max_tokens=3)])
    [*_, (_, last)] = run(pump)
    assert (last.finish.reason, last.finish.usage.cached_tokens) == ("length", 0)


def test_ends_of_a_failure_are_returned_before_any_lane_is_touched(make_prepared):
    target = FailsOnce("decode")
    pump = make_pump(target)
    pump.submit([make_prepared(0, [0])])
    with pytest.raises(ZeroDivisionError):
        for _ in range(9):
            pump.step()
    calls = list(target.calls)
    assert [(s, d.finish.reason) for s, d in pump.recover(FAULT)] == [(0, "error")]
    assert target.calls == calls


def test_a_recovery_resets_every_lane(make_prepared):
    target = FailsOnce("decode")
    pump = make_pump(target, num_lanes=3)
    pump.submit([make_prepared(0, [0])])
    fail_and_recover(pump)
    assert target.calls[-3:] == [("reset", 0), ("reset", 1), ("reset", 2)]


def test_a_choice_that_cannot_get_its_lane_ends_alone(make_prepared):
    pump = make_pump(FailsOnce("reset"))
    pump.submit([make_prepared(0, [0], max_tokens=2), make_prepared(1, [3], max_tokens=2)])
    assert [(s, d.finish.reason) for s, d in fail_and_recover(pump)] == [(0, "error")]
    assert [(s, d.finish.reason) for s, d in run(pump) if d.finish] == [(1, "length")]


@pytest.mark.parametrize(("during", "ended"), [("command", [0, 1]), ("decode", [0])])
def test_after_a_failed_command_no_choice_waits_for_its_result(make_prepared, during, ended):
    pump = make_pump(CountingTarget(), num_lanes=1)
    pump.submit([make_prepared(stream, [0]) for stream in range(3)])
    pump.step()
    pump.scheduler.waiting[0].lease.awaited = {b"a node of the disk"}
    emitted = pump.recover(Fault("broken", "failed", during))
    pump.begin_again()
    assert sorted(s for s, d in emitted if d.finish) == ended


def test_choices_that_could_not_be_submitted_end_too(make_prepared, monkeypatch):
    pump = make_pump(CountingTarget())
    monkeypatch.setattr(pump.lanes.prefixes, "admit", lambda lease: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pump.submit([make_prepared(0, [0]), make_prepared(1, [0])])
    emitted = pump.recover(Fault("broken", "failed", "command"))
    assert [(s, d.finish.reason) for s, d in emitted] == [(0, "error"), (1, "error")]
    assert pump.num_waiting == 0


def test_ends_lost_by_a_failed_recovery_are_returned_by_the_next(make_prepared):
    pump = make_pump(FailsOnce("decode"))
    pump.submit([make_prepared(0, [0])])
    with pytest.raises(ZeroDivisionError):
        for _ in range(9):
            pump.step()
    pump.lanes.prefixes.drop = lambda lease: 1 / 0
    with pytest.raises(ZeroDivisionError):
        pump.recover(FAULT)
    assert [(s, d.finish.reason) for s, d in pump.recover(FAULT)] == [(0, "error")]


def test_ends_made_by_a_failed_command_are_returned_by_the_recovery(make_prepared):
    class Full(CountingTarget):
        def save(self, lane: int, node: str, span: Span) -> Ticket:
            raise ZeroDivisionError("the device is gone")

    pump = make_pump(Full(), num_lanes=1, memory_bytes=10_000)
    running, waiting = make_prepared(0, [0] * 70), make_prepared(0, [0])
    pump.submit([running, replace(waiting, index=1)])
    pump.step()
    with pytest.raises(ZeroDivisionError):
        pump.cancel(0)  # of the first chunk nothing was kept yet
    emitted = pump.recover(Fault("broken", "failed", "command"))
    assert sorted((d.index, d.finish.reason) for _, d in emitted if d.finish) == [
        (0, "cancelled"),
        (1, "cancelled"),
    ]
    assert repr(pump) == "Pump(0 waiting, 0 prefilling, 0 decoding, 1 lanes free)"


def test_only_completed_passes_are_counted_by_their_kind(make_prepared):
    pump = make_pump(FailsOnce("decode", 2))
    pump.submit([make_prepared(0, [0] * 100, max_tokens=9)])
    fail_and_recover(pump)
    kinds = ("prefill", "decode", "between", "command")
    assert [pump.num_completed(kind) for kind in kinds] == [2, 1, 3, 3]
