"""A server as an actor of Ray: started, asked how it is, started again when it ends, drained.

Owns the server's process and its port. The actor itself is moved to another machine by Ray when its
own is gone. Knows nothing of other servers.
"""

from __future__ import annotations

import http.client
import json
import logging
import shlex
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from luceasync import parsers
from luceasync.cluster.decisions import server_words
from luceasync.cluster.settings import ReplicaSettings
from luceasync.errors import ConfigError
from luceasync.ipc.ray_launcher import LeashedProgram

ASK_S, ANSWER_S = 0.5, 2.0  # how often the server is asked, and how long it may take
PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)  # before it is started again
WELL_S = 10.0  # after that it counts as started
EXIT_USAGE = 2
END_S = 10.0  # after its requests had their time
KEY, KEY_FILE = "LUCEASYNC_API_KEY", "--api-key-file"

log = logging.getLogger(__name__)


class ReplicaState(msgspec.Struct, frozen=True):
    """What a server's actor says of it. `status`: of the process that ended last."""

    digest: str
    url: str
    node: str
    is_ready: bool = False
    was_ready: bool = False
    is_leaving: bool = False
    running: int = 0
    waiting: int = 0
    lanes: int = 0
    starts: int = 0
    status: int | None = None
    detail: str = ""


class ReplicaServer:
    """The process of a server, kept running by a thread, and asked by another."""

    def __init__(
        self, settings: ReplicaSettings, number: int, host: str, ray: str, group: str
    ) -> None:
        """Start it. `ray`: HOST:PORT of the cluster; `group`: see server_words. Raises ConfigError
        if its variables cannot be read.
        """
        self._settings, self._number, self._host = settings, number, host
        self._ray, self._group = ray, group
        self._environment = variables_in(settings.environment_file)
        self._key = key_of(settings, self._environment)
        self._port = settings.port + number if settings.port else _free_port(host)
        self._state = ReplicaState(settings.digest, f"http://{_bracketed(host)}:{self._port}", host)
        self._program: LeashedProgram | None = None
        self._lock, self._leaving = threading.Lock(), threading.Event()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._run, "runs the server"), (self._watch, "asks the server"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def state(self) -> ReplicaState:
        """As it was a moment ago. Does not wait."""
        return self._state

    def drain(self) -> None:
        """Have the server finish what it runs, and end. Idempotent."""
        self._leaving.set()
        with self._lock:
            program = self._program
        self._tell(is_leaving=True, is_ready=False)
        if program is not None:
            program.end(self._settings.drain_s + END_S)
        for thread in self._threads:
            thread.join(END_S)

    def _run(self) -> None:
        """Keep it running. The kernel ends the server with this thread."""
        failures = 0
        while not self._leaving.wait(PAUSES_S[min(failures, len(PAUSES_S) - 1)]):
            begun_s = time.monotonic()
            self._tell(starts=self._state.starts + 1)
            try:
                program = self._start()
            except OSError as error:  # the machine has no memory or processes left, for now
                failures += 1
                self._tell(is_ready=False, detail=f"it cannot be started: {error}")
                continue
            if program is None:
                return
            status = program.wait()
            program.end(0.0)  # what it started ends with it
            failures = 0 if time.monotonic() - begun_s >= WELL_S else failures + 1
            words = f"it ended with status {status}: {program.last_line}"
            self._tell(is_ready=False, status=status, detail=words)
            if not self._leaving.is_set():
                log.warning("%s: %s", self._group, words)

    def _start(self) -> LeashedProgram | None:
        """The server's process; None: the server is to end. Raises OSError."""
        with self._lock:
            if self._leaving.is_set():
                return None
            self._program = LeashedProgram(["luceasync", *self._words()], self._environment)
            return self._program

    def _words(self) -> list[str]:
        return server_words(
            self._settings, self._number, self._host, self._port, self._ray, self._group
        )

    def _watch(self) -> None:
        while not self._leaving.wait(ASK_S):
            answer = self._ask("/ready")
            is_ready = answer is not None and answer.get("ready") is True
            counts = self._counts() if is_ready else {}
            self._tell(
                is_ready=is_ready,
                was_ready=self._state.was_ready or is_ready,
                **({"detail": ""} if is_ready else {}),
                **counts,
            )

    def _counts(self) -> dict[str, int]:
        """Running and waiting requests, for scaling."""
        if self._settings.scale.is_fixed:
            return {}
        status = self._ask("/status") or {}
        words = {"running": "num_running", "waiting": "num_queued", "lanes": "num_lanes"}
        return {ours: int(status.get(theirs, 0)) for ours, theirs in words.items()}

    def _ask(self, path: str) -> dict[str, Any] | None:
        """What the server answers; None: nothing that counts."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_S)
        headers = {}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
            return answer if response.status == 200 and isinstance(answer, dict) else None
        except (OSError, http.client.HTTPException, ValueError):  # the server is not there yet
            return None
        finally:
            connection.close()

    def _tell(self, **changed: Any) -> None:
        with self._lock:
            if self._leaving.is_set():
                changed = {**changed, "is_leaving": True, "is_ready": False}
            self._state = msgspec.structs.replace(self._state, **changed)


def variables_in(file: str | None) -> Mapping[str, str]:
    """The variables in a file of lines NAME=VALUE, as systemd reads them. Raises ConfigError,
    without their values.
    """
    found: dict[str, str] = {}
    if file is None:
        return found
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"environment-file {file}: {words}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.strip().partition("=")
        try:
            [word] = shlex.split(value) or [""]
        except ValueError:
            equals = ""
        if not equals or not name.isidentifier():
            raise ConfigError(f"environment-file {file}: line {number}: NAME=VALUE is expected")
        found[name] = word
    return found


def key_of(settings: ReplicaSettings, variables: Mapping[str, str]) -> str:
    """A key that the server accepts; empty: it needs none. Raises ConfigError."""
    if key := variables.get(KEY, "").partition(",")[0]:
        return key
    flags = [part for flag in settings.flags for part in flag.split("=", 1)]
    if KEY_FILE not in flags[:-1]:
        return ""
    file = Path(flags[flags.index(KEY_FILE) + 1])
    try:
        return parsers.keys_in_file(str(file))[0]
    except (ValueError, IndexError, OSError):
        raise ConfigError(f"{KEY_FILE} {file}: it has no key on this machine") from None


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as found:
        return int(found.getsockname()[1])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class ReplicaActor:
    """What Ray runs: a ReplicaServer on this node. Its methods are called in several threads."""

    def __init__(self, settings: bytes, number: int, ray_address: str, group: str) -> None:
        """`settings`: a ReplicaSettings as JSON."""
        import ray

        self._server: ReplicaServer | None = None
        host = ray.util.get_node_ip_address()
        read = msgspec.json.decode(settings, type=ReplicaSettings)
        self._failed = ReplicaState(read.digest, "", host)
        try:
            self._server = ReplicaServer(read, number, host, ray_address, group)
        except (ConfigError, OSError) as error:
            self._failed = ReplicaState(read.digest, "", host, status=EXIT_USAGE, detail=str(error))

    def state(self) -> bytes:
        """A ReplicaState as JSON."""
        server = self._server
        return msgspec.json.encode(self._failed if server is None else server.state)

    def drain(self) -> None:
        """See ReplicaServer."""
        if self._server is not None:
            with suppress(ProcessLookupError):  # it has just ended
                self._server.drain()
