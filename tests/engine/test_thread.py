"""The engine's thread: commands in, deltas out, and an end that always comes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from luceasync.engine.thread import EngineThread, Loaded
from luceasync.errors import ModelError

DEADLINE_S = 10.0


class Pump:
    """Emits a number a step while it has any."""

    def __init__(self, *emitted) -> None:
        self.emitted = [list(e) for e in emitted]
        self.failed_with: list[str] = []

    @property
    def pause_s(self) -> float:
        return 0.0 if self.emitted else 1.0

    def listen(self, post) -> None:
        self.post = post

    def step(self, tell):
        if self.emitted and self.emitted[0] == ["fail"]:
            raise ZeroDivisionError("no way")
        return self.emitted.pop(0) if self.emitted else []

    def fail_all(self, detail: str):
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


@pytest.mark.parametrize("by", ["step", "command"])
async def test_a_failure_ends_everything_that_runs_and_all_that_comes_later(by: str):
    closed: list = []
    pump = Pump() if by == "command" else Pump(["fail"])
    thread, listener = await start(pump, closed)
    if by == "command":
        thread.post(lambda pump: 1 / 0)
    async with asyncio.timeout(DEADLINE_S):
        while not listener.details:
            await asyncio.sleep(0.001)
    thread.post(lambda pump: 1 / 0)
    await thread.call(lambda pump: [], DEADLINE_S)
    await thread.join()
    assert "ZeroDivisionError" in listener.details[0]
    assert pump.failed_with == listener.details * 3
    assert closed == [True]
