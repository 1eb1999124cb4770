"""The engine's thread: commands in, deltas out, and an end that always comes."""

from __future__ import annotations

import asyncio
import re
import threading
from types import SimpleNamespace

import pytest

from luceasync.engine import thread as module
from luceasync.engine.pump import Fault
from luceasync.engine.thread import (
    MAX_IN_A_ROW,
    SOUND_LIFE_S,
    EngineThread,
    Failures,
    LoadedEngine,
    RestartBackoff,
    fault_of,
)
from luceasync.errors import ModelError, StageFailed

DEADLINE_S = 10.0


class Pump:
    """Emits one entry of `emitted` a step; raises it if it is an exception."""

    def __init__(self, *emitted, can_recover: bool = True) -> None:
        self.emitted = list(emitted)
        self.can_recover = can_recover
        self.num_steps = 0
        self.doing = "between"
        self.recovered_from: list[Fault] = []
        self.num_begun_again = 0
        self.failed_with: list[str] = []

    @property
    def pause_s(self) -> float:
        return 0.0 if self.emitted else 1.0

    def listen(self, post) -> None:
        self.post = post

    def step(self, deliver):
        self.doing = "decode"
        emitted = self.emitted.pop(0) if self.emitted else []
        if isinstance(emitted, Exception):
            raise emitted
        self.num_steps += 1
        return list(emitted)

    def num_completed(self, during):
        return self.num_steps

    def recover(self, fault):
        self.recovered_from.append(fault)
        if not self.can_recover:
            self.doing = "between"
            raise OSError("no device")
        return [("ended", fault.words)]

    def begin_again(self) -> None:
        self.num_begun_again += 1

    def give_up(self, fault: Fault, back_in_s: int):
        return [("all", fault.words)]

    def save_all(self) -> None:
        self.is_kept = True

    def fail_all(self, detail: str, kind: str = "failed"):
        self.failed_with.append(detail)
        return [("all", detail)]


class Listener:
    def __init__(self) -> None:
        self.pump = self.error = None
        self.details: list[str] = []
        self.delivered: list = []
        self.threads: set[int] = set()
        self.is_loaded = asyncio.Event()

    def loaded(self, pump, error) -> None:
        self.pump, self.error = pump, error
        self.threads.add(threading.get_ident())
        self.is_loaded.set()

    def failed(self, detail: str, back_in_s: int) -> None:
        self.details.append(detail)

    def deliver(self, emitted) -> None:
        self.delivered += emitted
        self.threads.add(threading.get_ident())


