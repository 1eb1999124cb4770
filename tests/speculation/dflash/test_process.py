"""A drafter's process is used while it is there, and restarted when it is lost."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from luceasync.errors import DraftFailed, ModelError, Unavailable
from luceasync.speculation.dflash.process import DraftProcess


class Scripted:
    """A process as Supervised has it, whose starts fail as often as is said."""

    def __init__(self, num_failures: int = 0) -> None:
        self.num_failures = num_failures
        self.stopping = threading.Event()
        self.told: list[str] = []
        self.is_held = threading.Event()  # what is started then is there
        self.is_held.set()

    def failed(self, reason: str) -> None:
        self.told.append(f"failed: {reason}")

    def stop(self) -> None:
        self.told.append("stopped")

    def wait(self) -> None:
        if self.stopping.is_set():
            raise Unavailable("over")

    def start(self, advance: Any) -> Any:
        advance(1)
        self.is_held.wait(10)
        if self.num_failures:
            self.num_failures -= 1
            raise ModelError("no such drafter")
        return SimpleNamespace(connection=self)

    def raise_if_failed(self) -> None:
        """See BackendConnection."""

    check_alive = raise_if_failed


def opened(scripted: Scripted) -> DraftProcess:
    process = DraftProcess(scripted, scripted.start, scripted.stopping)
    process.open(lambda num_bytes: None)
    return process


def lose(loaded: Any) -> int:
    raise DraftFailed("it has ended; its last lines:\n  secret")


def back(process: DraftProcess) -> None:
    limit = time.monotonic() + 10
    while process.life is None:
        process.refresh()
        time.sleep(0.001)
        assert time.monotonic() < limit


def test_a_first_start_that_fails_is_told():
    scripted = Scripted(num_failures=1)
    process = DraftProcess(scripted, scripted.start, scripted.stopping)
    with pytest.raises(ModelError, match="no such drafter"):
        process.open(lambda num_bytes: None)


def test_work_is_done_while_it_is_there():
    process = opened(Scripted())
    assert process.run(lambda life: 5, 0) == 5
    assert process.off_reason is None


def test_one_that_is_lost_is_there_again_after_as_many_starts_as_it_takes():
    scripted = Scripted()
    process = opened(scripted)
    scripted.num_failures = 3
    scripted.is_held.clear()
    assert process.run(lose, -1) == -1
    assert process.run(lambda life: 5, 0) == 0
    process.refresh()
    assert process.life is None  # the restart was not waited for
    assert process.off_reason == "the drafter is gone: it has ended"
    scripted.is_held.set()
    back(process)
    assert process.off_reason is None
    assert process.run(lambda life: 5, 0) == 5
    assert scripted.told[0].startswith("failed: it has ended")
    assert scripted.told.count("stopped") == 4
    process.close()


def test_what_else_is_raised_is_no_loss():
    process = opened(Scripted())

    def fail(loaded: Any) -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        process.run(fail, None)
    assert process.off_reason is None


def test_the_end_does_not_wait_for_another_start():
    scripted = Scripted()
    process = opened(scripted)
    scripted.num_failures = 10**9
    process.run(lose, None)
    process.close()
    assert process.life is None
    assert scripted.told[-1] == "stopped"
    process.close()


def test_a_process_that_is_known_to_be_gone_is_let_go_before_it_is_asked(monkeypatch):
    scripted = Scripted()
    process = opened(scripted)
    monkeypatch.setattr(scripted, "raise_if_failed", lambda: lose(None))
    scripted.is_held.clear()
    process.refresh()
    assert process.off_reason is not None
    scripted.is_held.set()
    process.close()
