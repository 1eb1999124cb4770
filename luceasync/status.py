"""Status of an engine: its health, its totals, its lanes, its cache, its processes.

Values only; luceasync.request.Engine returns them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field


def conversation_label(word: str) -> str | None:
    """Eight digits by which a client can find its own conversations, without revealing names; None
    for a conversation without a name.
    """
    return f"{zlib.crc32(word.encode()):08x}" if word else None


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """A choice on a lane. `phase` is restoring, prefilling, decoding or unread. The lane holds
    `done_tokens` of the prompt, of which `cached_tokens` were restored; `running_s` is the time
    since its start. `tau` None: there is no drafter. `resident_tokens`, `absent_tokens` None: all
    are on the devices. `conversation` is its label; `tier`, `decision`, `miss_reason`: see Restore.
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
    conversation: str | None = None
    tier: str | None = None
    decision: str | None = None
    miss_reason: str | None = None


@dataclass(frozen=True, slots=True)
class WaitingStatus:
    """A choice that waits for a lane; `conversation` is its label."""

    prompt_tokens: int
    waiting_s: float
    conversation: str | None = None


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A cached node, tokens `[begin, end)` after those of `parent`: bytes by tier, the number of
    requests that restored it (`hits`), and seconds since the last one. Keys are the names of files.
    `conversation` is the label of a conversation that continues at its end.
    """

    key: str
    parent: str | None
    begin: int
    end: int
    num_bytes: Mapping[str, int]
    has_state: bool
    hits: int
    idle_s: float
    conversation: str | None = None


@dataclass(frozen=True, slots=True)
class EngineDetails:
    """Lanes, queue and cache, without text or tokens. `nodes` are the most recently used of
    `num_nodes`. `device_bytes` are those of weights and lanes; `device_parts` are these separately,
    and the bytes that were free before, by device. `gpu_bytes` is their part on devices with their
    own memory.
    """

    lanes: tuple[LaneStatus, ...] = ()
    waiting: tuple[WaitingStatus, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()
    num_nodes: int = 0
    device_bytes: Mapping[str, int] | None = None
    device_parts: Mapping[str, Mapping[str, int]] | None = None
    gpu_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """Another process of the engine, such as a stage of the model.

    `detail` is empty while it works; otherwise it describes the failure, and `retry_after_s` is
    when the process may be back. Calls, seconds of waiting for their answers and bytes are totals
    over all of its `num_starts`. `heartbeat_age_s` is the time since its last heartbeat.
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
    """All other processes of the engine."""

    all: tuple[ProcessStatus, ...] = ()

    @property
    def away(self) -> ProcessStatus | None:
        """The first process that has failed and that requests wait for."""
        for each in self.all:
            if each.detail and each.is_waited_for:
                return each
        return None


NO_PROCESSES = BackendProcesses()


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """The prefix cache: bytes and nodes by tier, and totals since the start.

    `restored_total` counts requests by tier, `missed_total` by reason, `restored_tokens_total`
    tokens by tier; `saved_total` and `evicted_total` count nodes by tier. `num_unwritten` nodes
    have not been written to the disk yet. `degraded` is not empty while a fault of the disk
    prevents reads or writes. `store` counts operations on the store behind the disk, by name; empty
    without a store.
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
    store: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DrafterStatus:
    """Rounds of one drafter since the start, counted per lane, and its tokens in them."""

    rounds_total: int = 0
    proposed_total: int = 0
    accepted_total: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationStatus:
    """Speculation since the start: `accepted_by_slot[i]` of `proposed_by_slot[i]` tokens in slot i
    of the draft's block were accepted; seconds by part of a round. `off_reason` states why a
    drafter proposes nothing, for all requests. `drafters` are the rounds of each drafter, by name.
    `unindexed_total` prompts could not be indexed for lookup, because of a fault.
    """

    rounds_total: int = 0
    proposed_by_slot: tuple[int, ...] = ()
    accepted_by_slot: tuple[int, ...] = ()
    draft_s_total: float = 0.0
    verify_s_total: float = 0.0
    host_s_total: float = 0.0
    off_reason: str | None = None
    drafters: Mapping[str, DrafterStatus] = field(default_factory=dict)
    unindexed_total: int = 0


@dataclass(frozen=True, slots=True)
class ResidenceStatus:
    """Which part of all lanes is on the devices, in tokens of whole chunks; bytes of host memory
    that lanes use outside nodes; chunks moved and probes since the start.
    """

    resident_tokens: int = 0
    absent_tokens: int = 0
    own_bytes: int = 0
    recalled_total: int = 0
    evicted_total: int = 0
    looks_total: int = 0


@dataclass(frozen=True, slots=True)
class ExpertsStatus:
    """Experts used by passes of few rows since the start, counted once per pass and layer: those in
    slots, those copied into slots, and those read in place from host memory. Also the bytes
    transferred over the bus for experts, including those of whole layers for longer passes.
    """

    hits_total: int = 0
    misses_total: int = 0
    read_through_total: int = 0
    copied_bytes_total: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Current counts, and totals since the start; totals of tokens and steps since the engine was
    last loaded. `cache`, `speculation`, `residence`, `experts` None: not in use. `has_failed`: the
    engine is being reloaded, and refused clients may retry in `retry_after_s`. `processes` are the
    engine's other processes.
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
    experts: ExpertsStatus | None = None
