"""The listening end of a link from another machine; the link carries the sockets of one server.

`serve_host` listens, and starts a process for each stage of one server; see bring.py for the
server's end. Does not know the messages of a channel.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from luceasync import __version__
from luceasync.errors import ConfigError, LuceasyncError
from luceasync.ipc.certificates import name_of_peer, tls_context
from luceasync.ipc.launcher import spawn
from luceasync.ipc.packets import MAX_PACKET_BYTES, Natural, Positive, WireError
from luceasync.ipc.tcp import (
    Address,
    Carried,
    Link,
    Strangers,
    receive_opening,
    send_opening,
)
from luceasync.ipc.wiring import VARIABLE, Wiring
from luceasync.models.files import ModelFiles
from luceasync.parsers import private_path
from luceasync.pipeline.remote.agreement import ContentDigests

LINK_PROTOCOL = 1
HANDSHAKE_S = 5.0
STARTING_S = 120.0  # the peer may have to read its weights first, for their digest
MAX_STRANGERS = 16  # connections that have not identified themselves
MAX_SESSIONS = 16
MAX_RING_BYTES = 1 << 36
RETRY_S = 0.3
ENDING_S = 10.0
SETTLE_S = 3.0  # for a process whose sockets are closed to end
EXIT_LOST = 1

log = logging.getLogger(__name__)


class Opening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server's request to a listener. `place` names the stage: a new connection for it replaces
    the previous one, which may not know yet that its link was cut."""

    protocol: Natural
    version: str
    place: str
    session: Positive
    ring_bytes: tuple[Natural, ...]
    written: Natural
    read: Natural
    model_dir: str
    dtype: str
    layers: str


