"""A process that was started here: whether it lives, how it ended, and its certain end.

Owns the process until it is reaped, its pidfd and its log. Knows no channel.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress

from luceasync.errors import LuceasyncError
from luceasync.ipc.log_lines import LogLines
from luceasync.ipc.waiting import Deadline

SETTLE_S = 0.05  # for what it said last to come through the pipe
GOING_S = 0.2  # its sockets close before it has ended


class Child:
    """One process. `pidfd` becomes readable when it ends. Call from one thread at a time."""

    def __init__(self, process: subprocess.Popen[bytes], on_line: Callable[[str], None]) -> None:
        """Takes over a process whose standard error is a pipe, also if this raises OSError."""
        self.pid = process.pid
        self._process = process
        self._ended: str | None = None
        self._lines: list[str] = []
        try:
            self.pidfd = os.pidfd_open(process.pid)
            assert process.stderr is not None
            self._log = LogLines(os.dup(process.stderr.fileno()), on_line)
        except BaseException:
            self._kill_group()
            process.wait()
            raise
        finally:
            if process.stderr is not None:
                process.stderr.close()

    @property
    def is_over(self) -> bool:
        """Whether end() has been done: nothing of it is left."""
        return self._ended is not None

    def is_alive(self) -> bool:
        """Whether it has not ended; one that is stopped lives."""
        return self._ended is None and not self._wait(0.0)

    def last_words(self) -> str:
        """How it ended, if it has, and its last log lines."""
        if self._ended is not None:
            return told(self._ended, self._lines)
        if not self._wait(GOING_S):
            return told("its process lives", self._log.last())
        status = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert status is not None
        return told(how(status), self._log.last(SETTLE_S))

    def end(self, grace_s: float, deadline_s: float) -> None:
        """Let it end by itself for `grace_s`, then kill it with all that it started, and reap it.

        Idempotent. Raises LuceasyncError if it lives on after `deadline_s` more.
        """
        if self._ended is not None:
            return
        self._wait(grace_s)
        self._kill_group()  # also what it leaves behind; its number is taken until it is reaped
        if not self._wait(deadline_s):
            raise LuceasyncError(f"process {self.pid} lives on {deadline_s:g} s after SIGKILL")
        status = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert status is not None
        self._lines = self._log.last(SETTLE_S)
        self._process.wait()
        self._log.close()
        os.close(self.pidfd)
        self._ended = how(status)

    def _wait(self, seconds: float) -> bool:
        """Whether it has ended, waiting for that."""
        waiting = select.poll()
        waiting.register(self.pidfd, select.POLLIN)
        return bool(waiting.poll(Deadline(seconds).left_ms()))

    def _kill_group(self) -> None:
        for kill in (os.killpg, os.kill):  # it may not lead its group yet
            with suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)


def how(status: os.waitid_result) -> str:
    """The end of a process in words."""
    if status.si_code == os.CLD_EXITED:
        return f"its process ended with status {status.si_status}"
    return f"its process was ended by {signal.Signals(status.si_status).name}"


def told(ending: str, lines: list[str]) -> str:
    """With its last lines, each on one of its own."""
    return "\n  ".join((f"{ending}; its last lines:" if lines else ending, *lines))
