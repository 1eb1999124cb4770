"""What a process tells beside its channel, from any of its threads: numbers of what is over.

Owns a socket at the end that tells; at the other end who watches the process has it. Knows not what
the numbers mean.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

NUMBER_BYTES = 8
MAX_EARLY = 4096  # told, and nobody has asked for them yet

Call = Callable[[bool], None]


class Telling:
    """The end that tells."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over the socket."""
        self._socket = sock

    def tell(self, number: int) -> None:
        """This is over. Any thread may tell. Raises OSError where nobody listens any more."""
        self._socket.send(number.to_bytes(NUMBER_BYTES, "little"), socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


class Tidings:
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
