"""The engine's thread: it loads the model, then runs commands and steps until it is told to end.

Owns the thread and the queue of commands, and goes on after what a step raises. What a step does is
the pump's business, what becomes of its deltas that of whoever listens, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from luceasync.engine.faults import Failures, Fault, fault_of
from luceasync.engine.outbox import Emitted
from luceasync.engine.pump import IDLE_PAUSE_S, Command, Pump
from luceasync.errors import LuceasyncError

log = logging.getLogger(__name__)

JOIN_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model: the pump over it, and how to free it."""

    pump: Pump
    close: Callable[[], None]


class Listener(Protocol):
    """What the thread tells; each call comes on the event loop."""

    def loaded(self, pump: Pump | None, error: BaseException | None) -> None: ...

    def failed(self, detail: str) -> None: ...

    def deliver(self, emitted: list[Emitted]) -> None: ...


class EngineThread:
    """Everything between `start` and the end of `join` runs in one thread."""

    def __init__(self, load: Callable[[], Loaded], listener: Listener) -> None:
        self._load = load
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def post(self, command: Command) -> None:
        """Run the command before the next step; from any thread."""
        self._commands.put(command)

    async def call(self, command: Command, timeout_s: float) -> None:
        """Run the command before the next step, and wait for that. Raises TimeoutError."""
        done = self._loop.create_future()

        def run(pump: Pump) -> list[Emitted] | None:
            try:
                return command(pump)
            finally:
                self._post(_set_done, done)

        self._commands.put(run)
        async with asyncio.timeout(timeout_s):
            await done

    async def join(self) -> None:
        """End the thread after the commands before this one."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, JOIN_DEADLINE_S)
        if self._thread.is_alive():
            log.error("the engine thread did not end within %.0f s", JOIN_DEADLINE_S)

    def _run(self) -> None:
        listener = self._listener
        try:
            loaded = self._load()
        except Exception as error:
            if not isinstance(error, LuceasyncError):
                log.exception("loading the model failed")
            self._post(listener.loaded, None, error)
            return
        self._post(listener.loaded, loaded.pump, None)
        loaded.pump.listen(self.post)
        try:
            self._pump_until_stopped(loaded.pump)
        finally:
            loaded.close()

    def _pump_until_stopped(self, pump: Pump) -> None:
        """Go on after a failure, unless there are too many in a row: then nothing is done any
        more.
        """
        failures = Failures()
        fault: Fault | None = None
        while (fault := self._pump_until_fault(pump, fault)) is not None:
            if failures.is_last(fault.during, pump.num_completed(fault.during)):
                self._post(self._listener.failed, fault.words)
                self._refuse_until_stopped(pump, fault)
                return
        self._tell(pump.fail_all("the server is shutting down"))

    def _pump_until_fault(self, pump: Pump, fault: Fault | None) -> Fault | None:
        """Recover from `fault`, then do commands and steps; why they cannot go on, or None when
        told to end.
        """
        command: Command | None = None
        try:
            if fault is not None:
                self._tell(pump.recover(fault))
            while (command := self._next_command(pump.pause_s)) is not _STOP:
                self._tell(pump.step(self._tell) if command is None else command(pump))
        except Exception as error:
            during = pump.doing if command is None else "command"
            log.exception("the engine has failed (%s)", during)
            return fault_of(error, during)
        return None

    def _tell(self, emitted: list[Emitted] | None) -> None:
        if emitted:
            self._post(self._listener.deliver, emitted)

    def _refuse_until_stopped(self, pump: Pump, fault: Fault) -> None:
        """Everybody is told, and requests that were on their way get the same answer."""
        self._post(self._listener.deliver, pump.fail_all(fault.words, fault.kind))
        while (command := self._next_command(IDLE_PAUSE_S)) is not _STOP:
            if command is not None:
                try:
                    command(pump)
                except Exception:  # what failed once fails again; the next one has to be told too
                    log.exception("the engine, which has failed, could not do what was asked")
                self._post(self._listener.deliver, pump.fail_all(fault.words, fault.kind))

    def _next_command(self, wait_s: float) -> Command | None:
        """The next command; None: there is none, go on; _STOP: end."""
        try:
            command = self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
        except queue.Empty:
            return None
        return _STOP if command is None else command

    def _post(self, call: Callable[..., None], *args: object) -> None:
        """Run `call` on the loop; a loop that is gone has nobody left to tell."""
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            log.debug("the event loop is closed; %s was not delivered", call)


def _set_done(done: asyncio.Future[None]) -> None:
    if not done.done():  # nobody waits for it any more
        done.set_result(None)


def _stop(pump: Pump) -> list[Emitted]:
    raise AssertionError("a mark, never called")


_STOP: Command = _stop
