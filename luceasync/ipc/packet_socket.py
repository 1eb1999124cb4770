"""A SEQPACKET socket that sends and reads packets of one session without ever waiting.

Owns the socket and the codec, and counts packets. Linux keeps each packet whole, or cuts it and
says so.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from contextlib import suppress
from typing import Any

from luceasync.ipc.channel import Traffic
from luceasync.ipc.packets import (
    MAX_PACKET_BYTES,
    Codec,
    Message,
    Packet,
    Ping,
    Pong,
    Span,
    WireError,
)

MAX_PINGS = 64  # that nobody has room for the answers to
SENDING = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
AT_ONCE = socket.MSG_TRUNC | socket.MSG_DONTWAIT
WAITING = socket.MSG_TRUNC
WAIT_US = 10_000  # by then a process that has ended is noticed, whoever holds its socket


class PacketSocket:
    """One end. Pings are answered here, and nobody else sees them."""

    def __init__(self, sock: socket.socket, codec: Codec, traffic: Traffic) -> None:
        sock.setblocking(True)  # waits are bounded by the system, others by MSG_DONTWAIT
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, WAIT_US))
        self.fd = sock.fileno()
        self._sock = sock
        self._codec = codec
        self._traffic = traffic
        self._buffer = bytearray(MAX_PACKET_BYTES)
        self._view = memoryview(self._buffer)
        self.pings: deque[int] = deque()

    def send(self, message: Message, answers: int = 0, span: Span | None = None) -> int | None:
        """The number of the packet, or None: the socket is full. Raises OSError, ValueError."""
        raw = self._codec.encode(message, answers, span)
        try:
            self._sock.send(raw, SENDING)
        except BlockingIOError:
            return None
        number = self._codec.next_number
        self._codec.next_number = number + 1
        self._traffic.packets_sent += 1
        self._traffic.packet_bytes_sent += len(raw)
        return number

    def receive(self, waits: bool = False) -> Packet[Any] | None:
        """The next packet, or None where there is none; `waits`: where none came for WAIT_US. That
        wait wakes faster than poll(2) and a read after it. Raises WireError, OSError.
        """
        flags = WAITING if waits else AT_ONCE
        try:
            num_bytes = self._sock.recv_into(self._buffer, 0, flags)
        except BlockingIOError:
            return None
        if num_bytes == 0:
            raise WireError("it is gone")
        if num_bytes > MAX_PACKET_BYTES:
            raise WireError(f"a packet of {num_bytes} bytes; at most {MAX_PACKET_BYTES} may come")
        packet = self._codec.decode(self._view[:num_bytes])
        self._traffic.packets_received += 1
        self._traffic.packet_bytes_received += num_bytes
        if packet.body.__class__ is not Ping:
            return packet
        if packet.payload is not None or len(self.pings) >= MAX_PINGS:
            raise WireError("a ping with a payload, or more of them than can be answered")
        self.pings.append(packet.number)
        self.answer_pings()
        return None

    def answer_pings(self) -> None:
        """As far as the socket takes answers now."""
        while self.pings and self.send(Pong(), self.pings[0]) is not None:
            self.pings.popleft()

    def close(self) -> None:
        """Idempotent. The other end sees it, whoever else has the socket."""
        with suppress(OSError):  # closed before, or there
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
