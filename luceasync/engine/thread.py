"""The engine's thread: it loads the model, then runs commands and steps until it is told to end.

Owns the thread and the queue of commands, and goes on after what a step raises: with the same pump,
or with one made anew. What a step does is the pump's business, what becomes of its deltas that of
whoever listens, on the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from luceasync.engine.faults import Failures, Fault, Restarts, fault_of
from luceasync.engine.pump import IDLE_PAUSE_S, Command, Pump
from luceasync.engine.streams import Emitted
from luceasync.errors import LuceasyncError, Unavailable

log = logging.getLogger(__name__)

JOIN_DEADLINE_S = 30.0
MAX_BACK_IN_S = 120  # that clients are told to come back in


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model: the pump over it, and how to free it."""

    pump: Pump
    close: Callable[[], None]
    notice: Callable[[], None] = lambda: None  # raises what is known to have failed
    probe: Callable[[], None] = lambda: None  # asks all, and raises that
    mend: Callable[[], None] = lambda: None  # brings back what has, however long that takes


class Listener(Protocol):
    """What the thread tells; each call comes on the event loop."""

    def loaded(self, pump: Pump | None, error: BaseException | None) -> None:
        """The first life, or another one after `failed`, has begun; with an error there is none."""
        ...

    def failed(self, detail: str, back_in_s: int) -> None:
        """There is no engine; another one is tried, which may be there in `back_in_s` seconds."""
        ...

    def deliver(self, emitted: list[Emitted]) -> None: ...


