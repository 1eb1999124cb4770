"""Starts a program of another Python environment on this machine, at the other end of a channel.

Owns the processes until they have ended, and the thread that starts them. Linux only.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from luceasync.errors import ConfigError, Unavailable
from luceasync.ipc.channel import ProcessVitals
from luceasync.ipc.child import Child
from luceasync.ipc.local import LocalChannel
from luceasync.ipc.memory import SealedMemory, require_linux
from luceasync.ipc.packets import Codec, Message
from luceasync.ipc.supervised import Heartbeat
from luceasync.ipc.wiring import VARIABLE, Rings, Wiring, boxes

log = logging.getLogger(__name__)

LEASH = Path(__file__).with_name("leash.py")
# Variables of this process's environment that would mislead the Python of another environment.
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", VARIABLE)
ALSO_SET = {"OMP_WAIT_POLICY": "passive"}  # waiting threads leave the cores to other processes
MAX_FIRST_LINE_BYTES = 512
END_S = 10.0
START_S = 60.0  # until the program begins: its file may be on a slow disk


@dataclass(frozen=True)
class Program:
    """A program, and what its processes inherit.

    `ring_bytes` are the sizes of all rings; the child writes ring `written` and reads ring `read`.
    `rings`: the rings in shared memory; None: payloads are sent as bytes. `arguments` precede those
    of each start. `lent`: memory that the child may map, by name.
    """

    executable: Path
    name: str
    ring_bytes: tuple[int, ...]
    written: int = 1
    read: int = 0
    rings: Rings | None = None
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    lent: Mapping[str, SealedMemory] = field(default_factory=dict)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)


class LocalProcess:
    """A process of this machine, and the channel to it."""

    def __init__(
        self, child: Child, channel: LocalChannel[Any], starter: ThreadPoolExecutor
    ) -> None:
        """`starter` keeps the starting thread alive: the kernel would kill the child when that
        thread ends."""
        self.child = child
        self.channel = channel
        self._starter = starter

    def is_alive(self) -> bool:
        return self.child.is_alive()

    @property
    def is_well(self) -> bool:
        return not self.child.is_known_to_end

    @property
    def vitals(self) -> ProcessVitals:
        return ProcessVitals(self.child.age_s, self.child.resident_bytes)

    def expect(self, number: int, call: Callable[[bool], None]) -> None:
        self.child.completions.expect(number, call)

    def last_words(self) -> str:
        return self.child.last_words()

    def end(self, grace_s: float, deadline_s: float) -> None:
        self.channel.close()
        self.child.end(grace_s, deadline_s)


class LocalLauncher:
    """Starts one program, any number of times. Call it from one thread at a time."""

    def __init__(
        self,
        program: Program,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        """`on_line` is called with each line of the processes' logs, in another thread; without it
        the lines are logged. Raises ConfigError for a program that cannot be started."""
        require_linux()
        path = program.executable
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise ConfigError(f"{program.name}: {path} is not an executable file")
        rings = program.rings
        assert rings is None or rings.ring_bytes == program.ring_bytes, "rings of other sizes"
        self._program = program
        self._on_line = on_line or (lambda line: log.info("%s: %s", program.name, line))
        # The kernel kills a child with the thread that started it: this one lives until close().
        self._starter = ThreadPoolExecutor(1, thread_name_prefix=f"starts {program.name}")
        self._started: list[LocalProcess] = []
        self._is_closed = False

    def launch(self, arguments: Sequence[str], messages: Sequence[type[Message]]) -> LocalProcess:
        """See Launcher. Raises Unavailable if the system cannot start it."""
        assert not self._is_closed, "a launcher that was closed"
        self._started = [each for each in self._started if not each.child.is_over]
        try:
            started = self._launch(arguments, messages)
        except OSError as error:
            raise Unavailable(f"{self._program.name} cannot be started: {error}") from error
        self._started.append(started)
        return started

    def close(self) -> None:
        """Idempotent."""
        self._is_closed = True
        while self._started:
            self._started.pop().end(0.0, END_S)
        self._starter.shutdown(wait=False)  # its thread may hang while starting a process

    def _launch(self, arguments: Sequence[str], messages: Sequence[type[Message]]) -> LocalProcess:
        program = self._program
        with ExitStack() as ours, ExitStack() as theirs:
            control, control_there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.callback(control.close)
            theirs.callback(control_there.close)
            pulse, pulse_there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.callback(pulse.close)
            theirs.callback(pulse_there.close)
            completions, completions_there = socket.socketpair(
                socket.AF_UNIX, socket.SOCK_SEQPACKET
            )
            ours.callback(completions.close)
            theirs.callback(completions_there.close)
            stream = stream_there = None
            if program.rings is None:
                stream, stream_there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                ours.callback(stream.close)
                theirs.callback(stream_there.close)
            wiring = Wiring(
                session=secrets.randbits(60) + 1,
                control=control_there.fileno(),
                pulse=pulse_there.fileno(),
                completions=completions_there.fileno(),
                ring_bytes=program.ring_bytes,
                written=program.written,
                read=program.read,
                stream=-1 if stream_there is None else stream_there.fileno(),
                rings=-1 if program.rings is None else program.rings.memory.fd,
                lent={name: (each.fd, each.num_bytes) for name, each in program.lent.items()},
            )
            # Before the child runs, so that it finds the words of its rings initialised.
            outbox, inbox = boxes(wiring, program.rings, stream, is_child=False)
            ours.callback(outbox.close)
            ours.callback(inbox.close)
            process = self._started_within(START_S, arguments, wiring)
            child = Child(process, self._on_line)
            # Wakes a waiter at the channel before the system has closed the other side.
            wake = control.dup()
            on_end = partial(_shut, wake)
            child.watch(pulse, wake.fileno(), program.heartbeat, completions, on_end)
            codec = Codec(wiring.session, messages)
            channel = LocalChannel[Any](control, codec, outbox, inbox, program.name, child.pidfd)
            ours.pop_all()  # the channel owns them now
            return LocalProcess(child, channel, self._starter)

    def _started_within(
        self, deadline_s: float, arguments: Sequence[str], wiring: Wiring
    ) -> subprocess.Popen[bytes]:
        """Start the process. Raises OSError, also if that takes too long: a disk may hang."""
        starting = self._starter.submit(self._start, arguments, wiring)
        try:
            return starting.result(deadline_s)
        except TimeoutError:
            starting.cancel()
            raise TimeoutError(f"it did not begin within {deadline_s:g} s") from None

    def _start(self, arguments: Sequence[str], wiring: Wiring) -> subprocess.Popen[bytes]:
        """Runs in the thread that lives as long as the children."""
        program = self._program
        return spawn(
            [str(program.executable), *program.arguments, *arguments],
            wiring,
            subprocess.PIPE,
            program.environment,
            same_python=runs_our_python(program.executable),
        )


def spawn(
    command: Sequence[str],
    wiring: Wiring,
    errors: int,
    environment: Mapping[str, str] | None = None,
    *,
    same_python: bool,
) -> subprocess.Popen[bytes]:
    """Start a program that inherits the descriptors of `wiring` and dies with this thread.
    `errors`: its standard error; `environment` and `same_python`: see child_environment. Raises
    OSError."""
    fds = [wiring.control, wiring.pulse, wiring.completions, wiring.stream, wiring.rings]
    fds += [fd for fd, _ in wiring.lent.values()]
    added = environment or {}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=[fd for fd in fds if fd >= 0],
        start_new_session=True,  # Ctrl-C at a terminal is for this process alone
        env=child_environment(os.environ, added, wiring, same_python=same_python),
    )


def _shut(sock: socket.socket) -> None:
    """Shut the socket down in all processes that have it; data that has arrived can still be
    read."""
    with suppress(OSError):  # the other end has closed
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def runs_our_python(executable: Path) -> bool:
    """Whether the program is a script for the Python that runs this process, by the path in its
    first line: links of several environments lead to one Python.
    """
    try:
        with executable.open("rb") as file:
            first = file.readline(MAX_FIRST_LINE_BYTES)
    except OSError:
        return False
    return first.startswith(b"#!") and first[2:].strip() == os.fsencode(sys.executable)


def child_environment(
    own: Mapping[str, str],
    added: Mapping[str, str],
    wiring: Wiring,
    *,
    same_python: bool = False,
) -> dict[str, str]:
    """The environment variables of a child; `added` replaces others. `same_python`: it finds its
    packages where this process does; otherwise it runs in another Python environment."""
    left_out = {*NOT_INHERITED} - ({"PYTHONPATH"} if same_python else set())
    kept = {name: value for name, value in own.items() if name not in left_out}
    return {**kept, **ALSO_SET, **added, VARIABLE: msgspec.json.encode(wiring).decode()}
