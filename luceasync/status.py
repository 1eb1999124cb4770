"""A look at an engine from outside: what it holds, what it has done, how well it is.

Owns the words only; luceasync.request is where they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# A closer look at an engine: what is on each lane, who waits, what of prompts is kept. Owns the
# words only; luceasync.request is where it is asked for. No text and no token is told.


@dataclass(frozen=True, slots=True)
class LaneLook:
    """What runs on a lane: `phase` is restoring, prefilling, decoding or unread; the lane holds
    `done_tokens` of the prompt, of which `cached_tokens` were not run. Seconds since it began.
    `tau` None: there is no draft; tokens on the devices and away from them None: all are there.
    """

    lane: int
    phase: str
    prompt_tokens: int
    done_tokens: int
    cached_tokens: int
    generated_tokens: int
    max_tokens: int
    running_s: float
    tau: float | None = None
    rounds: int = 0
    resident_tokens: int | None = None
    absent_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class WaitingLook:
    """One that waits for a lane."""

    prompt_tokens: int
    waiting_s: float


@dataclass(frozen=True, slots=True)
class NodeLook:
    """A kept node, tokens `[begin, end)` behind those of `parent`: bytes by tier, in how many
    requests it was taken up, and seconds since it last was. Keys are as files are named.
    """

    key: str
    parent: str | None
    begin: int
    end: int
    num_bytes: Mapping[str, int]
    has_state: bool
    hits: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class EngineLook:
    """All of it; of `nodes` those that were used last, and how many there are."""

    lanes: tuple[LaneLook, ...] = ()
    waiting: tuple[WaitingLook, ...] = ()
    nodes: tuple[NodeLook, ...] = ()
    num_nodes: int = 0
    device_bytes: Mapping[str, int] | None = None


# How processes are that an engine works with besides its own: what users are told of them. Owns
# the words only. Knows nothing of how they are started or what is said to them.


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
class BackendProcesses:
    """All of them."""

    all: tuple[ProcessStatus, ...] = ()

    @property
    def away(self) -> ProcessStatus | None:
        """The first one that does not do its work, and that requests wait for."""
        for each in self.all:
            if each.detail and each.is_waited_for:
                return each
        return None


NO_PROCESSES = BackendProcesses()


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
    processes: BackendProcesses = NO_PROCESSES
    residence: ResidenceStatus | None = None
