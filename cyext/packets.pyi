"""Types of packets.pyx."""

from collections.abc import Callable
from typing import Any

class PacketCodec:
    session: int
    next_number: int
    def __init__(
        self,
        session: int,
        packet: Callable[[int, int, Any, int, Any], Any],
        encode: Callable[[Any], bytes],
        decode: Callable[[Any], Any],
        max_bytes: int,
        wrong: type[Exception],
        unreadable: tuple[type[BaseException], ...],
    ) -> None: ...
    def encode(self, body: Any, answers: int = 0, payload: Any = None) -> bytes: ...
    def decode(self, raw: memoryview | bytes) -> Any: ...

class PacketPort:
    @property
    def fd(self) -> int: ...
    @property
    def waited_s(self) -> float: ...
    def __init__(
        self,
        fd: int,
        codec: PacketCodec,
        traffic: Any,
        received: Callable[[Any, Any, int, int], Any],
        ping: type[Any],
        accept: Callable[[Any, Any], Any],
        hooks: Any,
    ) -> None: ...
    def send(self, body: Any, answers: int = 0, payload: Any = None) -> int | None: ...
    def receive(self, spin_s: float, sleeps: bool) -> Any: ...
    def take_ping(self, packet: Any) -> None: ...
