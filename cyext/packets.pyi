"""Types of packets.pyx."""

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

M = TypeVar("M")
A = TypeVar("A")

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

class Patience:
    @property
    def spin_s(self) -> float: ...
    def __init__(
        self, max_s: float, *, trusts_sleep: bool, max_credit: int, probe_every: int
    ) -> None: ...
    def waited(self, seconds: float) -> None: ...

class Received(Generic[M]):
    @property
    def message(self) -> M: ...
    @property
    def payload(self) -> Any: ...
    @property
    def number(self) -> int: ...
    @property
    def answers(self) -> int: ...
    def __init__(self, message: M, payload: Any, number: int, answers: int) -> None: ...

class PacketPort:
    pings: deque[int]
    patience: Patience
    @property
    def fd(self) -> int: ...
    @property
    def traffic(self) -> Traffic: ...
    def __init__(
        self,
        fd: int,
        codec: PacketCodec,
        patience: Patience,
        ping: type[Any],
        accept: Callable[[int, int, int, Any], Any],
        hooks: Any,
    ) -> None: ...
    def send(self, message: Any, answers: int = 0, payload: Any = None) -> int | None: ...
    def receive(self, limit_s: float) -> Received[Any] | None: ...
    def receive_late(self, sleeps: bool) -> Received[Any] | None: ...
    def take_ping(self, number: int, has_payload: bool) -> None: ...

class QuickChannel(Generic[M]):
    closed: str | None
    _came: deque[Received[Any]]
    @property
    def traffic(self) -> Traffic: ...
    def __init__(
        self,
        packets: PacketPort,
        outbox: Any,
        came: deque[Received[Any]],
        gone: type[Exception],
        ends: tuple[type[Exception], ...],
    ) -> None: ...
    def reserve(self, num_bytes: int, deadline_s: float) -> Any: ...
    def send(
        self, message: Any, payload: Any = None, *, answers: int = 0, deadline_s: float
    ) -> int: ...
    def receive(self, deadline_s: float) -> Received[M]: ...
    def answer(self, number: int, kind: type[A], deadline_s: float) -> Received[A]: ...
    def call(
        self, message: Any, kind: type[A], payload: Any = None, *, deadline_s: float
    ) -> Received[A]: ...
