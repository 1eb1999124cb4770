"""Signs of life between two processes, beside their channel: whatever one of them is doing.

Owns a socket at either end and a thread that asks. What is asked for is answered without the
interpreter, so that who imports, compiles or computes is not taken for dead. Kills nobody.
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

# Threads that were told to end, and what is said where one does not. Owns the deadline. Knows
# nothing of what they do.


JOIN_S = 5.0

log = logging.getLogger(__name__)


def has_ended(thread: threading.Thread) -> bool:
    """Whether the thread, which was told to end, does so within JOIN_S; else that is said, and what
    it uses has to stay.
    """
    thread.join(JOIN_S)
    if thread.is_alive():
        log.error("thread %r did not end within %g s; it is left behind", thread.name, JOIN_S)
    return not thread.is_alive()


# What a process tells beside its channel, from any of its threads: numbers of what is over.
# Owns a socket at the end that tells; at the other end who watches the process has it. Knows
# not what the numbers mean.


NUMBER_BYTES = 8
MAX_EARLY = 4096  # told, and nobody has asked for them yet

Call = Callable[[bool], None]


class CompletionSender:
    """The end that tells."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over the socket."""
        self._socket = sock

    def send(self, number: int) -> None:
        """This is over. Any thread may tell. Raises OSError where nobody listens any more."""
        self._socket.send(number.to_bytes(NUMBER_BYTES, "little"), socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


class Completions:
    """Who waits for which number. Any thread may ask; one hears."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Call] = {}
        self._early: set[int] = set()
        self._is_over = False

    def expect(self, number: int, call: Call) -> None:
        """Call once: with True when the number is told, or now if it has been; with False when the
        process has ended. What is called must not wait.
        """
        with self._lock:
            is_told = number in self._early
            self._early.discard(number)
            if not is_told and not self._is_over:
                self._waiting[number] = call
                return
        call(is_told)

    def came(self, packet: bytes) -> bool:
        """A number was told; False for what is none, or for more than anybody could have asked
        for.
        """
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
        """Nothing more will be told. Idempotent."""
        with self._lock:
            self._is_over = True
            left, self._waiting = [*self._waiting.values()], {}
        for call in left:
            call(False)


QUESTION = b"?"
MAX_ANSWER_BYTES = 64


class Answering:
    """The end that is asked. Its thread alone has the socket: both end at once, and the other end
    sees that before the process has given its memory back.
    """

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
            sock.close()  # here; not what the thread has

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


class Watch:
    """The end that asks, until the process ends: `on_hang` is called once if it is silent for too
    long, `on_end` once when it ends or nobody asks any more; both in the thread of this.
    """

    def __init__(
        self,
        sock: socket.socket,
        channel_fd: int,
        pidfd: int,
        heartbeat: Heartbeat,
        completions_socket: socket.socket,
        completions: Completions,
        on_hang: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        """Takes over both sockets. What comes through the second one is heard by `tidings`, until
        the process has ended. The process is silent from its first sign of life on: until then
        it may not have come to its first line. `channel_fd`: a socket whose other end is closed
        with the process's other descriptors. Of these and the one here the system may close either
        only after all memory has been given back, whichever thread is the last to end.
        """
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
        """Since the last sign of life; None before the first. Any thread may ask."""
        heard_s = self._heard_s
        return None if heard_s is None else time.monotonic() - heard_s

    def close(self) -> None:
        """Stop asking. Idempotent."""
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
        """Ask until it is gone; False: until nobody asks any more."""
        waiting = select.poll()
        completions_fd = self._completions_socket.fileno()
        for fd in (self._pidfd, self._stop, self._socket.fileno(), completions_fd):
            waiting.register(fd, select.POLLIN)
        waiting.register(self._channel_fd, 0)  # its end alone: what comes is not for us
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
        """Count the silence, and ask again; False where it has been too long."""
        if self._heard_s is not None:
            self._silent_s = self._heartbeat.silent_s(self._silent_s, passed_s)
            if self._heartbeat.is_hung(self._silent_s):
                self._on_hang(f"it gave no sign of life for {self._heartbeat.deadline_s:g} s")
                return False
        with suppress(OSError):  # full or gone: there is no answer, then
            self._socket.send(QUESTION, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        return True

    def _receive_completion(self) -> bool:
        """Whether there may be more to hear."""
        try:
            told = self._completions_socket.recv(MAX_ANSWER_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            told = b""
        if told and not self._completions.came(told):
            self._on_hang("it told of what nobody has asked for")
            return False
        return bool(told)

    def _hear(self) -> bool:
        """Whether there may be more to hear; nobody but the process has the other end."""
        try:
            answer = self._socket.recv(MAX_ANSWER_BYTES, socket.MSG_DONTWAIT)
        except OSError:  # it has ended, and left our question unread
            answer = b""
        if answer:
            self._heard_s, self._silent_s = time.monotonic(), 0.0
        return bool(answer)
