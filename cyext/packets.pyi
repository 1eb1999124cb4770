"""Types of packets.pyx."""

from collections.abc import Callable
from typing import Any

HEADER_BYTES: int

class PacketCodec:
    @property
    def session(self) -> int: ...
    @property
    def next_number(self) -> int: ...
    def __init__(
        self,
        session: int,
        encode_into: Callable[[Any, bytearray, int], object],
        decode: Callable[[Any], Any],
        span: Callable[[int, int, int], Any],
        max_bytes: int,
        wrong: type[Exception],
        unreadable: tuple[type[BaseException], ...],
    ) -> None: ...
    def encode(self, message: Any, answers: int = 0, payload: Any = None) -> bytes: ...
    def decode(self, raw: memoryview | bytes) -> tuple[Any, int, int, Any]: ...

class Traffic:
    packets_sent: int
    packets_received: int
    packet_bytes_sent: int
    packet_bytes_received: int
    payload_bytes_sent: int
    payload_bytes_received: int
    payload_bytes_lent: int
    @property
    def num_bytes_sent(self) -> int: ...
    @property
    def num_bytes_received(self) -> int: ...

class PacketPort:
    @property
    def fd(self) -> int: ...
    @property
    def waited_s(self) -> float: ...
    def __init__(
        self,
        fd: int,
        codec: PacketCodec,
        traffic: Traffic,
        received: Callable[[Any, Any, int, int], Any],
        ping: type[Any],
        accept: Callable[[int, int, int, Any], Any],
        hooks: Any,
    ) -> None: ...
    def send(self, message: Any, answers: int = 0, payload: Any = None) -> int | None: ...
    def receive(self, spin_s: float, sleeps: bool) -> Any: ...
    def take_ping(self, number: int, has_payload: bool) -> None: ...
