"""A look at the engine as JSON, for people and their pages.

Owns its fields. Knows nothing of who looks.
"""

from __future__ import annotations

from typing import Any

import msgspec

from luceasync.engine_look import EngineLook
from luceasync.engine_status import CacheStatus, SpeculationStatus
from luceasync.processes import ProcessStatus
from luceasync.request import Engine, Speculation
from luceasync.server.discretion import without_paths


def told_status(engine: Engine) -> dict[str, object]:
    """What it serves, holds and has done; no path is told."""
    status, card = engine.status(), engine.card
    return {
        "model": card.name,
        "family": card.family,
        "num_parameters": card.num_parameters,
        "max_ctx_tokens": card.max_ctx_tokens,
        "ready": status.ready,
        "detail": without_paths(status.detail),
        "num_lanes": status.num_lanes,
        "num_running": status.num_running,
        "num_queued": status.num_queued,
        "prefilled_tokens_total": status.prefilled_tokens_total,
        "decoded_tokens_total": status.decoded_tokens_total,
        "decode_steps_total": status.decode_steps_total,
        "restarts_total": status.restarts_total,
        "cache": None if status.cache is None else _cache(status.cache),
        "speculation": None if status.speculation is None else _speculation(status.speculation),
        "processes": [_process(each) for each in status.processes.all],
    }


def told_look(look: EngineLook) -> Any:
    """Lanes, queue and nodes, field by field."""
    return msgspec.to_builtins(look)


def _process(process: ProcessStatus) -> dict[str, object]:
    return {
        "name": process.name,
        "devices": list(process.devices),
        "detail": without_paths(process.detail),
        "num_starts": process.num_starts,
        "resident_bytes": process.resident_bytes,
        "node_bytes": process.node_bytes,
    }


def _cache(cache: CacheStatus) -> dict[str, object]:
    return {
        "num_bytes": dict(cache.num_bytes),
        "num_nodes": dict(cache.num_nodes),
        "restored_total": dict(cache.restored_total),
        "restored_tokens_total": dict(cache.restored_tokens_total),
        "missed_total": dict(cache.missed_total),
        "num_unwritten": cache.num_unwritten,
        "degraded": without_paths(cache.degraded),
    }


def _speculation(speculation: SpeculationStatus) -> dict[str, object]:
    proposed, accepted = sum(speculation.proposed_by_slot), sum(speculation.accepted_by_slot)
    total = Speculation(speculation.rounds_total, proposed, accepted)
    return {
        "rounds_total": total.rounds,
        "proposed_total": proposed,
        "accepted_total": accepted,
        "tau": total.tau,
    }
