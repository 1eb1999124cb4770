"""A look shows what is on lanes and what is kept; what is let go of is run again."""

from __future__ import annotations

import pytest

from luceasync.request import ChatPrompt, Request
from luceasync.status import conversation_label
from tests.engines import ask, running, user, written

pytestmark = pytest.mark.any_family

LONG = "To be or not to be, that is the question. " * 12


async def test_lanes_are_seen_while_they_run_and_nodes_afterwards(tiny_dir, tmp_path):
    async with running(tiny_dir, tmp_path / "cache", parallel=1) as engine:
        prompt = ChatPrompt(user(LONG))
        asked = Request(prompt, max_tokens=1500, ignore_eos=True, conversation="mine")
        stream = await engine.open(asked)
        waits = await engine.open(Request(ChatPrompt(user("x")), max_tokens=1))
        async for delta in stream:
            if len(delta.token_ids):
                break
        look = await engine.details()
        [lane], [waiting] = look.lanes, look.waiting
        assert (lane.phase, lane.prompt_tokens) == ("decoding", stream.num_prompt_tokens)
        assert 0 < lane.generated_tokens < lane.max_tokens
        assert waiting.prompt_tokens == waits.num_prompt_tokens
        assert lane.conversation == conversation_label("mine") and lane.miss_reason == "empty"
        assert look.device_bytes and all(look.device_bytes.values())
        assert look.device_parts and all(all(x.values()) for x in look.device_parts.values())
        await stream.aclose()
        await waits.aclose()
        await written(engine)
        look = await engine.details()
        assert not look.lanes and not look.waiting
        assert look.num_nodes == len(look.nodes) > 0
        assert {tier for node in look.nodes for tier in node.num_bytes} == {"memory", "disk"}
        assert {node.conversation for node in look.nodes} == {conversation_label("mine"), None}
        known = {node.key for node in look.nodes}
        assert all(node.parent is None or node.parent in known for node in look.nodes)


@pytest.mark.slow
async def test_what_is_dropped_is_run_again_also_after_a_restart(tiny_dir, tmp_path):
    async with running(tiny_dir, tmp_path / "cache") as engine:
        first = await ask(engine, LONG, 4)
        await written(engine)
        assert (await ask(engine, LONG, 4)).num_cached > 0
        await written(engine)
        assert await engine.drop_nodes(None) > 0
        assert (await engine.details()).nodes == ()
        again = await ask(engine, LONG, 4)
        assert (again.num_cached, again.ids) == (0, first.ids)
        await written(engine)
        await engine.drop_nodes(None)
        await written(engine)
        assert not list((tmp_path / "cache").rglob("*.node"))
    async with running(tiny_dir, tmp_path / "cache") as engine:
        assert (await ask(engine, LONG, 4)).num_cached == 0


@pytest.mark.slow
async def test_one_node_goes_with_what_continues_it_and_what_runs_keeps_its_own(tiny_dir, tmp_path):
    async with running(tiny_dir, tmp_path / "cache") as engine:
        await ask(engine, LONG, 4)
        await written(engine)  # what is on its way there stays
        nodes = (await engine.details()).nodes
        root = next(node for node in nodes if node.parent is None)
        assert await engine.drop_nodes([root.key]) == len(nodes)
        await ask(engine, LONG, 4)
        stream = await engine.open(
            Request(ChatPrompt(user(LONG)), max_tokens=1500, ignore_eos=True)
        )
        async for delta in stream:
            if len(delta.token_ids):
                break
        kept = (await engine.details()).num_nodes
        await engine.drop_nodes(None)
        assert 0 < (await engine.details()).num_nodes <= kept
        await stream.aclose()
