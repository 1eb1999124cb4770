"""What /metrics reports, and that apps do not share it."""

from __future__ import annotations

from luceasync.status import (
    BackendProcesses,
    CacheStatus,
    DrafterStatus,
    ExpertsStatus,
    ProcessStatus,
    ResidenceStatus,
    SpeculationStatus,
)
from tests.server.scripted import ScriptedEngine

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


async def test_requests_are_counted_by_route_and_status(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        await client.post(CHAT, json=BODY)
        await client.post(CHAT, content=b"{")
        await client.get("/nowhere")
        text = (await client.get("/metrics")).text
    for route, status in ((CHAT, 200), (CHAT, 400), ("unmatched", 404)):
        line = f'luceasync_http_requests_total{{route="{route}",status="{status}"}} 1.0'
        assert line in text.splitlines()


async def test_tokens_are_timed_from_the_first_on(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        await client.post(CHAT, json=BODY)
        lines = (await client.get("/metrics")).text.splitlines()
    assert "luceasync_time_to_first_token_seconds_count 1.0" in lines
    assert "luceasync_inter_token_seconds_count 2.0" in lines


async def test_the_engines_counters_are_read_on_each_scrape(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    for line in (
        "luceasync_ready 1.0",
        "luceasync_lanes 4.0",
        "luceasync_decoded_tokens_total 3.0",
        "luceasync_prefilled_tokens_total 6.0",
    ):
        assert line in lines


async def test_each_app_has_its_own_registry(in_memory):
    async with in_memory(ScriptedEngine()) as client, in_memory(ScriptedEngine()) as other:
        await client.post(CHAT, json=BODY)
        assert (
            "luceasync_time_to_first_token_seconds_count 0.0" in (await other.get("/metrics")).text
        )


async def test_the_event_loops_lag_is_observed(on_port):
    async with on_port(ScriptedEngine()) as client:
        while "luceasync_event_loop_lag_seconds_count 0.0" in (await client.get("/metrics")).text:
            pass


CACHE = CacheStatus(
    num_bytes={"memory": 100, "disk": 200}, num_nodes={"memory": 1, "disk": 2},
    restored_total={"memory": 3}, restored_tokens_total={"memory": 300},
    missed_total={"no node": 4}, saved_total={"disk": 5}, evicted_total={"memory": 6},
    written_bytes_total=7, read_bytes_total=8, quarantined_total=9, num_unwritten=10,
)  # fmt: skip


async def lines_of(in_memory, engine: ScriptedEngine) -> list[str]:
    async with in_memory(engine) as client:
        return (await client.get("/metrics")).text.splitlines()


async def test_an_engine_without_cache_or_draft_has_no_metrics_of_either(in_memory):
    lines = await lines_of(in_memory, ScriptedEngine())
    assert not [line for line in lines if "cache" in line or "speculation" in line]


async def test_cache_metrics_by_tier_and_reason(in_memory):
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


async def test_a_disk_error_shows_in_health_and_metrics(in_memory):
    engine = ScriptedEngine()
    engine.cache = CacheStatus(degraded="the disk is full")
    async with in_memory(engine) as client:
        health = await client.get("/health")
        ready = await client.get("/ready")
    assert (health.status_code, ready.status_code) == (200, 200)
    assert health.json() == {"status": "degraded", "detail": "the disk is full"}
    assert "luceasync_prefix_cache_degraded 1.0" in await lines_of(in_memory, engine)


async def test_a_working_cache_is_healthy(in_memory):
    engine = ScriptedEngine()
    engine.cache = CACHE
    async with in_memory(engine) as client:
        assert (await client.get("/health")).json() == {"status": "ok", "detail": "ready"}


async def test_speculation_metrics_by_slot_and_part(in_memory):
    engine = ScriptedEngine()
    engine.speculation = SpeculationStatus(4, (4, 4, 3), (3, 2, 1), 0.5, 1.5, 0.25)
    lines = await lines_of(in_memory, engine)
    for line in (
        "rounds_total 4.0", 'proposed_tokens_total{slot="2"} 3.0',
        'accepted_tokens_total{slot="0"} 3.0', "tau 2.5", 'seconds_total{part="draft"} 0.5',
        'seconds_total{part="verify"} 1.5', 'seconds_total{part="host"} 0.25', "off 0.0",
    ):  # fmt: skip
        assert f"luceasync_speculation_{line}" in lines


async def test_speculation_metrics_by_drafter(in_memory):
    engine = ScriptedEngine()
    drafters = {"lookup": DrafterStatus(3, 40, 22), "dflash": DrafterStatus(5, 35, 9)}
    engine.speculation = SpeculationStatus(8, drafters=drafters)
    lines = await lines_of(in_memory, engine)
    for line in (
        'rounds_total{drafter="lookup"} 3.0', 'rounds_total{drafter="dflash"} 5.0',
        'proposed_total{drafter="lookup"} 40.0', 'accepted_total{drafter="dflash"} 9.0',
    ):  # fmt: skip
        assert f"luceasync_speculation_drafter_{line}" in lines


async def test_a_drafter_that_is_gone_shows_in_health_and_metrics(in_memory):
    engine = ScriptedEngine()
    engine.cache = CACHE
    engine.speculation = SpeculationStatus(off_reason="the drafter is gone: /bin/x has ended")
    async with in_memory(engine) as client:
        health = await client.get("/health")
        ready = await client.get("/ready")
    assert (health.status_code, ready.status_code) == (200, 200)
    assert health.json() == {"status": "degraded", "detail": "the drafter is gone: x has ended"}
    assert "luceasync_speculation_off 1.0" in await lines_of(in_memory, engine)


async def test_process_metrics_by_name_and_devices(in_memory):
    engine = ScriptedEngine()
    counts = {"num_starts": 2, "calls_total": 3, "call_s_total": 0.5, "sent_bytes_total": 4}
    counts |= {"received_bytes_total": 5, "resident_bytes": 6, "node_bytes": 7}
    well = ProcessStatus("group 1", ("hip:0", "hip:1"), heartbeat_age_s=0.25, **counts)
    engine.processes = BackendProcesses((well, ProcessStatus("group 2", ("cuda:0",), "it is gone")))
    lines = await lines_of(in_memory, engine)
    for told in (
        'up{devices="hip:0,hip:1",process="group 1"} 1.0', "starts_total{} 2.0",
        'up{devices="cuda:0",process="group 2"} 0.0', "calls_total{} 3.0",
        "call_seconds_total{} 0.5", "sent_bytes_total{} 4.0", "received_bytes_total{} 5.0",
        "resident_bytes{} 6.0", "node_bytes{} 7.0", "heartbeat_age_seconds{} 0.25",
    ):  # fmt: skip
        line = told.replace("{}", '{devices="hip:0,hip:1",process="group 1"}')
        assert f"luceasync_process_{line}" in lines
    assert not [line for line in lines if "heartbeat" in line and "group 2" in line]


async def test_an_engine_of_one_process_has_no_process_metrics(in_memory):
    assert "luceasync_process_up" not in "".join(await lines_of(in_memory, ScriptedEngine()))


async def test_residence_metrics(in_memory):
    engine = ScriptedEngine()
    assert not [line for line in await lines_of(in_memory, engine) if "kvflash" in line]
    engine.residence = ResidenceStatus(512, 1024, 4096, 3, 9, 2)
    lines = await lines_of(in_memory, engine)
    for line in (
        'tokens{where="resident"} 512.0', 'tokens{where="absent"} 1024.0', "own_bytes 4096.0",
        "recalled_chunks_total 3.0", "evicted_chunks_total 9.0", "looks_total 2.0",
    ):  # fmt: skip
        assert f"luceasync_kvflash_{line}" in lines


async def test_metrics_of_experts_in_host_memory(in_memory):
    engine = ScriptedEngine()
    assert not [line for line in await lines_of(in_memory, engine) if "experts" in line]
    engine.experts = ExpertsStatus(90, 8, 2, 4096)
    lines = await lines_of(in_memory, engine)
    for line in (
        'met_total{place="slot"} 90.0', 'met_total{place="copied"} 8.0',
        'met_total{place="host"} 2.0', "bytes_total 4096.0",
    ):  # fmt: skip
        assert f"luceasync_experts_{line}" in lines
