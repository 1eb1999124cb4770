"""A link to another machine: one TLS connection that carries the sockets of a process there.

Each socket keeps its packets and their order, and has its own window, so that none waits for
another: heartbeats get through while a payload is sent. Owns frames and windows. Does not know
processes.
"""

from __future__ import annotations

import math
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple
from urllib.parse import urlsplit

from luceasync.errors import ConfigError
from luceasync.ipc.local import BRIEF_SPIN_S, SPARE_CORES
from luceasync.ipc.packets import MAX_PACKET_BYTES, WireError

SCHEME = "tls"
FRAME_BYTES = 128 << 10  # of a frame at most: takes 10 ms at 100 Mbit/s
READ_BYTES = 256 << 10
HEADER = struct.Struct(">BI")  # kind, number of following bytes
CREDIT = struct.Struct(">I")
BEAT_S = 1.0
SILENCE_S = 8.0  # without a frame: beats are sent each second
UNSENT_MS = 10_000  # how long sent bytes may remain without acknowledgement
FINISH_S = 3.0  # for the last frames of a link


class Address(NamedTuple):
    """Where a machine listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> Address:
    """The address in "tls://HOST:PORT". Raises ConfigError."""
    expected = f"{SCHEME}://HOST:PORT is expected"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{url}: {error}; {expected}") from None
    if parts.scheme != SCHEME or not host or not port or parts.path or parts.query:
        raise ConfigError(f"{url}: {expected}")
    return Address(host, port)


class Carried(IntEnum):
    """The sockets of a process, most urgent first."""

    PULSE = 0
    COMPLETIONS = 1
    CONTROL = 2
    LOG = 3
    PAYLOADS = 4


# Bytes of each that may be in transit. Two prefill chunks of the largest models are below 64 MiB;
# they wait on the machine that will compute them, while this one computes the next chunk.
WINDOW_BYTES = {
    Carried.PULSE: 1 << 20,
    Carried.COMPLETIONS: 1 << 20,
    Carried.CONTROL: 1 << 20,
    Carried.LOG: 1 << 20,
    Carried.PAYLOADS: 64 << 20,
}
# When one of these closes, the process has ended, or is about to.
VITAL = (Carried.PULSE, Carried.CONTROL)

# Kinds of frames; for data, the kind is the socket's number.
IS_CREDIT = 16  # with the number of a socket: this many more of its bytes may be sent
BEAT = 32
END = 33  # with words
OPENING = 34  # exchanged before anything is carried


def frame(kind: int, content: bytes | memoryview = b"") -> bytes:
    """One frame."""
    return HEADER.pack(kind, len(content)) + content


def send_opening(sock: ssl.SSLSocket, content: bytes) -> None:
    """Send a message before anything is carried, within the socket's timeout. Raises OSError."""
    sock.sendall(frame(OPENING, content))


def receive_opening(sock: ssl.SSLSocket) -> bytes:
    """Receive the other end's opening message, all of it within the socket's timeout. Raises
    OSError, and WireError for anything else."""
    timeout_s = sock.gettimeout()
    until_s = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    try:
        kind, num_bytes = HEADER.unpack(_exactly(sock, HEADER.size, until_s))
        if kind != OPENING or num_bytes > MAX_PACKET_BYTES:
            raise WireError(f"it began with a frame {kind} of {num_bytes} bytes")
        return _exactly(sock, num_bytes, until_s)
    finally:
        sock.settimeout(timeout_s)


def _exactly(sock: ssl.SSLSocket, num_bytes: int, until_s: float) -> bytes:
    found = bytearray()
    while len(found) < num_bytes:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(None if left_s == math.inf else left_s)
        some = sock.recv(num_bytes - len(found))
        if not some:
            raise WireError("it closed the connection")
        found += some
    return bytes(found)


