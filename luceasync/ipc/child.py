"""A child process: whether it lives, how it ended, and making sure that it ends.

Owns the process until it is reaped, its pidfd, its log, and the watch over it. Does not know
channels.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from luceasync.errors import LuceasyncError
from luceasync.ipc.heartbeat import CompletionWaiters, ProcessWatch, has_ended
from luceasync.ipc.local import Deadline
from luceasync.ipc.supervised import Heartbeat

NUM_LINES = 40
MAX_LINE_BYTES = 4096  # a longer line is cut into several
READ_BYTES = 64 << 10


class LogLines:
    """The standard error of a child, read by a thread: a full pipe would block the child. The last
    lines are kept for errors.
    """

    def __init__(self, fd: int, on_line: Callable[[str], None]) -> None:
        """Takes over the descriptor; calls `on_line` with each line, in the thread."""
        self._fd = fd
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=NUM_LINES)
        self._rest = b""
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._is_over = threading.Event()
        self._closing, self._is_closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._read_all, name="child's log", daemon=True)
        self._thread.start()

    def last(self, settle_s: float = 0.0) -> list[str]:
        """The last lines; waits up to `settle_s` for the rest of a child that has ended."""
        self._is_over.wait(settle_s)
        return list(self._lines)

    def close(self) -> None:
        """Stop reading. May be called twice, even concurrently."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            os.eventfd_write(self._stop, 1)
            if has_ended(self._thread):
                os.close(self._stop)
                os.close(self._fd)

    def _read_all(self) -> None:
        waiting = select.poll()
        waiting.register(self._fd, select.POLLIN)
        waiting.register(self._stop, select.POLLIN)
        os.set_blocking(self._fd, False)
        while True:
            happened = dict(waiting.poll())
            if self._fd in happened and not self._read_some():
                break
            if self._stop in happened:
                break
        self._take(b"\n" if self._rest else b"")
        self._is_over.set()

    def _read_some(self) -> bool:
        """Read some output; returns whether there may be more."""
        try:
            came = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return True
        self._take(came)
        return bool(came)

    def _take(self, came: bytes) -> None:
        *lines, self._rest = (self._rest + came).split(b"\n")
        while len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        for line in lines:
            text = line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
            self._lines.append(text)
            self._on_line(text)


SETTLE_S = 0.05  # for its last lines to come through the pipe
ENDING_S = 0.2  # its sockets close before the process has ended
EXIT_CODE = 48  # its position in /proc/PID/stat, after the state


