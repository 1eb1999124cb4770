"""A look at an engine from outside: what it holds, what it has done, how well it is.

Owns the words only; luceasync.request is where they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from luceasync.processes import NO_PROCESSES, Processes


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """The prefix cache: bytes and nodes by tier, and what became of requests since the start.

    `restored_total` counts requests by tier, `missed_total` by reason, `restored_tokens_total`
    tokens by tier; `saved_total` nodes by tier, `evicted_total` likewise. `num_unwritten` nodes
    are still on their way to the disk. `degraded` is not empty while a fault of the disk keeps
    nodes from being written or read.
    """

    num_bytes: Mapping[str, int] = field(default_factory=dict)
    num_nodes: Mapping[str, int] = field(default_factory=dict)
    restored_total: Mapping[str, int] = field(default_factory=dict)
    restored_tokens_total: Mapping[str, int] = field(default_factory=dict)
    missed_total: Mapping[str, int] = field(default_factory=dict)
    saved_total: Mapping[str, int] = field(default_factory=dict)
    evicted_total: Mapping[str, int] = field(default_factory=dict)
    written_bytes_total: int = 0
    read_bytes_total: int = 0
    quarantined_total: int = 0
    num_unwritten: int = 0
    degraded: str = ""


@dataclass(frozen=True, slots=True)
class SpeculationStatus:
    """Speculation since the start: `accepted_by_slot[i]` of `proposed_by_slot[i]` tokens in slot i
    of the draft's block were accepted; seconds by part of a round. `off_reason`: why there is none
    now, for anybody.
    """

    rounds_total: int = 0
    proposed_by_slot: tuple[int, ...] = ()
    accepted_by_slot: tuple[int, ...] = ()
    draft_s_total: float = 0.0
    verify_s_total: float = 0.0
    host_s_total: float = 0.0
    off_reason: str | None = None


@dataclass(frozen=True, slots=True)
class ResidenceStatus:
    """What of all lanes is on the devices, in tokens of whole chunks, and the bytes of host memory
    that lanes take for themselves; what has moved since the start.
    """

    resident_tokens: int = 0
    absent_tokens: int = 0
    own_bytes: int = 0
    recalled_total: int = 0
    evicted_total: int = 0
    looks_total: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A look at the engine from outside; counts are of this moment, totals since the start, of
    tokens and steps since it was made anew. `cache`, `speculation`, `residence` None: there is
    none. `has_failed`: it is not there, and is being made anew; whoever is refused may come back in
    `retry_after_s`. `processes`: others that it works with.
    """

    ready: bool
    detail: str
    num_lanes: int
    num_running: int
    num_queued: int
    prefilled_tokens_total: int
    decoded_tokens_total: int
    decode_steps_total: int
    cache: CacheStatus | None = None
    speculation: SpeculationStatus | None = None
    has_failed: bool = False
    restarts_total: int = 0
    retry_after_s: int = 1
    processes: Processes = NO_PROCESSES
    residence: ResidenceStatus | None = None