class Opened(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reply. `refusal`: why the request was refused; `is_busy`: it may succeed later."""

    refusal: str = ""
    is_busy: bool = False


@dataclass
class _Session:
    """One process, run for the server of `peer`."""

    peer: str
    link: Link | None = None
    is_unwanted: bool = False
    is_over: threading.Event = field(default_factory=threading.Event)


class BackendListener:
    """Accepts connections of servers, from one server at a time, each in its own thread."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        command: Sequence[str],
        model_dir: Path | None = None,
        *,
        keeps_one: bool = False,
    ) -> None:
        """Takes over the listening socket. `command` starts a backend; `model_dir`: the model's
        directory on this machine, if it differs from the server's; `keeps_one`: always keep a
        process waiting that has done its imports, so that a lost stage is back sooner."""
        self._sock, self._context = sock, context
        self._command, self._model_dir = tuple(command), model_dir
        self._sessions: dict[str, _Session] = {}
        self._lock = threading.Lock()
        self._digests = ContentDigests()
        self._strangers = Strangers(MAX_STRANGERS)
        self._last_refusal: tuple[str, str] | None = None
        self._keeps_one, self._is_closed = keeps_one, False
        self._waiting: _Waiting | None = None
        # The kernel kills a process with the thread that started it: this one lives until close().
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="starts backends")
        if keeps_one:
            self._starter.submit(self._keep_one)

    def serve(self) -> None:
        """Accept connections until close()."""
        while True:
            try:
                sock, address = self._sock.accept()
            except OSError as error:
                if self._is_closed:
                    return
                log.warning("a connection was not accepted: %s", error.strerror)
                time.sleep(RETRY_S)  # most likely too many files are open
                continue
            where = str(Address(*address[:2]))
            try:
                sock.settimeout(HANDSHAKE_S)
                tls = self._context.wrap_socket(
                    sock, server_side=True, do_handshake_on_connect=False
                )
            except OSError as error:  # already closed
                log.warning("%s: not let in: %s", where, error)
                sock.close()
                continue
            self._strangers.add(tls, address[0])
            threading.Thread(target=self._meet, args=(tls, where), daemon=True).start()

    def close(self) -> None:
        """Accept no more connections, and end all processes. Idempotent."""
        self._is_closed = True
        with suppress(OSError):  # no longer listening
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        with self._lock:
            sessions = [*self._sessions.values()]
        for session in sessions:
            self._end(session)
        self._starter.shutdown()
        if self._waiting is not None:
            self._waiting.close()

    def _meet(self, tls: ssl.SSLSocket, where: str) -> None:
        """Find out whether the other end is one of ours. A stranger costs one thread and one log
        line."""
        is_crowded_out, peer, content = False, "", b""
        with tls:
            try:
                try:
                    # Not SSLSocket's own recv, which would start a handshake.
                    says_something = bool(socket.socket.recv(tls, 1, socket.MSG_PEEK))
                    if says_something:
                        tls.do_handshake()
                        peer, content = name_of_peer(tls), receive_opening(tls)
                finally:
                    is_crowded_out = not self._strangers.leave(tls)
                if not says_something and not is_crowded_out:
                    log.info("%s: closed without a word, as by a server that looks for us", where)
                    return
                if not says_something:
                    raise WireError("it was closed")
                opening = _opening_in(content)
                if isinstance(opening, Opened):
                    log.warning("%s (%s): %s", where, peer, opening.refusal)
                    send_opening(tls, msgspec.msgpack.encode(opening))
                    return
                self._open(tls, opening, peer, where)
            except (OSError, WireError) as error:
                words = f"closed: more than {MAX_STRANGERS} others say nothing"
                if not is_crowded_out:
                    words = f"not let in: {' '.join(str(error).split())}"
                log.warning("%s: %s", where, words)

    def _open(self, tls: ssl.SSLSocket, opening: Opening, peer: str, where: str) -> None:
        session = _Session(peer)
        answer = self._seat(session, opening.place)
        try:
            if not answer.refusal:
                self._last_refusal = None
                try:
                    self._run(tls, session, opening, where)
                    return
                except LuceasyncError as error:
                    answer = Opened(str(error))
            # A server that waits for its turn retries every RETRY_S.
            is_news = self._last_refusal != (peer, answer.refusal)
            self._last_refusal = peer, answer.refusal
            log.log(
                logging.WARNING if is_news else logging.DEBUG,
                "%s (%s): %s",
                where,
                peer,
                answer.refusal,
            )
            send_opening(tls, msgspec.msgpack.encode(answer))
        finally:
            with self._lock:
                if self._sessions.get(opening.place) is session:
                    del self._sessions[opening.place]
            session.is_over.set()

    def _seat(self, session: _Session, place: str) -> Opened:
        """Assign a session to its place; the previous session there has ended then."""
        with self._lock:
            before = self._sessions.get(place)
            others = {each.peer for key, each in self._sessions.items() if key != place}
            if others - {session.peer} or len(self._sessions) >= MAX_SESSIONS:
                serves = ", ".join(sorted(others)) or session.peer
                return Opened(f"it serves {serves} now", is_busy=True)
            self._sessions[place] = session
        if before is not None and not self._end(before):
            return Opened("what it ran for this stage does not end", is_busy=True)
        return Opened()

    def _end(self, session: _Session) -> bool:
        session.is_unwanted = True
        if session.link is not None:
            with suppress(OSError):  # its link is already closed
                session.link.stop()
        return session.is_over.wait(ENDING_S)

    def _run(self, tls: ssl.SSLSocket, session: _Session, opening: Opening, where: str) -> None:
        """Start the process, and carry its sockets until either end is gone. Raises ConfigError,
        OSError."""
        arguments = self._arguments(opening)
        process = self._starter.submit(self._take_waiting).result()
        child = process.child
        try:
            process.assign(arguments, opening)
            if self._keeps_one:
                self._starter.submit(self._keep_one)
            tls.settimeout(HANDSHAKE_S)
            send_opening(tls, msgspec.msgpack.encode(Opened()))
            session.link = link = Link(tls, process.sockets, session.peer)
            if session.is_unwanted:
                link.stop()
            what = f"layers {opening.layers}" if opening.layers else "a description of devices"
            log.info("%s (%s): %s, process %d", where, session.peer, what, child.pid)
            end = link.run()
            words = _end_of(child, SETTLE_S if end.is_local else 0.0)
            log.info("%s (%s): process %d: %s", where, session.peer, child.pid, end.words)
            link.finish(words)
        finally:
            process.close()

    def _take_waiting(self) -> _Waiting:
        """The waiting process, or a new one. Runs in the thread that starts them."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.child.poll() is None:
            return waiting
        if waiting is not None:
            waiting.close()
        return _start_waiting(self._command)

    def _keep_one(self) -> None:
        """Start a waiting process, if there is none. Runs in the thread that starts them."""
        if self._waiting is None and not self._is_closed:
            self._waiting = _start_waiting(self._command)

    def _arguments(self, opening: Opening) -> list[str]:
        if not opening.layers:
            return []
        model = ModelFiles(self._model_dir or Path(opening.model_dir))
        digest = self._digests.of(model.path, model.weights.paths)
        return [
            *("--model-dir", str(model.path), "--dtype", opening.dtype),
            *("--layers", opening.layers, "--weights", digest),
        ]


def _opening_in(content: bytes) -> Opening | Opened:
    """The request, or a refusal."""
    try:
        opening = msgspec.msgpack.decode(content, type=Opening)
    except msgspec.DecodeError as error:
        return Opened(
            f"it does not speak protocol {LINK_PROTOCOL} of luceasync {__version__}: {error}"
        )
    if (opening.protocol, opening.version) != (LINK_PROTOCOL, __version__):
        theirs = f"luceasync {opening.version} (protocol {opening.protocol})"
        return Opened(f"{theirs} here, {__version__} (protocol {LINK_PROTOCOL}) there")
    num_rings = len(opening.ring_bytes)
    if max(opening.ring_bytes, default=0) > MAX_RING_BYTES:
        return Opened(f"a ring of {max(opening.ring_bytes)} bytes; at most {MAX_RING_BYTES}")
    if num_rings and max(opening.written, opening.read) >= num_rings:
        return Opened(f"rings {opening.written} and {opening.read} of {num_rings}")
    return opening


class StageAssignment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a waiting process is assigned: arguments of this program, and its sockets."""

    arguments: list[str]
    wiring: Wiring


