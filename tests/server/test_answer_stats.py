"""Answers report restored prefixes and speculation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from luceasync.request import Delta, Restore, Speculation, Usage
from luceasync.server.openai.common import usage_of
from tests.server.scripted import ScriptedEngine, finish

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
NOTHING = {
    "restore": False, "tier": None, "disk_hit": False, "prefix_tokens": 0, "restore_ms": 0.0,
    "decision": None, "miss_reason": None,
}  # fmt: skip


async def told(in_memory, *finishes) -> dict:
    script = [Delta(index, finish=one) for index, one in enumerate(finishes)]
    async with in_memory(ScriptedEngine(script[::-1])) as client:
        response = await client.post(CHAT, json=BODY | {"n": len(finishes)})
    return response.json()["luceasync"]


async def test_an_engine_without_cache_or_draft(in_memory):
    assert await told(in_memory, finish()) == NOTHING


@pytest.mark.parametrize("tier", ["memory", "disk"])
async def test_a_restored_prefix_is_reported_with_its_tier(in_memory, tier):
    restore = Restore(tier, 64, 0.0123456, "restored: faster", "diverges")
    assert await told(in_memory, finish(restore=restore)) == {
        "restore": True, "tier": tier, "disk_hit": tier == "disk", "prefix_tokens": 64,
        "restore_ms": 12.346, "decision": "restored: faster", "miss_reason": "diverges",
    }  # fmt: skip


async def test_of_several_choices_the_first_reports_the_restored_prefix(in_memory):
    restores = Restore("disk", 64), Restore("memory", 128)
    account = await told(in_memory, *(finish(restore=restore) for restore in restores))
    assert (account["tier"], account["prefix_tokens"]) == ("disk", 64)


async def test_speculation_of_all_choices_adds_up(in_memory):
    parts = Speculation(2, 14, 6), None, Speculation(1, 7, 1, "tau under break-even")
    account = await told(in_memory, *(finish(speculation=part) for part in parts))
    assert account["speculation"] == {
        "rounds": 3, "proposed": 21, "accepted": 7, "tau": 3.3333, "accept_rate": 0.3333,
        "off_reason": "tau under break-even",
    }  # fmt: skip


async def test_speculation_that_ran_to_the_end_has_no_reason(in_memory):
    account = await told(in_memory, finish(speculation=Speculation()))
    assert account["speculation"] == {
        "rounds": 0, "proposed": 0, "accepted": 0, "tau": 0.0, "accept_rate": 0.0,
    }  # fmt: skip


def test_cached_tokens_are_those_of_choice_0():
    """The other choices restore what it has computed, and may finish before it."""
    later = replace(finish(), usage=Usage(10, 5, cached_tokens=10))
    usage = usage_of({1: later, 0: finish()})
    assert usage.prompt_tokens_details.cached_tokens == 4
    assert (usage.prompt_tokens, usage.completion_tokens) == (10, 8)
