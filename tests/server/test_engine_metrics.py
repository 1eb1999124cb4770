"""What /metrics tells of the prefix cache and of speculation."""

from __future__ import annotations

from luceasync.engine_status import CacheStatus, SpeculationStatus
from tests.server.scripted import ScriptedEngine

CACHE = CacheStatus(
    num_bytes={"memory": 100, "disk": 200}, num_nodes={"memory": 1, "disk": 2},
    restored_total={"memory": 3}, restored_tokens_total={"memory": 300},
    missed_total={"no node": 4}, saved_total={"disk": 5}, evicted_total={"memory": 6},
    written_bytes_total=7, read_bytes_total=8, quarantined_total=9, num_unwritten=10,
)  # fmt: skip


async def lines_of(in_memory, engine: ScriptedEngine) -> list[str]:
    async with in_memory(engine) as client:
        return (await client.get("/metrics")).text.splitlines()


async def test_an_engine_without_cache_or_draft_tells_of_neither(in_memory):
    lines = await lines_of(in_memory, ScriptedEngine())
    assert not [line for line in lines if "cache" in line or "speculation" in line]


async def test_the_cache_is_told_by_tier_and_reason(in_memory):
    engine = ScriptedEngine()
    engine.cache = CACHE
    lines = await lines_of(in_memory, engine)
    for line in (
        'bytes{tier="memory"} 100.0', 'bytes{tier="disk"} 200.0', 'nodes{tier="disk"} 2.0',
        'hits_total{tier="memory"} 3.0', 'restored_tokens_total{tier="memory"} 300.0',
        'misses_total{reason="no node"} 4.0', 'saved_nodes_total{tier="disk"} 5.0',
        'evicted_nodes_total{tier="memory"} 6.0', "written_bytes_total 7.0",
        "read_bytes_total 8.0", "quarantined_nodes_total 9.0", "unwritten_nodes 10.0",
        "degraded 0.0",
    ):  # fmt: skip
        assert f"luceasync_prefix_cache_{line}" in lines


async def test_a_fault_of_the_disk_is_told_by_health_and_metrics(in_memory):
    engine = ScriptedEngine()
    engine.cache = CacheStatus(degraded="the disk is full")
    async with in_memory(engine) as client:
        health = await client.get("/health")
        ready = await client.get("/ready")
    assert (health.status_code, ready.status_code) == (200, 200)
    assert health.json() == {"status": "degraded", "detail": "the disk is full"}
    assert "luceasync_prefix_cache_degraded 1.0" in await lines_of(in_memory, engine)


async def test_a_sound_cache_is_healthy(in_memory):
    engine = ScriptedEngine()
    engine.cache = CACHE
    async with in_memory(engine) as client:
        assert (await client.get("/health")).json() == {"status": "ok", "detail": "ready"}


async def test_speculation_is_told_by_slot_and_part(in_memory):
    engine = ScriptedEngine()
    engine.speculation = SpeculationStatus(4, (4, 4, 3), (3, 2, 1), 0.5, 1.5, 0.25)
    lines = await lines_of(in_memory, engine)
    for line in (
        "rounds_total 4.0", 'proposed_tokens_total{slot="2"} 3.0',
        'accepted_tokens_total{slot="0"} 3.0', "tau 2.5", 'seconds_total{part="draft"} 0.5',
        'seconds_total{part="verify"} 1.5', 'seconds_total{part="host"} 0.25', "off 0.0",
    ):  # fmt: skip
        assert f"luceasync_speculation_{line}" in lines


async def test_a_drafter_that_is_gone_is_told_by_health_and_metrics(in_memory):
    engine = ScriptedEngine()
    engine.cache = CACHE
    engine.speculation = SpeculationStatus(off_reason="the drafter is gone: /bin/x has ended")
    async with in_memory(engine) as client:
        health = await client.get("/health")
        ready = await client.get("/ready")
    assert (health.status_code, ready.status_code) == (200, 200)
    assert health.json() == {"status": "degraded", "detail": "the drafter is gone: x has ended"}
    assert "luceasync_speculation_off 1.0" in await lines_of(in_memory, engine)