async def start(
    pump: Pump | None, closed: list, *later: Pump | Exception
) -> tuple[EngineThread, Listener]:
    """A thread that loads `pump`, and one of `later` after each failure."""
    lives: list = [pump or ModelError("no weights here"), *later]

    def load() -> LoadedEngine:
        life = lives.pop(0)
        if isinstance(life, Exception):
            raise life
        return LoadedEngine(life, lambda: closed.append(True))

    listener = Listener()
    thread = EngineThread(load, listener, release=lambda: closed.append("released"))
    thread.start()
    async with asyncio.timeout(DEADLINE_S):
        await listener.is_loaded.wait()
    return thread, listener


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How the garbage of an engine is looked for. All that this process has imported and collected
    would be looked at, and from then on again and again: it is frozen for that reason.
    """
    swept: list[str] = []
    calls = {name: lambda name=name: swept.append(name) for name in ("unfreeze", "collect")}
    monkeypatch.setattr(module, "gc", SimpleNamespace(**calls))
    return swept


async def test_deltas_are_delivered_in_order_on_the_loop():
    closed: list = []
    thread, listener = await start(Pump([1], [2, 3], [4]), closed)
    async with asyncio.timeout(DEADLINE_S):
        while len(listener.delivered) < 4:
            await asyncio.sleep(0.001)
    await thread.join()
    assert listener.delivered == [1, 2, 3, 4, ("all", "the server is shutting down")]
    assert listener.threads == {threading.get_ident()}
    assert closed == [True, "released"]


async def test_a_call_returns_when_its_command_was_run():
    thread, listener = await start(Pump(), [])
    seen: list = []
    await thread.call(lambda pump: seen.append(pump) or [7], DEADLINE_S)
    assert seen == [listener.pump]
    await thread.join()
    assert 7 in listener.delivered


async def test_a_call_that_is_not_run_in_time_raises():
    thread, _ = await start(Pump(), [])
    hold = threading.Event()
    thread.post(lambda pump: (hold.wait(DEADLINE_S) and []) or [])
    with pytest.raises(TimeoutError):
        await thread.call(lambda pump: [], 0.01)
    hold.set()
    await thread.join()


async def test_the_listener_hears_that_a_model_cannot_be_loaded():
    thread, listener = await start(None, [])
    await thread.join()
    assert listener.pump is None
    assert str(listener.error) == "no weights here"


async def until(condition) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_after_a_failure_running_requests_end_and_steps_go_on():
    pump = Pump([1], ZeroDivisionError("no way"), [2])
    thread, listener = await start(pump, [])
    await until(lambda: 2 in listener.delivered)
    await thread.join()
    words = "the engine failed: ZeroDivisionError: no way"
    assert listener.delivered[:3] == [1, ("ended", words), 2]
    assert listener.details == []


async def test_a_process_that_ends_is_one_line_in_the_log_and_a_bug_a_traceback(caplog):
    gone = StageFailed(1, "it is gone; its process was ended by SIGKILL; its last lines:\n  INFO")
    thread, listener = await start(Pump(gone, ZeroDivisionError("no way"), [2]), [])
    await until(lambda: 2 in listener.delivered)
    await thread.join()
    [ended, bug] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert ended.getMessage() == (
        "the engine has failed (decode): stage 1 of the model failed: it is gone; its process was "
        "ended by SIGKILL"
    )
    assert not ended.exc_info and bug.exc_info


async def test_a_stage_that_fails_makes_its_requests_unavailable():
    pump = Pump(StageFailed(1, "its process is gone"), [2])
    thread, listener = await start(pump, [])
    await until(lambda: 2 in listener.delivered)
    await thread.join()
    [fault] = pump.recovered_from
    assert (fault.words, fault.kind, fault.during) == (
        "stage 1 of the model failed: its process is gone",
        "unavailable",
        "decode",
    )


async def test_a_failed_command_is_told_apart_from_a_failed_step():
    thread, listener = await start(pump := Pump([1]), [])
    thread.post(lambda pump: 1 / 0)
    await until(lambda: pump.recovered_from)
    await thread.join()
    assert [fault.during for fault in pump.recovered_from] == ["command"]
    assert listener.details == []


@pytest.mark.slow
@pytest.mark.parametrize("by", ["step", "command", "recovery"])
async def test_after_failures_in_a_row_all_requests_end_and_the_engine_is_loaded_again(
    by: str, monkeypatch, swept
):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.05)
    closed: list = []
    failing = [ZeroDivisionError("no way")] * (0 if by == "command" else MAX_IN_A_ROW)
    pump, second = Pump(*failing, can_recover=by != "recovery"), Pump()
    thread, listener = await start(pump, closed, second)
    for _ in range(MAX_IN_A_ROW if by == "command" else 0):
        thread.post(lambda pump: 1 / 0)
    await until(lambda: listener.pump is second)
    assert listener.details == [listener.delivered[-1][1]]
    assert ("OSError" if by == "recovery" else "ZeroDivisionError") in listener.details[0]
    assert (pump.is_kept, closed, swept) == (True, [True], ["unfreeze", "collect"])
    second.emitted = [[8]]
    await thread.call(lambda pump: [7], DEADLINE_S)
    await until(lambda: 8 in listener.delivered)
    await thread.join()
    assert closed == [True, True, "released"]


@pytest.mark.slow
async def test_commands_of_an_older_engine_are_not_run_on_a_newer_one(monkeypatch, swept):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.05)
    pump, second = Pump(*[ZeroDivisionError("no way")] * MAX_IN_A_ROW), Pump()
    thread, listener = await start(pump, [], second)
    await until(lambda: listener.pump is second)
    seen: list = []
    pump.post(seen.append)
    second.post(seen.append)
    await thread.call(lambda pump: [], DEADLINE_S)
    await thread.join()
    assert seen == [second]


@pytest.mark.slow
async def test_an_engine_that_cannot_be_loaded_is_tried_again(monkeypatch, swept):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    pump, third = Pump(*[ZeroDivisionError("no way")] * MAX_IN_A_ROW), Pump()
    thread, listener = await start(pump, [], ModelError("no weights here"), third)
    await until(lambda: listener.pump is third)
    await thread.join()
    assert [words.rpartition(": ")[2] for words in listener.details] == [
        "no way",
        "no weights here",
    ]


async def test_join_ends_the_pause_before_a_restart(monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 6 * DEADLINE_S)
    pump = Pump(*[ZeroDivisionError("no way")] * MAX_IN_A_ROW)
    monkey = Pump()
    thread, listener = await start(pump, closed := [], monkey)
    await until(lambda: listener.details)
    async with asyncio.timeout(DEADLINE_S):
        await thread.join()
    assert (listener.pump, closed) == (pump, [True, "released"])
    with pytest.raises(TimeoutError):
        await thread.call(lambda pump: [], DEADLINE_S)


# --- failures in a row --------------------------------------------------------------------------


def test_the_third_failure_in_a_row_is_the_last():
    failures = Failures()
    assert [failures.is_last("decode", 7) for _ in range(MAX_IN_A_ROW)] == [False, False, True]


def test_a_completed_pass_excuses_the_failures_before_it():
    failures = Failures()
    assert not any(failures.is_last("decode", num_completed) for num_completed in range(20))


def test_failures_of_one_kind_are_not_counted_for_another():
    failures = Failures()
    kinds = ["prefill", "decode", "between", "command"]
    assert not any(failures.is_last(kind, 0) for _ in range(MAX_IN_A_ROW - 1) for kind in kinds)
    assert all(failures.is_last(kind, 0) for kind in kinds)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (StageFailed(2, "no answer in 10 s"), "unavailable", "stage 2 .* no answer in 10 s"),
        (ZeroDivisionError("no way"), "failed", "the engine failed: ZeroDivisionError: no way"),
        (ModelError("no layer"), "failed", "the engine failed: ModelError: no layer"),
    ],
)
def test_only_after_a_failed_stage_a_request_may_be_sent_again(error, kind, words):
    fault = fault_of(error, "decode")
    assert fault.kind == kind
    assert re.fullmatch(words, fault.words)


def test_each_restart_that_does_not_last_waits_twice_as_long_up_to_a_minute():
    backoff = RestartBackoff()
    assert [backoff.pause_s(0.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_after_a_sound_life_a_failure_is_the_first_one():
    backoff = RestartBackoff()
    backoff.pause_s(0.0), backoff.pause_s(0.0)
    assert backoff.pause_s(SOUND_LIFE_S) == 1
    assert backoff.pause_s(SOUND_LIFE_S / 2) == 2
