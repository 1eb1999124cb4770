"""The engine's thread: commands in, deltas out, and an end that always comes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from luceasync.engine import faults
from luceasync.engine.faults import MAX_IN_A_ROW, Fault
from luceasync.engine.thread import EngineThread, Loaded
from luceasync.errors import ModelError, StageFailed

DEADLINE_S = 10.0


class Pump:
    """Emits a number a step while it has any; raises an exception in its place."""

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

    def step(self, tell):
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
    """A thread over `pump`, and over each of the later ones when the one before has failed."""
    lives: list = [pump or ModelError("no weights here"), *later]

    def load() -> Loaded:
        life = lives.pop(0)
        if isinstance(life, Exception):
            raise life
        return Loaded(life, lambda: closed.append(True))

    listener = Listener()
    thread = EngineThread(load, listener, release=lambda: closed.append("released"))
    thread.start()
    async with asyncio.timeout(DEADLINE_S):
        await listener.is_loaded.wait()
    return thread, listener


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


async def test_a_model_that_cannot_be_loaded_is_told():
    thread, listener = await start(None, [])
    await thread.join()
    assert listener.pump is None
    assert str(listener.error) == "no weights here"


async def until(condition) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_after_a_failure_what_ran_is_told_and_the_next_step_is_done():
    pump = Pump([1], ZeroDivisionError("no way"), [2])
    thread, listener = await start(pump, [])
    await until(lambda: 2 in listener.delivered)
    await thread.join()
    words = "the engine failed: ZeroDivisionError: no way"
    assert listener.delivered[:3] == [1, ("ended", words), 2]
    assert listener.details == []


async def test_a_group_that_fails_is_an_event_of_its_own_kind():
    pump = Pump(StageFailed(1, "its process is gone"), [2])
    thread, listener = await start(pump, [])
    await until(lambda: 2 in listener.delivered)
    await thread.join()
    [fault] = pump.recovered_from
    assert (fault.words, fault.kind, fault.during) == (
        "group 1 of the model failed: its process is gone",
        "unavailable",
        "decode",
    )


async def test_a_command_that_fails_is_told_apart_from_a_step():
    thread, listener = await start(pump := Pump([1]), [])
    thread.post(lambda pump: 1 / 0)
    await until(lambda: pump.recovered_from)
    await thread.join()
    assert [fault.during for fault in pump.recovered_from] == ["command"]
    assert listener.details == []


@pytest.mark.slow
@pytest.mark.parametrize("by", ["step", "command", "recovery"])
async def test_after_failures_in_a_row_everybody_is_told_and_the_engine_is_made_anew(
    by: str, monkeypatch
):
    monkeypatch.setattr(faults, "FIRST_PAUSE_S", 0.05)
    closed: list = []
    failing = [ZeroDivisionError("no way")] * (0 if by == "command" else MAX_IN_A_ROW)
    pump, second = Pump(*failing, can_recover=by != "recovery"), Pump()
    thread, listener = await start(pump, closed, second)
    for _ in range(MAX_IN_A_ROW if by == "command" else 0):
        thread.post(lambda pump: 1 / 0)
    await until(lambda: listener.pump is second)
    assert listener.details == [listener.delivered[-1][1]]
    assert ("OSError" if by == "recovery" else "ZeroDivisionError") in listener.details[0]
    assert (pump.is_kept, closed) == (True, [True])
    second.emitted = [[8]]
    await thread.call(lambda pump: [7], DEADLINE_S)
    await until(lambda: 8 in listener.delivered)
    await thread.join()
    assert closed == [True, True, "released"]


@pytest.mark.slow
async def test_what_an_older_life_hears_of_is_nothing_to_the_next(monkeypatch):
    monkeypatch.setattr(faults, "FIRST_PAUSE_S", 0.05)
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
async def test_a_life_that_cannot_begin_is_tried_again(monkeypatch):
    monkeypatch.setattr(faults, "FIRST_PAUSE_S", 0.01)
    pump, third = Pump(*[ZeroDivisionError("no way")] * MAX_IN_A_ROW), Pump()
    thread, listener = await start(pump, [], ModelError("no weights here"), third)
    await until(lambda: listener.pump is third)
    await thread.join()
    assert [words.rpartition(": ")[2] for words in listener.details] == [
        "no way",
        "no weights here",
    ]


async def test_an_end_while_a_restart_is_waited_for_comes_at_once():
    pump = Pump(*[ZeroDivisionError("no way")] * MAX_IN_A_ROW)
    monkey = Pump()
    thread, listener = await start(pump, closed := [], monkey)
    await until(lambda: listener.details)
    async with asyncio.timeout(faults.FIRST_PAUSE_S / 2):
        await thread.join()
    assert (listener.pump, closed) == (pump, [True, "released"])
    with pytest.raises(TimeoutError):
        await thread.call(lambda pump: [], DEADLINE_S)
