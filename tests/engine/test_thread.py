"""The engine's thread: commands in, deltas out, and an end that always comes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from luceasync.engine.faults import MAX_IN_A_ROW, Fault
from luceasync.engine.thread import EngineThread, Loaded
from luceasync.errors import GroupFailed, ModelError

DEADLINE_S = 10.0


class Pump:
    """Emits a number a step while it has any; raises an exception in its place."""

    def __init__(self, *emitted, can_recover: bool = True) -> None:
        self.emitted = list(emitted)
        self.can_recover = can_recover
        self.num_steps = 0
        self.doing = "between"
        self.recovered_from: list[Fault] = []
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

    def failed(self, detail: str) -> None:
        self.details.append(detail)

    def deliver(self, emitted) -> None:
        self.delivered += emitted
        self.threads.add(threading.get_ident())


async def start(pump: Pump | None, closed: list) -> tuple[EngineThread, Listener]:
    def load() -> Loaded:
        if pump is None:
            raise ModelError("no weights here")
        return Loaded(pump, lambda: closed.append(True))

    listener = Listener()
    thread = EngineThread(load, listener)
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
    assert closed == [True]


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
    pump = Pump(GroupFailed(1, "its process is gone"), [2])
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


@pytest.mark.parametrize("by", ["step", "command", "recovery"])
async def test_failures_in_a_row_end_everything_that_runs_and_all_that_comes_later(by: str):
    closed: list = []
    failing = [ZeroDivisionError("no way")] * (0 if by == "command" else MAX_IN_A_ROW)
    pump = Pump(*failing, can_recover=by != "recovery")
    thread, listener = await start(pump, closed)
    for _ in range(MAX_IN_A_ROW if by == "command" else 0):
        thread.post(lambda pump: 1 / 0)
    await until(lambda: listener.details)
    thread.post(lambda pump: 1 / 0)
    await thread.call(lambda pump: [], DEADLINE_S)
    await thread.join()
    assert ("OSError" if by == "recovery" else "ZeroDivisionError") in listener.details[0]
    assert pump.failed_with == listener.details * 3
    assert closed == [True]
