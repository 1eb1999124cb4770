"""Types of rings.pyx. Both ends map the memory behind `view`."""

from typing import Any

ALIGN_BYTES: int

class Room:
    @property
    def begin(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def view(self) -> memoryview: ...

class RingWriter:
    is_closed: bool
    def __init__(
        self,
        view: memoryview,
        begin: int,
        end: int,
        word: int,
        first_sequence: int,
        wrong: type[Exception],
    ) -> None: ...
    def reserve(self, num_bytes: int) -> Room | None: ...
    def commit(self, room: Any) -> Room: ...
    def push(self) -> bool: ...
    def close(self) -> None: ...

class RingPayload:
    @property
    def num_bytes(self) -> int: ...
    def view(self, num_bytes: int) -> memoryview: ...
    def into(self, target: memoryview) -> None: ...
    def lend(self, memory: object) -> Any: ...
    def free(self) -> None: ...

class RingReader:
    is_closed: bool
    def __init__(
        self,
        view: memoryview,
        begin: int,
        end: int,
        word: int,
        first_sequence: int,
        wrong: type[Exception],
        lower: int,
        upper: int,
        memory: object,
        span: Any,
    ) -> None: ...
    def accept(self, begin: int, num_bytes: int, sequence: int, hooks: Any) -> RingPayload: ...
    def close(self) -> None: ...