class Child:
    """One process. `pidfd` becomes readable when it ends. Any thread may call, except watch()."""

    def __init__(self, process: subprocess.Popen[bytes], on_line: Callable[[str], None]) -> None:
        """Takes over a process whose standard error is a pipe, even if it raises OSError."""
        self.pid = process.pid
        self.completions = CompletionWaiters()
        self._process = process
        self._ended: str | None = None
        self._verdict = ""  # why the watch killed it
        self._lines: list[str] = []
        self._watch: ProcessWatch | None = None
        self._ending = threading.Lock()  # one thread ends the process, others wait
        self._reaping = threading.Lock()  # until then its pidfd and its log are open
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
        """Whether end() is done: nothing of the process is left."""
        return self._ended is not None

    def watch(
        self,
        sock: socket.socket,
        channel_fd: int,
        heartbeat: Heartbeat,
        completions_socket: socket.socket,
        on_end: Callable[[], None],
    ) -> None:
        """Send heartbeats through `sock`, and kill the process if it does not answer; receive its
        completions at `completions_socket`. Takes over both. `on_end` is called in another thread
        when the process ends, is killed, or closes its end of `channel_fd`, which is used until
        then."""
        beside = completions_socket, self.completions
        self._watch = ProcessWatch(
            sock, channel_fd, self.pidfd, heartbeat, *beside, self._condemn, on_end
        )

    @property
    def age_s(self) -> float | None:
        """Seconds since its last answer to a heartbeat; None: there was none. May be called from
        any thread."""
        return None if self._watch is None else self._watch.age_s

    @property
    def is_known_to_end(self) -> bool:
        """Whether the process has ended or is being killed, as far as is known. May be called from
        any thread."""
        has_ended = self._watch is not None and self._watch.has_ended.is_set()
        return has_ended or bool(self._verdict) or self.is_over

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the process, shared pages included; 0: it has ended. May be called
        from any thread."""
        try:
            fields = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()
        except OSError:
            return 0
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def is_alive(self) -> bool:
        """Whether the process has not ended. A stopped process counts as alive."""
        with self._reaping:
            return self._ended is None and not self._wait(0.0)

    def last_words(self) -> str:
        """How the process ended, if it has, and its last log lines."""
        with self._reaping:
            return self._last_words()

    def _last_words(self) -> str:
        if self._ended is not None:
            return with_last_lines(self._ended, self._lines)
        ending = "" if self._wait(0.0) else describe_dying(self.pid)
        if ending:
            return with_last_lines(self._with_verdict(ending), self._log.last(SETTLE_S))
        if not self._wait(ENDING_S):
            return with_last_lines("its process lives", self._log.last())
        status = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert status is not None
        return with_last_lines(self._with_verdict(describe_end(status)), self._log.last(SETTLE_S))

    def end(self, grace_s: float, deadline_s: float) -> None:
        """Wait `grace_s` for the process to end by itself, then kill it with everything that it
        started, and reap it. Idempotent. Raises LuceasyncError if it still lives after `deadline_s`
        more."""
        with self._ending:
            if self._ended is None:
                self._end(grace_s, deadline_s)

    def _end(self, grace_s: float, deadline_s: float) -> None:
        self._wait(grace_s)
        # Including children that it leaves; its pid is not reused before it is reaped.
        self._kill_group()
        if not self._wait(deadline_s):
            raise LuceasyncError(f"process {self.pid} lives on {deadline_s:g} s after SIGKILL")
        with self._reaping:
            self._reap()

    def _reap(self) -> None:
        status = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert status is not None
        self._lines = self._log.last(SETTLE_S)
        self._process.wait()
        self._log.close()
        if self._watch is not None:
            self._watch.close()
        os.close(self.pidfd)
        self._ended = self._with_verdict(describe_end(status))

    def _wait(self, seconds: float) -> bool:
        """Wait for the process to end; returns whether it has."""
        waiting = select.poll()
        waiting.register(self.pidfd, select.POLLIN)
        return bool(waiting.poll(Deadline(seconds).left_ms()))

    def _condemn(self, words: str) -> None:
        """Kill the process, from the thread of the watch: waiters then see it end."""
        self._verdict = words
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def _with_verdict(self, ending: str) -> str:
        return f"{self._verdict}; {ending}" if self._verdict else ending

    def _kill_group(self) -> None:
        for kill in (os.killpg, os.kill):  # it may not be the leader of its group yet
            with suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)


def describe_end(status: os.waitid_result) -> str:
    """How a process ended."""
    if status.si_code == os.CLD_EXITED:
        return f"its process ended with status {status.si_status}"
    return f"its process was ended by {signal.Signals(status.si_status).name}"


def describe_dying(pid: int) -> str:
    """How a process ended whose memory the system is still freeing; empty if that is not known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()  # proc(5), from the third field on
    code = int(fields[EXIT_CODE])
    if state in "Tt" or code == 0:
        return ""  # it is stopped, or still lives
    if code & 0x7F:
        return f"its process was ended by {signal.Signals(code & 0x7F).name}"
    return f"its process ended with status {code >> 8}"


def with_last_lines(ending: str, lines: list[str]) -> str:
    """How it ended, and its last lines."""
    return "\n  ".join((f"{ending}; its last lines:" if lines else ending, *lines))
