"""What /metrics tells, and that two apps do not share it."""

from __future__ import annotations

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


async def test_the_engines_counters_are_read_when_asked(in_memory):
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
