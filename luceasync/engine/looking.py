"""What a look at a pump shows: its lanes, its queue, the prefixes that are kept.

Engine thread only. Owns nothing and changes nothing but what it was asked to let go of.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from luceasync.engine.generation import Generation
from luceasync.engine.pump import Pump
from luceasync.engine_look import EngineLook, LaneLook, WaitingLook
from luceasync.keeping.node_looks import newest

MAX_NODES = 256
MAX_WAITING = 64


def look_at(pump: Pump, num_nodes: int = MAX_NODES) -> EngineLook:
    """How things are now; of nodes those that were used last."""
    now_s, nodes = time.monotonic(), list(pump.prefixes.index)
    return EngineLook(
        lanes=tuple(_lane(pump, generation, now_s) for generation in pump.roster.running),
        waiting=tuple(
            WaitingLook(len(g.prepared.prompt_ids), now_s - g.submitted_at)
            for g in pump.roster.waiting[:MAX_WAITING]
        ),
        nodes=newest(nodes, num_nodes),
        num_nodes=len(nodes),
    )


def _lane(pump: Pump, generation: Generation, now_s: float) -> LaneLook:
    lane = generation.lane
    assert lane is not None, "it runs"
    speculation, residence = pump.decoding.speculation(lane), pump.lanes.told(lane)
    return LaneLook(
        lane=lane,
        phase=_phase(generation),
        prompt_tokens=len(generation.prepared.prompt_ids),
        done_tokens=generation.num_prefilled,
        cached_tokens=generation.num_cached,
        generated_tokens=generation.num_generated,
        max_tokens=generation.prepared.max_tokens,
        running_s=0.0 if generation.started_at is None else now_s - generation.started_at,
        tau=None if speculation is None else speculation.tau,
        rounds=0 if speculation is None else speculation.rounds,
        resident_tokens=None if residence is None else residence.resident_tokens,
        absent_tokens=None if residence is None else residence.absent_tokens,
    )


def _phase(generation: Generation) -> str:
    if generation.is_restoring:
        return "restoring"
    if generation.is_unread:
        return "unread"
    return "decoding" if generation.is_decoding else "prefilling"


def drop_nodes(pump: Pump, keys: Collection[str] | None) -> int:
    """Let go of the nodes of these keys, or of all, in every tier, and of what continues them; how
    many are gone. What a request needs stays.
    """
    before = sum(1 for _ in pump.prefixes.index)
    pump.prefixes.clear({bytes.fromhex(key) for key in keys} if keys is not None else None)
    return before - sum(1 for _ in pump.prefixes.index)
