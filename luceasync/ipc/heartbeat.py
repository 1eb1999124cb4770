"""Heartbeats between two processes, and completions, both outside their channel.

Owns a socket at either end and a thread that sends heartbeats. A child answers without the
interpreter, so that one that imports, compiles or computes is not taken for dead. Kills no process.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from luceasync.cyext.pulse import echo, keep_alone
from luceasync.ipc.supervised import Heartbeat

JOIN_S = 5.0

log = logging.getLogger(__name__)


def has_ended(thread: threading.Thread) -> bool:
    """Wait for a thread that was told to end. Returns False, and logs an error, if it does not end
    within JOIN_S: the objects that it uses must then be kept."""
    thread.join(JOIN_S)
    if thread.is_alive():
        log.error("thread %r did not end within %g s; it is left running", thread.name, JOIN_S)
    return not thread.is_alive()


NUMBER_BYTES = 8
MAX_EARLY = 4096  # completed before they were expected

Call = Callable[[bool], None]


class CompletionSender:
    """The child's end: completes numbers outside the channel, from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over the socket."""
        self._socket = sock

    def send(self, number: int) -> None:
        """Complete a number. May be called from any thread. Raises OSError if the parent is
        gone."""
        self._socket.send(number.to_bytes(NUMBER_BYTES, "little"), socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


class CompletionWaiters:
    """The parent's end: calls that wait for numbers. Any thread may register; one receives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Call] = {}
        self._early: set[int] = set()
        self._is_over = False

    def expect(self, number: int, call: Call) -> None:
        """Call `call` once: with True when the number is completed, or now if it was already; with
        False when the process has ended. The call must not block."""
        with self._lock:
            is_told = number in self._early
            self._early.discard(number)
            if not is_told and not self._is_over:
                self._waiting[number] = call
                return
        call(is_told)

    def came(self, packet: bytes) -> bool:
        """Handle a packet with a number. Returns False if it is malformed, or if too many numbers
        have arrived that were not expected."""
        number = int.from_bytes(packet, "little")
        with self._lock:
            call = self._waiting.pop(number, None)
            if call is None:
                self._early.add(number)
            is_sound = len(packet) == NUMBER_BYTES and len(self._early) <= MAX_EARLY
        if call is not None:
            call(True)
        return is_sound

    def end(self) -> None:
        """The process has ended: nothing more will arrive. Idempotent."""
        with self._lock:
            self._is_over = True
            left, self._waiting = [*self._waiting.values()], {}
        for call in left:
            call(False)


QUESTION = b"?"
MAX_ANSWER_BYTES = 64


class HeartbeatResponder:
    """The child's end. Only its thread has the socket, so that when the child dies, the parent sees
    it close before the system has freed the memory of the process."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over the socket."""
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._socket = sock
        self._is_alone = False
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="signs of life", daemon=True)
        self._thread.start()
        self._has_begun.wait()
        if self._is_alone:
            sock.close()  # closed here; the thread keeps its copy

    def _answer(self) -> None:
        fd, stop = self._socket.fileno(), self._stop
        self._is_alone = keep_alone(fd, stop)
        self._has_begun.set()
        echo(fd, stop)

    def close(self) -> None:
        """Idempotent."""
        if self._stop >= 0:
            os.eventfd_write(self._stop, 1)
            if has_ended(self._thread):
                os.close(self._stop)
                self._socket.close()
            self._stop = -1


class ProcessWatch:
    """The parent's end: a thread that sends heartbeats until the process ends. It calls `on_hang`
    once if the process is silent for too long, and `on_end` once when the process ends or the watch
    is closed."""

    def __init__(
        self,
        sock: socket.socket,
        channel_fd: int,
        pidfd: int,
        heartbeat: Heartbeat,
        completions_socket: socket.socket,
        completions: CompletionWaiters,
        on_hang: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        """Takes over both sockets; numbers received through the second one go to `completions`.
        Silence is measured from the first answer on: until then the process may not have reached
        its first line. `channel_fd`: a socket whose other end the process has, too. The system
        closes one of the two late, after it has freed all memory: which one depends on the thread
        that ends last."""
        self._socket = sock
        self._channel_fd = channel_fd
        self._pidfd = pidfd
        self._heartbeat = heartbeat
        self._completions_socket = completions_socket
        self._completions = completions
        self._on_hang = on_hang
        self._on_end = on_end
        self._heard_s: float | None = None
        self._silent_s = 0.0
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self.has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="asks for life", daemon=True)
        self._thread.start()

    @property
    def age_s(self) -> float | None:
        """Seconds since the last answer; None before the first. May be called from any thread."""
        heard_s = self._heard_s
        return None if heard_s is None else time.monotonic() - heard_s

    def close(self) -> None:
        """Stop sending heartbeats. Idempotent."""
        if self._stop >= 0:
            os.eventfd_write(self._stop, 1)
            if has_ended(self._thread):
                os.close(self._stop)
                self._socket.close()
                self._completions_socket.close()
            self._stop = -1

    def _run(self) -> None:
        try:
            if self._is_gone_at_last():
                self.has_ended.set()
        finally:
            self._completions.end()
            self._on_end()

    def _is_gone_at_last(self) -> bool:
        """Send heartbeats until the process is gone; False: the watch was closed."""
        waiting = select.poll()
        completions_fd = self._completions_socket.fileno()
        for fd in (self._pidfd, self._stop, self._socket.fileno(), completions_fd):
            waiting.register(fd, select.POLLIN)
        # Hang-ups only: messages there are not for this thread.
        waiting.register(self._channel_fd, 0)
        interval_s = self._heartbeat.interval_s
        asked_s, is_asking = -interval_s, True
        while True:
            now_s = time.monotonic()
            if is_asking and now_s >= asked_s + interval_s:
                is_asking = self._ask(now_s - asked_s)
                asked_s = now_s
            happened = dict(waiting.poll(round(interval_s * 1e3)))
            if self._stop in happened:
                return False
            if completions_fd in happened and not self._receive_completion():
                waiting.unregister(completions_fd)
            is_gone = self._socket.fileno() in happened and not self._hear()
            if is_gone or self._pidfd in happened or self._channel_fd in happened:
                return True

    def _ask(self, passed_s: float) -> bool:
        """Add to the silence, and send another heartbeat; False if the silence is too long."""
        if self._heard_s is not None:
            self._silent_s = self._heartbeat.silent_s(self._silent_s, passed_s)
            if self._heartbeat.is_hung(self._silent_s):
                self._on_hang(f"it gave no sign of life for {self._heartbeat.deadline_s:g} s")
                return False
        with suppress(OSError):  # full or gone: there will be no answer
            self._socket.send(QUESTION, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        return True

    def _receive_completion(self) -> bool:
        """Receive a completion; returns whether more may arrive."""
        try:
            packet = self._completions_socket.recv(MAX_ANSWER_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            packet = b""
        if packet and not self._completions.came(packet):
            self._on_hang("it completed what was not waited for")
            return False
        return bool(packet)

    def _hear(self) -> bool:
        """Receive an answer; returns whether more may arrive. Only the process has the other
        end."""
        try:
            answer = self._socket.recv(MAX_ANSWER_BYTES, socket.MSG_DONTWAIT)
        except OSError:  # it ended without reading our heartbeat
            answer = b""
        if answer:
            self._heard_s, self._silent_s = time.monotonic(), 0.0
        return bool(answer)
