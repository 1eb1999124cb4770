"""The engine's status as JSON fields, without paths."""

from __future__ import annotations

import msgspec

from luceasync.request import Engine, Speculation
from luceasync.server.failures import redact_paths
from luceasync.status import CacheStatus, ExpertsStatus, ProcessStatus, SpeculationStatus


class CacheFields(msgspec.Struct):
    """The prefix cache: bytes, nodes and totals by tier, misses by reason."""

    num_bytes: dict[str, int]
    num_nodes: dict[str, int]
    restored_total: dict[str, int]
    restored_tokens_total: dict[str, int]
    missed_total: dict[str, int]
    num_unwritten: int
    degraded: str


class SpeculationFields(msgspec.Struct):
    """Draft tokens since the start; `off_reason`: why there are none."""

    rounds_total: int
    proposed_total: int
    accepted_total: int
    tau: float
    off_reason: str | None


class ExpertsFields(msgspec.Struct):
    """Experts of a model that keeps them in host memory, since the engine was loaded: those that
    steps used, counted once per step and layer, where they were found, and the bytes copied or
    read.
    """

    distinct_total: int
    hits_total: int
    misses_total: int
    read_through_total: int
    num_bytes_total: int


class ProcessFields(msgspec.Struct):
    """Another process of the engine; `detail` is empty while it works."""

    name: str
    devices: list[str]
    detail: str
    num_starts: int
    resident_bytes: int
    node_bytes: int


class StatusFields(msgspec.Struct):
    """The engine's model, lanes, queue and cache, and its counters since the start."""

    model: str
    family: str
    num_parameters: int
    max_ctx_tokens: int
    tool_format: str | None
    tools_in_system_message: bool
    takes_chats: bool
    thinks: bool
    reasons: list[str]
    ready: bool
    detail: str
    num_lanes: int
    num_running: int
    num_queued: int
    prefilled_tokens_total: int
    decoded_tokens_total: int
    decode_steps_total: int
    restarts_total: int
    cache: CacheFields | None
    speculation: SpeculationFields | None
    experts: ExpertsFields | None
    processes: list[ProcessFields]


def status_fields(engine: Engine) -> StatusFields:
    """The engine's status, with all paths redacted."""
    status, card = engine.status(), engine.card
    return StatusFields(
        model=card.name,
        family=card.family,
        num_parameters=card.num_parameters,
        max_ctx_tokens=card.max_ctx_tokens,
        tool_format=card.tool_format or None,
        tools_in_system_message=card.tells_tools,
        takes_chats=card.takes_chats,
        thinks=card.can_think,
        reasons=[redact_paths(reason) for reason in card.reasons],
        ready=status.ready,
        detail=redact_paths(status.detail),
        num_lanes=status.num_lanes,
        num_running=status.num_running,
        num_queued=status.num_queued,
        prefilled_tokens_total=status.prefilled_tokens_total,
        decoded_tokens_total=status.decoded_tokens_total,
        decode_steps_total=status.decode_steps_total,
        restarts_total=status.restarts_total,
        cache=None if status.cache is None else _cache(status.cache),
        speculation=None if status.speculation is None else _speculation(status.speculation),
        experts=None if status.experts is None else _experts(status.experts),
        processes=[_process(each) for each in status.processes.all],
    )


def _experts(experts: ExpertsStatus) -> ExpertsFields:
    places = experts.hits_total, experts.misses_total, experts.read_through_total
    return ExpertsFields(sum(places), *places, experts.copied_bytes_total)


def _process(process: ProcessStatus) -> ProcessFields:
    return ProcessFields(
        name=process.name,
        devices=list(process.devices),
        detail=redact_paths(process.detail),
        num_starts=process.num_starts,
        resident_bytes=process.resident_bytes,
        node_bytes=process.node_bytes,
    )


def _cache(cache: CacheStatus) -> CacheFields:
    return CacheFields(
        num_bytes=dict(cache.num_bytes),
        num_nodes=dict(cache.num_nodes),
        restored_total=dict(cache.restored_total),
        restored_tokens_total=dict(cache.restored_tokens_total),
        missed_total=dict(cache.missed_total),
        num_unwritten=cache.num_unwritten,
        degraded=redact_paths(cache.degraded),
    )


def _speculation(speculation: SpeculationStatus) -> SpeculationFields:
    proposed, accepted = sum(speculation.proposed_by_slot), sum(speculation.accepted_by_slot)
    total = Speculation(speculation.rounds_total, proposed, accepted)
    return SpeculationFields(
        rounds_total=total.rounds,
        proposed_total=proposed,
        accepted_total=accepted,
        tau=total.tau,
        off_reason=redact_paths(speculation.off_reason or "") or None,
    )