class EngineThread:
    """Everything between `start` and the end of `join` runs in one thread."""

    def __init__(
        self,
        load: Callable[[], Loaded],
        listener: Listener,
        *,
        stopping: threading.Event | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """`load` is called for each life, `release` after the last one. `stopping` is set at the
        end, so that a load which takes long may give up.
        """
        self._make = load
        self._listener = listener
        self._stopping = stopping or threading.Event()
        self._release = release
        self._load_s = 0.0  # that the last one took
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()  # the thread has ended
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def post(self, command: Command) -> None:
        """Run the command before the next step; from any thread."""
        self._commands.put(command)

    async def call(self, command: Command, timeout_s: float) -> None:
        """Run the command before the next step, and wait for that. Raises TimeoutError, at once
        where the thread has ended.
        """
        done: asyncio.Future[None] = self._loop.create_future()

        def run(pump: Pump) -> list[Emitted] | None:
            try:
                return command(pump)
            finally:
                self._post(_set_done, done)

        self._commands.put(run)
        both = {done, self._over}
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise TimeoutError("the engine's thread has not run the command")

    async def join(self) -> None:
        """End the thread after the commands before this one."""
        self._stopping.set()
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, JOIN_DEADLINE_S)
        if self._thread.is_alive():
            log.error("the engine thread did not end within %.0f s", JOIN_DEADLINE_S)

    def _run(self) -> None:
        restarts = Restarts()
        try:
            loaded = self._load_or_tell()
            while loaded is not None:
                began_s = time.monotonic()
                fault = self._pump_until_stopped(loaded)
                if fault is None:
                    _close(loaded)
                    return
                pause_s = restarts.pause_s(time.monotonic() - began_s)
                self._give_up(loaded, fault, pause_s)
                loaded = None  # what it holds is free before the next one is made
                loaded = self._load_again(restarts, pause_s)
        finally:
            self._release()
            self._post(_set_done, self._over)

    def _load_or_tell(self) -> Loaded | None:
        """The first life; None: there will be none, and whoever listens knows why."""
        try:
            loaded = self._load()
        except Exception as error:
            if not isinstance(error, LuceasyncError):
                log.exception("loading the model failed")
            self._post(self._listener.loaded, None, error)
            return None
        self._begin(loaded)
        return loaded

    def _load_again(self, restarts: Restarts, pause_s: float) -> Loaded | None:
        """Another life, however often it takes; None: told to end."""
        while not self._stopping.wait(pause_s):
            gc.unfreeze()  # what was there when the server began is garbage now
            gc.collect()
            try:
                loaded = self._load()
            except Exception as error:
                if self._stopping.is_set():
                    return None
                log.exception("loading the model again failed")
                pause_s = restarts.pause_s(0.0)
                words = fault_of(error, "between").words
                self._post(self._listener.failed, words, self._back_in_s(pause_s))
            else:
                log.warning("the engine was made anew")
                self._begin(loaded)
                return loaded
        return None

    def _begin(self, loaded: Loaded) -> None:
        pump = loaded.pump
        # What an older life still hears of is nothing to this one.
        pump.listen(
            lambda command: self.post(lambda now: command(now) if now is pump else None),
        )
        self._post(self._listener.loaded, pump, None)

    def _give_up(self, loaded: Loaded, fault: Fault, pause_s: float) -> None:
        """Tell everybody, let the disk have what it is to have, and free the rest."""
        log.error("the engine is made anew in %g s", pause_s)
        back_in_s = self._back_in_s(pause_s)
        self._post(self._listener.failed, fault.words, back_in_s)
        self._tell(loaded.pump.give_up(fault, back_in_s))
        try:
            loaded.pump.save_all()
        except Exception:  # it has failed: that it fails here too is no news
            log.exception("what the disk was still to have is lost")
        _close(loaded)

    def _back_in_s(self, pause_s: float) -> int:
        return max(1, min(MAX_BACK_IN_S, math.ceil(pause_s + self._load_s)))

    def _load(self) -> Loaded:
        began_s = time.monotonic()
        loaded = self._make()
        self._load_s = time.monotonic() - began_s
        return loaded

    def _pump_until_stopped(self, loaded: Loaded) -> Fault | None:
        """Go on after a failure, unless there are too many in a row: the last of them; None: told
        to end.
        """
        failures = Failures()
        fault: Fault | None = None
        while (fault := self._pump_until_fault(loaded, fault)) is not None:
            if failures.is_last(fault.during, loaded.pump.num_completed(fault.during)):
                return fault
        self._tell(loaded.pump.fail_all("the server is shutting down"))
        return None

    def _pump_until_fault(self, loaded: Loaded, fault: Fault | None) -> Fault | None:
        """Recover from `fault`, then do commands and steps; why they cannot go on, or None when
        told to end.
        """
        pump, command = loaded.pump, None
        try:
            if fault is not None:
                self._tell(pump.recover(fault))  # first: what follows may take long
                if not self._has_mended(loaded):
                    self._end_without(pump)
                    return None
                pump.begin_again()
            while (command := self._next_command(pause_s := pump.pause_s)) is not _STOP:
                if command is None:
                    (loaded.probe if pause_s == IDLE_PAUSE_S else loaded.notice)()
                self._tell(pump.step(self._tell) if command is None else command(pump))
        except Exception as error:
            during = pump.doing if command is None else "command"
            log.exception("the engine has failed (%s)", during)
            return fault_of(error, during)
        return None

    def _has_mended(self, loaded: Loaded) -> bool:
        """False where nobody waits for it any more."""
        try:
            loaded.mend()
        except Unavailable:
            if not self._stopping.is_set():
                raise
            return False
        return True

    def _end_without(self, pump: Pump) -> None:
        """Do what is still said, but no step, until told to end."""
        while (command := self._next_command(JOIN_DEADLINE_S)) is not _STOP:
            if command is not None:
                self._tell(command(pump))

    def _tell(self, emitted: list[Emitted] | None) -> None:
        if emitted:
            self._post(self._listener.deliver, emitted)

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


def _close(loaded: Loaded) -> None:
    try:
        loaded.close()
    except Exception:  # what has failed may not be able to end: the next life has its own
        log.exception("the engine could not free all that it had")


def _set_done(done: asyncio.Future[None]) -> None:
    if not done.done():  # nobody waits for it any more
        done.set_result(None)


def _stop(pump: Pump) -> list[Emitted]:
    raise AssertionError("a mark, never called")


_STOP: Command = _stop
