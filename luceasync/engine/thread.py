"""The engine's thread: loads the model, then runs commands and steps until it is stopped.

Owns the thread and the queue of commands, and recovers from exceptions in steps: with the same
pump, or with a new one. The pump decides what a step does; its deltas go to a listener on the event
loop.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from luceasync.engine.pump import IDLE_PAUSE_S, Command, During, Fault, Pump
from luceasync.engine.streams import Emitted
from luceasync.errors import LuceasyncError, StageFailed, Unavailable

log = logging.getLogger(__name__)

JOIN_DEADLINE_S = 30.0
MAX_BACK_IN_S = 120  # the longest delay that clients are told to wait before they retry
MAX_IN_A_ROW = 3  # failures in a row, after which the engine is loaded again
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before the engine is loaded again
SOUND_LIFE_S = 60.0  # after which a failure no longer counts as one in a row


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A loaded model: the pump over it, and how to free it."""

    pump: Pump
    close: Callable[[], None]
    raise_if_failed: Callable[[], None] = lambda: None  # raises a failure that is already known
    check_alive: Callable[[], None] = lambda: None  # contacts all stages, and raises a failure
    restart_failed: Callable[[], None] = lambda: None  # of stages; blocks as long as necessary


class Listener(Protocol):
    """Called on the event loop."""

    def loaded(self, pump: Pump | None, error: BaseException | None) -> None:
        """An engine has been loaded, initially or after `failed`; with an error there will be
        none."""
        ...

    def failed(self, detail: str, back_in_s: int) -> None:
        """There is no engine; another one may be loaded in `back_in_s` seconds."""
        ...

    def deliver(self, emitted: list[Emitted]) -> None: ...


