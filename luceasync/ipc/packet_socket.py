"""A SEQPACKET socket that sends and reads packets of one session, and answers its pings.

Owns the socket. Linux keeps each packet whole, or cuts it and says so.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from contextlib import suppress

from luceasync.cyext.packets import PacketPort, Patience
from luceasync.ipc.packets import Codec, Ping, Pong, WireError
from luceasync.ipc.payloads import Hooks, Inbox

MAX_PINGS = 64  # that nobody has room for the answers to
WAIT_US = 10_000  # by then a process that has ended is noticed, whoever holds its socket


class PacketSocket(PacketPort):
    """One end. A read wakes faster than poll(2) and a read after it."""

    def __init__(
        self, sock: socket.socket, codec: Codec, patience: Patience, inbox: Inbox, hooks: Hooks
    ) -> None:
        sock.setblocking(True)  # waits are bounded by the system, others by MSG_DONTWAIT
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, WAIT_US))
        super().__init__(sock.fileno(), codec, patience, Ping, inbox.accept, hooks)
        self._sock = sock
        self.pings: deque[int] = deque()

    def take_ping(self, number: int, has_payload: bool) -> None:
        """Answer one as soon as there is room. Raises WireError."""
        if has_payload or len(self.pings) >= MAX_PINGS:
            raise WireError("a ping with a payload, or more of them than can be answered")
        self.pings.append(number)
        self.answer_pings()

    def answer_pings(self) -> None:
        """As far as the socket takes answers now."""
        while self.pings and self.send(Pong(), self.pings[0]) is not None:
            self.pings.popleft()

    def close(self) -> None:
        """Idempotent. The other end sees it, whoever else has the socket."""
        with suppress(OSError):  # closed before, or there
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
