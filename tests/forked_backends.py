"""Backends as a launcher starts them, each a fork of one process that has imported torch: that
takes two seconds of a core, and most tests of backends ask about what comes after it.

A fork is a child of the process that started it, with the descriptors, the variables, the command
line and the end that a program of `tests.processes` would have. Other programs start as usual.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import math
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
WRITTEN = re.compile(r'^exec \S+ -m (\S+)(.*) "\$@"$', re.MULTILINE)  # by backend_program
MOST_BYTES, MOST_FDS = 1 << 17, 64
FREE_FD = 512  # numbers from here on are not in use
PADDING = "-" * 2000  # the room that a fork's own words are written over


class Forked:
    """What a launcher wants of a `subprocess.Popen`."""

    def __init__(self, pid: int, stderr: IO[bytes] | None) -> None:
        self.pid = pid
        self.stderr = stderr
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, when it has ended."""
        until_s = math.inf if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            ended, status = os.waitpid(self.pid, 0 if timeout is None else os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            else:
                time.sleep(0.005)
        return self.returncode


class Forks:
    """In place of the module `subprocess` in a launcher. Any thread may ask."""

    DEVNULL, PIPE = subprocess.DEVNULL, subprocess.PIPE

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at_end = ExitStack()
        self._orders: socket.socket | None = None

    def Popen(self, command: Sequence[str], **options: Any) -> Forked | subprocess.Popen[bytes]:
        """`command`: Python, its flags, the leash, the parent, a program and its arguments."""
        *_, parent, program = command[:6]
        path = Path(program)
        found = WRITTEN.search(path.read_text(errors="replace")) if path.is_file() else None
        if found is None or not os.access(path, os.X_OK):
            return subprocess.Popen(command, **options)
        words = [found[1], *found[2].split(), *command[6:]]
        order = {"parent": int(parent), "words": words, "environ": options["env"]}
        return self._fork(order, options["pass_fds"], options["stderr"])

    def close(self) -> None:
        """Nothing is forked any more. Idempotent."""
        self._at_end.close()

    def _fork(self, order: dict[str, Any], fds: Sequence[int], errors: int) -> Forked:
        """`errors`: as a `subprocess.Popen` takes it, PIPE or a descriptor."""
        end, end_there = os.pipe() if errors == self.PIPE else (-1, os.dup(errors))
        with self._lock:
            orders = self._orders or self._started()
            message = json.dumps(order | {"fds": [2, *fds]}).encode()
            _prctl(PR_SET_CHILD_SUBREAPER, 1)  # so long its orphans are ours
            try:
                socket.send_fds(orders, [message], [end_there, *fds])
                pid = int(orders.recv(32))
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0)
        os.close(end_there)
        return Forked(pid, None if end < 0 else os.fdopen(end, "rb", buffering=0))

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno()), PADDING]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()])
        self._at_end.callback(process.wait)
        self._at_end.callback(ours.close)
        theirs.close()
        self._orders = ours
        return ours


# --- in the process that is forked ----------------------------------------------------------------


def main() -> None:
    """Fork for each order; a fork comes out of here too, at its end."""
    import luceasync.backend.draft
    import luceasync.backend.stage  # noqa: F401

    orders = socket.socket(fileno=int(sys.argv[1]))
    gc.freeze()
    while True:
        message, fds, _, _ = socket.recv_fds(orders, MOST_BYTES, MOST_FDS)
        if not message:
            return
        if (pid := _forked_away()) == 0:
            orders.close()
            _run(json.loads(message), fds)
            return
        for fd in fds:
            os.close(fd)
        orders.send(str(pid).encode())


def _forked_away() -> int:
    """The number of an orphan; 0: this is it."""
    told, tell = os.pipe()
    if (between := os.fork()) != 0:
        os.waitpid(between, 0)
        pid = int(os.read(told, 32))
    else:
        between = os.getpid()
        if (pid := os.fork()) != 0:
            os.write(tell, str(pid).encode())
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.0005)
    os.close(told)
    os.close(tell)
    return pid


def _run(order: dict[str, Any], fds: Sequence[int]) -> None:
    """Be what was ordered, to its end."""
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != order["parent"]:  # it died before the line above
        os._exit(1)
    _place(dict(zip(order["fds"], fds, strict=True)))
    os.environ.clear()
    os.environ.update(order["environ"])
    module, *arguments = order["words"]
    _tell_words([sys.executable, "-m", module, *arguments])
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _place(fds: Mapping[int, int]) -> None:
    """Move the descriptors to the numbers that were told, and /dev/null to 0 and 1."""
    nothing = os.open(os.devnull, os.O_RDWR)
    wanted = {0: nothing, 1: nothing, **fds}
    away = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, FREE_FD) for number, fd in wanted.items()}
    for fd in {*wanted.values()}:
        os.close(fd)
    for number, fd in away.items():
        os.dup2(fd, number)
        os.close(fd)


def _tell_words(words: Sequence[str]) -> None:
    """Show these words as the command line of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = (int(field) for field in fields[45:47])  # proc(5): arg_start, arg_end
    told = "".join(f"{word}\0" for word in words).encode()
    assert len(told) <= end - begin, "longer words than PADDING"
    ctypes.memmove(begin, told.ljust(end - begin, b"\0"), end - begin)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    main()