class EngineThread:
    """Everything between `start` and the end of `join` runs in one thread."""

    def __init__(
        self,
        load: Callable[[], LoadedEngine],
        listener: Listener,
        *,
        stopping: threading.Event | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """`load` is called at the start and after each failure of an engine, `release` at the end.
        `stopping` is set by `join`, so that a long load can be abandoned."""
        self._make = load
        self._listener = listener
        self._stopping = stopping or threading.Event()
        self._release = release
        self._load_s = 0.0  # of the last load
        self._loop = asyncio.get_running_loop()
        # Set once the thread has ended.
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread, which begins to load the engine."""
        self._thread.start()

    def post(self, command: Command) -> None:
        """Run the command before the next step. May be called from any thread."""
        self._commands.put(command)

    async def call(self, command: Command, timeout_s: float) -> None:
        """Run the command before the next step, and wait for it. Raises TimeoutError, at once if
        the thread has ended."""
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
        """End the thread after the commands that were posted earlier."""
        self._stopping.set()
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, JOIN_DEADLINE_S)
        if self._thread.is_alive():
            log.error("the engine thread did not end within %.0f s", JOIN_DEADLINE_S)

    def _run(self) -> None:
        backoff = RestartBackoff()
        try:
            loaded = self._load_or_deliver()
            while loaded is not None:
                began_s = time.monotonic()
                fault = self._pump_until_stopped(loaded)
                if fault is None:
                    _close(loaded)
                    return
                pause_s = backoff.pause_s(time.monotonic() - began_s)
                self._give_up(loaded, fault, pause_s)
                loaded = None  # free its memory before the next one is loaded
                loaded = self._load_again(backoff, pause_s)
        finally:
            self._release()
            self._post(_set_done, self._over)

    def _load_or_deliver(self) -> LoadedEngine | None:
        """The first engine; None if it cannot be loaded, which is reported to the listener."""
        try:
            loaded = self._load()
        except Exception as error:
            if not isinstance(error, LuceasyncError):
                log.exception("loading the model failed")
            self._post(self._listener.loaded, None, error)
            return None
        self._begin(loaded)
        return loaded

    def _load_again(self, backoff: RestartBackoff, pause_s: float) -> LoadedEngine | None:
        """Load another engine, retrying until it succeeds; None: the thread is to end."""
        while not self._stopping.wait(pause_s):
            gc.unfreeze()  # objects frozen at the start of the server are garbage now
            gc.collect()
            try:
                loaded = self._load()
            except Exception as error:
                if self._stopping.is_set():
                    return None
                _log_failure("loading the model again failed", error)
                pause_s = backoff.pause_s(0.0)
                words = fault_of(error, "between").words
                self._post(self._listener.failed, words, self._back_in_s(pause_s))
            else:
                log.warning("the engine was loaded again")
                self._begin(loaded)
                return loaded
        return None

    def _begin(self, loaded: LoadedEngine) -> None:
        pump = loaded.pump
        # Copies of the failed engine may still complete: its commands must not run on a newer pump.
        pump.listen(lambda command: self.post(lambda now: command(now) if now is pump else None))
        self._post(self._listener.loaded, pump, None)

    def _give_up(self, loaded: LoadedEngine, fault: Fault, pause_s: float) -> None:
        """End all requests, hand over to the disk what is to be kept, and free the rest."""
        log.error("the engine will be loaded again in %g s", pause_s)
        back_in_s = self._back_in_s(pause_s)
        self._post(self._listener.failed, fault.words, back_in_s)
        self._deliver(loaded.pump.give_up(fault, back_in_s))
        try:
            loaded.pump.save_all()
        except Exception as error:  # expected: the engine has failed
            _log_failure("nodes that were to be written to the disk are lost", error)
        _close(loaded)

    def _back_in_s(self, pause_s: float) -> int:
        return max(1, min(MAX_BACK_IN_S, math.ceil(pause_s + self._load_s)))

    def _load(self) -> LoadedEngine:
        began_s = time.monotonic()
        loaded = self._make()
        self._load_s = time.monotonic() - began_s
        return loaded

    def _pump_until_stopped(self, loaded: LoadedEngine) -> Fault | None:
        """Continue after failures until there are too many in a row. Returns the last fault; None:
        the thread is to end."""
        failures = Failures()
        fault: Fault | None = None
        while (fault := self._pump_until_fault(loaded, fault)) is not None:
            if failures.is_last(fault.during, loaded.pump.num_completed(fault.during)):
                return fault
        self._deliver(loaded.pump.fail_all("the server is shutting down"))
        return None

    def _pump_until_fault(self, loaded: LoadedEngine, fault: Fault | None) -> Fault | None:
        """Recover from `fault`, then run commands and steps. Returns the fault that stops them;
        None: the thread is to end."""
        pump, command = loaded.pump, None
        try:
            if fault is not None:
                self._deliver(pump.recover(fault))  # first, since the rest may take long
                if not self._has_mended(loaded):
                    self._end_without(pump)
                    return None
                pump.begin_again()
            while (command := self._next_command(pause_s := pump.pause_s)) is not _STOP:
                if command is None:
                    (loaded.check_alive if pause_s == IDLE_PAUSE_S else loaded.raise_if_failed)()
                self._deliver(pump.step(self._deliver) if command is None else command(pump))
        except Exception as error:
            during = pump.doing if command is None else "command"
            _log_failure(f"the engine has failed ({during})", error)
            return fault_of(error, during)
        return None

    def _has_mended(self, loaded: LoadedEngine) -> bool:
        """Bring failed stages back. False: the thread is to end."""
        try:
            loaded.restart_failed()
        except Unavailable:
            if not self._stopping.is_set():
                raise
            return False
        return True

    def _end_without(self, pump: Pump) -> None:
        """Run commands, but no steps, until the thread is to end."""
        while (command := self._next_command(JOIN_DEADLINE_S)) is not _STOP:
            if command is not None:
                self._deliver(command(pump))

    def _deliver(self, emitted: list[Emitted] | None) -> None:
        if emitted:
            self._post(self._listener.deliver, emitted)

    def _next_command(self, wait_s: float) -> Command | None:
        """The next command; None if there is none within `wait_s`; _STOP: the thread is to end."""
        try:
            command = self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
        except queue.Empty:
            return None
        return _STOP if command is None else command

    def _post(self, call: Callable[..., None], *args: object) -> None:
        """Run `call` on the event loop. No-op if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            log.debug("the event loop is closed; %s was not delivered", call)


def _close(loaded: LoadedEngine) -> None:
    try:
        loaded.close()
    except Exception as error:  # a failed engine may never end; the next one does not depend on it
        _log_failure("the engine could not free all that it had", error)


def _log_failure(words: str, error: Exception) -> None:
    """Log one line for processes that end, which is expected, and a traceback for our own bugs."""
    if isinstance(error, StageFailed | Unavailable):
        log.error("%s: %s", words, error.headline)
    else:
        log.error(words, exc_info=error)


def _set_done(done: asyncio.Future[None]) -> None:
    if not done.done():  # otherwise its caller has timed out
        done.set_result(None)


def _stop(pump: Pump) -> list[Emitted]:
    raise AssertionError("a sentinel, never called")


_STOP: Command = _stop


def fault_of(error: Exception, during: During) -> Fault:
    """A stage that failed may come back, and its requests may be sent again; any other exception is
    a bug in this program."""
    if isinstance(error, StageFailed):
        return Fault(str(error), "unavailable", during)
    return Fault(f"the engine failed: {type(error).__name__}: {error}", "failed", during)


class Failures:
    """Failures in a row: those of one kind of pass without a completed pass of that kind between
    them, and those outside of passes without any completed pass between them.

    Success of one kind does not reset the other: an engine that prefills but cannot decode is
    useless.
    """

    def __init__(self) -> None:
        self._in_a_row: Counter[During] = Counter()
        self._completed: dict[During, int] = {}  # at the last failure

    def is_last(self, during: During, num_completed: int) -> bool:
        """Count a failure and return whether to give up. `num_completed`: passes since the start
        that indicate a recovery from it."""
        if self._completed.get(during) != num_completed:
            self._in_a_row[during] = 0
        self._completed[during] = num_completed
        self._in_a_row[during] += 1
        return self._in_a_row[during] >= MAX_IN_A_ROW


class RestartBackoff:
    """How long to wait before the engine is loaded again: longer after each engine that did not
    last."""

    def __init__(self) -> None:
        self._next_s = FIRST_PAUSE_S

    def pause_s(self, lived_s: float) -> float:
        """Seconds to wait now; the engine ran for `lived_s`, 0 if it could not be loaded."""
        if lived_s >= SOUND_LIFE_S:
            self._next_s = FIRST_PAUSE_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, LONGEST_PAUSE_S)
        return pause_s