def tune(sock: socket.socket) -> None:
    """Send small frames at once, and give up on a peer that no longer acknowledges."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNSENT_MS)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class Strangers:
    """Connections whose other end has not identified itself yet. Beyond `limit`, the address with
    the most of them loses its oldest one: a flood only shuts out itself. May be called from any
    thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._hosts: dict[ssl.SSLSocket, str] = {}  # the oldest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._hosts)

    def add(self, sock: ssl.SSLSocket, host: str) -> None:
        """Count a connection from `host`; another one may be shut down to make room."""
        with self._lock:
            self._hosts[sock] = host
            if len(self._hosts) <= self._limit:
                return
            counts = Counter(self._hosts.values())
            most = max(counts.values())
            oldest = next(each for each, its in self._hosts.items() if counts[its] == most)
            del self._hosts[oldest]
            with suppress(OSError):  # its other end has already closed it
                # Not SSLSocket's own, which takes its state away from the thread that reads it.
                socket.socket.shutdown(oldest, socket.SHUT_RDWR)

    def leave(self, sock: ssl.SSLSocket) -> bool:
        """Stop counting it, before it is closed. False: it was shut down to make room."""
        with self._lock:
            return self._hosts.pop(sock, None) is not None


class _Branch:
    """One carried socket. `credit_bytes`: how much of it may be sent; `queued` waits for the link,
    `due` for the socket."""

    def __init__(self, what: Carried, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.what, self.sock, self.fd = what, sock, sock.fileno()
        self.has_packets = sock.type == socket.SOCK_SEQPACKET
        self.window_bytes = self.credit_bytes = WINDOW_BYTES[what]
        self.queued: deque[memoryview] = deque()
        self.due: deque[memoryview] = deque()
        self.due_bytes = 0
        self.is_open = True
        self._delivered_bytes = 0  # for which no credit was given yet

    @property
    def may_read(self) -> bool:
        return self.is_open and self.credit_bytes >= (MAX_PACKET_BYTES if self.has_packets else 1)

    def read(self) -> None:
        """Queue what can be read from the socket: one packet or some bytes."""
        most = MAX_PACKET_BYTES if self.has_packets else min(READ_BYTES, self.credit_bytes)
        try:
            found = self.sock.recv(most)
        except BlockingIOError:
            return
        except OSError:
            found = b""
        if not found:
            self.is_open = False
            return
        self.credit_bytes -= len(found)
        self.queued.append(memoryview(found))

    def next_frame(self) -> bytes:
        """Take the next frame from the queue."""
        first = self.queued[0]
        if len(first) <= FRAME_BYTES:
            self.queued.popleft()
        else:
            self.queued[0] = first[FRAME_BYTES:]
        return frame(self.what, first[:FRAME_BYTES])

    def came(self, content: bytes) -> None:
        """Accept data for the socket. Raises WireError if it exceeds the window."""
        if not content or self.due_bytes + len(content) > self.window_bytes:
            raise WireError(f"{len(content)} bytes of {self.what.name}, beyond its window")
        self.due.append(memoryview(content))
        self.due_bytes += len(content)
        self.deliver()

    def deliver(self) -> None:
        """Write as much to the socket as it accepts. Data for a closed socket is dropped."""
        while self.due:
            first = self.due[0]
            try:
                num_sent = self.sock.send(first, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                num_sent = len(first)
            self.due_bytes -= num_sent
            self._delivered_bytes += num_sent
            if num_sent == len(first):
                self.due.popleft()
            else:
                self.due[0] = first[num_sent:]

    def take_credit(self) -> int:
        """Bytes that the other end may send in addition: none before a quarter of the window was
        delivered."""
        if self._delivered_bytes * 4 < self.window_bytes:
            return 0
        told, self._delivered_bytes = self._delivered_bytes, 0
        return told


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """Why a link ended. `is_local`: a socket of this machine was closed."""

    words: str
    is_local: bool = False


class Link:
    """Carries the sockets of one process until it, or the connection, ends. One thread; stop() may
    be called from any."""

    def __init__(
        self, sock: ssl.SSLSocket, sockets: Mapping[Carried, socket.socket], peer: str
    ) -> None:
        """Takes over all sockets. `peer`: the other machine's name, for errors."""
        tune(sock)
        sock.setblocking(False)
        self._sock, self._fd, self._peer = sock, sock.fileno(), peer
        self._branches = {what: _Branch(what, sockets[what]) for what in sorted(sockets)}
        self._by_number = {int(what): branch for what, branch in self._branches.items()}
        self._by_fd = {branch.fd: branch for branch in self._branches.values()}
        self._others: deque[bytes] = deque()  # frames without data
        self._sending = memoryview(b"")
        self._came = bytearray()
        self._end: LinkEnd | None = None
        self._is_finishing = False
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._heard_s = self._sent_s = time.monotonic()
        cores = len(os.sched_getaffinity(0))
        self._spin_s = BRIEF_SPIN_S if cores >= SPARE_CORES else 0.0

    def run(self) -> LinkEnd:
        """Carry everything until the end. Raises nothing: errors end the link."""
        return self._until(lambda: False)

    def finish(self, words: str, deadline_s: float = FINISH_S) -> None:
        """After run(): carry what the sockets still have, send how the process ended, and close."""
        self._is_finishing = True
        if self._end is not None and self._end.is_local:
            self._end = None
            before_s = time.monotonic() + deadline_s
            self._until(lambda: self._is_drained or time.monotonic() > before_s)
            self._others.append(frame(END, words.encode()[:FRAME_BYTES]))
            self._until(lambda: not self._has_to_send or time.monotonic() > before_s)
        self.close()

    def stop(self) -> None:
        """End run() soon. May be called from any thread."""
        os.eventfd_write(self._stop, 1)

    def close(self) -> None:
        """Close all sockets."""
        self._sock.close()
        for branch in self._branches.values():
            branch.sock.close()
        os.close(self._stop)

    @property
    def _is_drained(self) -> bool:
        """Whether nothing of the sockets is left to be sent."""
        return not any(b.is_open or b.queued for b in self._branches.values())

    @property
    def _has_to_send(self) -> bool:
        if self._sending or self._others:
            return True
        return any(branch.queued for branch in self._branches.values())

    def _until(self, is_over: Callable[[], bool]) -> LinkEnd:
        try:
            self._receive()  # data that arrived with the opening
            while self._end is None and not is_over():
                self._step()
        except (ConnectionError, ssl.SSLEOFError):
            self._end = self._end or LinkEnd(f"{self._peer} closed the link")
        except (OSError, WireError) as error:
            self._end = LinkEnd(f"the link to {self._peer} broke: {error}")
        return self._end or LinkEnd("")

    def _step(self) -> None:
        """Wait until something can be carried, and carry it."""
        happened = self._wait()
        for fd, events in happened.items():
            if (branch := self._by_fd.get(fd)) is None:
                continue
            if events & select.POLLOUT:
                branch.deliver()
            if events & ~select.POLLOUT and branch.is_open:
                self._read(branch)
        if self._fd in happened:
            self._receive()
        self._give_credit()
        now_s = time.monotonic()
        if now_s - self._sent_s >= BEAT_S and not self._has_to_send:
            self._others.append(frame(BEAT))
        self._send(now_s)
        if self._stop in happened:
            self._end = LinkEnd("another connection took its place")
        elif now_s - self._heard_s > SILENCE_S and self._end is None:
            self._end = LinkEnd(f"no sign of {self._peer} for {SILENCE_S:g} s")

    def _read(self, branch: _Branch) -> None:
        branch.read()
        if not branch.is_open and branch.what in VITAL and not self._is_finishing:
            self._end = LinkEnd("its process is gone", is_local=True)

    def _wait(self) -> dict[int, int]:
        """What happened, by descriptor. Spins for a moment if cores are spare, as a packet and its
        answer follow each other closely."""
        waiting = select.poll()
        waiting.register(self._stop, select.POLLIN)
        wants_to_write = select.POLLOUT if self._has_to_send else 0
        waiting.register(self._fd, select.POLLIN | wants_to_write)
        for branch in self._branches.values():
            reads = select.POLLIN if branch.may_read else 0
            writes = select.POLLOUT if branch.due else 0
            if reads or writes:
                waiting.register(branch.fd, reads | writes)
        happened = waiting.poll(0)
        if not happened and self._spin_s:
            until_s = time.perf_counter() + self._spin_s
            while not happened and time.perf_counter() < until_s:
                happened = waiting.poll(0)
        return dict(happened or waiting.poll(int(BEAT_S * 1e3)))

    def _give_credit(self) -> None:
        for branch in self._branches.values():
            if num_bytes := branch.take_credit():
                self._others.append(frame(IS_CREDIT + branch.what, CREDIT.pack(num_bytes)))

    def _send(self, now_s: float) -> None:
        """Send as much as the connection accepts, the most urgent first."""
        while True:
            if not self._sending:
                content = self._next_frame()
                if not content:
                    return
                self._sending = memoryview(content)
            try:
                num_sent = self._sock.send(self._sending)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            self._sent_s = now_s
            self._sending = self._sending[num_sent:]

    def _next_frame(self) -> bytes:
        if self._others:
            return self._others.popleft()
        for branch in self._branches.values():
            if branch.queued:
                return branch.next_frame()
        return b""

    def _receive(self) -> None:
        """Receive everything that has arrived, and handle its frames."""
        while True:
            try:
                some = self._sock.recv(READ_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            if not some:
                self._take_frames()
                self._end = self._end or LinkEnd(f"{self._peer} closed the link")
                return
            self._heard_s = time.monotonic()
            self._came += some
            if len(self._came) >= READ_BYTES:
                self._take_frames()
        self._take_frames()

    def _take_frames(self) -> None:
        begin, came = 0, self._came
        while len(came) - begin >= HEADER.size:
            kind, num_bytes = HEADER.unpack_from(came, begin)
            if num_bytes > FRAME_BYTES:
                raise WireError(f"a frame of {num_bytes} bytes")
            end = begin + HEADER.size + num_bytes
            if len(came) < end:
                break
            self._take(kind, bytes(came[begin + HEADER.size : end]))
            begin = end
        del came[:begin]

    def _take(self, kind: int, content: bytes) -> None:
        """Handle one frame. Raises WireError for one that is not allowed."""
        if kind == BEAT:
            return
        if kind == END:
            self._end = LinkEnd(content.decode(errors="replace"))
            return
        is_credit = IS_CREDIT <= kind < BEAT
        branch = self._by_number.get(kind - IS_CREDIT * is_credit)
        if branch is None:
            raise WireError(f"a frame of kind {kind}")
        if not is_credit:
            branch.came(content)
            return
        if len(content) != CREDIT.size:
            raise WireError(f"a credit of {len(content)} bytes")
        branch.credit_bytes += CREDIT.unpack(content)[0]
        if branch.credit_bytes > branch.window_bytes:
            raise WireError(f"credit for {branch.credit_bytes} bytes of {branch.what.name}")


def dial(address: Address, context: ssl.SSLContext, name: str, timeout_s: float) -> ssl.SSLSocket:
    """Connect to the machine `name`, whose certificate must have this name. Raises OSError,
    including ssl.SSLError."""
    sock = socket.create_connection(address, timeout_s)
    try:
        tune(sock)
        return context.wrap_socket(sock, server_hostname=name)
    except BaseException:
        sock.close()
        raise


def is_reachable(address: Address, timeout_s: float) -> bool:
    """Whether something listens there."""
    with suppress(OSError), socket.create_connection(address, timeout_s):
        return True
    return False
