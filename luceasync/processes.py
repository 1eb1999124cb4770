"""How processes are that an engine works with besides its own: what users are told of them.

Owns the words only. Knows nothing of how they are started or what is said to them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process of the engine's besides this one, such as a group of the model's layers.

    `detail` is empty where it does its work, else it says what is the matter, and `retry_after_s`
    when it may be there again. Calls, seconds of waiting for their answers and bytes are totals of
    all its lives, of which it has had `num_starts`. `heartbeat_age_s`: since its last sign of life.
    `is_waited_for`: requests wait while it is away.
    """

    name: str
    devices: tuple[str, ...]
    detail: str = ""
    retry_after_s: int = 1
    num_starts: int = 0
    calls_total: int = 0
    call_s_total: float = 0.0
    sent_bytes_total: int = 0
    received_bytes_total: int = 0
    heartbeat_age_s: float | None = None
    resident_bytes: int = 0
    node_bytes: int = 0
    is_waited_for: bool = True


@dataclass(frozen=True, slots=True)
class Processes:
    """All of them."""

    all: tuple[ProcessStatus, ...] = ()

    @property
    def away(self) -> ProcessStatus | None:
        """The first one that does not do its work, and that requests wait for."""
        for each in self.all:
            if each.detail and each.is_waited_for:
                return each
        return None


NO_PROCESSES = Processes()