@dataclass(frozen=True)
class _Waiting:
    """A process that has done its imports, or soon will have, and waits for a StageAssignment."""

    child: subprocess.Popen[bytes]
    sockets: dict[Carried, socket.socket]
    wiring: Wiring

    def assign(self, arguments: list[str], opening: Opening) -> None:
        """Send the assignment. Raises OSError if the process has ended."""
        wiring = msgspec.structs.replace(
            self.wiring,
            session=opening.session,
            ring_bytes=opening.ring_bytes,
            written=opening.written,
            read=opening.read,
        )
        told = msgspec.json.encode(StageAssignment(arguments, wiring))
        self.sockets[Carried.CONTROL].send(told, socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """End it. Idempotent."""
        _kill(self.child)
        for sock in self.sockets.values():
            sock.close()


def _start_waiting(command: Sequence[str]) -> _Waiting:
    """Start a waiting process. It ends with the calling thread. Raises OSError."""
    with ExitStack() as ours, ExitStack() as theirs:
        here: dict[Carried, socket.socket] = {}
        there: dict[Carried, int] = {}
        for what in Carried:
            is_bytes = what in (Carried.PAYLOADS, Carried.LOG)
            kind = socket.SOCK_STREAM if is_bytes else socket.SOCK_SEQPACKET
            here[what], its = socket.socketpair(socket.AF_UNIX, kind)
            there[what] = its.fileno()
            ours.callback(here[what].close)
            theirs.callback(its.close)
        wiring = Wiring(
            session=1,
            control=there[Carried.CONTROL],
            ring_bytes=(),
            written=0,
            read=0,
            pulse=there[Carried.PULSE],
            completions=there[Carried.COMPLETIONS],
            stream=there[Carried.PAYLOADS],
        )
        child = spawn([*command, "--wait"], wiring, there[Carried.LOG], same_python=True)
        ours.pop_all()
        return _Waiting(child, here, wiring)


def wait_for_assignment(environ: MutableMapping[str, str] = os.environ) -> list[str] | None:
    """In a waiting process, wait for an assignment. Returns the arguments, and leaves the sockets
    in the environment; None: the process is no longer needed."""
    wiring = wiring_in(environ)
    with socket.socket(fileno=os.dup(wiring.control)) as control:
        told = control.recv(MAX_PACKET_BYTES)
    if not told:
        return None
    assignment = msgspec.json.decode(told, type=StageAssignment)
    environ[VARIABLE] = msgspec.json.encode(assignment.wiring).decode()
    return assignment.arguments


def wiring_in(environ: MutableMapping[str, str]) -> Wiring:
    """The wiring that the process which started this one has left for it. Raises ConfigError."""
    try:
        return msgspec.json.decode(environ.pop(VARIABLE, ""), type=Wiring)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--connect is used by luceasync, which sets {VARIABLE}: {error}"
        ) from None


def _end_of(child: subprocess.Popen[bytes], settle_s: float) -> str:
    """How a process ended; kill it if it has not yet."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(settle_s)
    _kill(child)
    if child.returncode < 0:
        return f"its process there was ended by {signal.Signals(-child.returncode).name}"
    return f"its process there ended with status {child.returncode}"


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a process and everything that it started, and reap it. Idempotent."""
    if child.returncode is None:
        for kill in (os.killpg, os.kill):  # it may not be the leader of its group yet
            with suppress(ProcessLookupError):
                kill(child.pid, signal.SIGKILL)
        child.wait()


def serve_host(
    address: Address, tls: Path, offers: Sequence[tuple[str, str]], model_dir: Path | None
) -> None:
    """Listen until SIGTERM or SIGINT. Raises ConfigError."""
    context = tls_context(private_path(str(tls)), "--tls", is_server=True)
    if model_dir is not None and not model_dir.exists():
        raise ConfigError(f"--model-dir {model_dir}: there is no such file or directory")
    try:
        sock = socket.create_server(
            address, family=socket.AF_INET6 if ":" in address.host else socket.AF_INET
        )
    except OSError as error:
        words = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"--listen {address}: {words}") from None
    command = [sys.executable, "-m", "luceasync.backend"]
    for name, device in offers:
        command += ["--offer", f"{name}={device}"]
    listener = BackendListener(sock, context, command, model_dir, keeps_one=True)
    signal.signal(signal.SIGTERM, _interrupt)
    log.info("listening on %s", Address(*sock.getsockname()[:2]))
    try:
        listener.serve()
    except KeyboardInterrupt:
        log.info("the end")
    finally:
        listener.close()


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
