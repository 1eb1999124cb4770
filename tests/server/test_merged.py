"""Deltas of several streams come as soon as each does; whoever stops listening leaves no task."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from luceasync.errors import Unavailable
from luceasync.server.openai.completions import merge_streams
from tests.deltas import text_delta
from tests.server.scripted import ScriptedStream


async def test_a_stream_that_waits_holds_up_no_other() -> None:
    gate = asyncio.Event()
    slow = ScriptedStream([gate, text_delta(0, "slow")])
    quick = ScriptedStream([text_delta(0, "a"), text_delta(0, "b")])
    told = []
    async for number, delta in merge_streams([slow, quick]):
        told.append((number, delta.text))
        if len(told) == 2:
            gate.set()
    assert told == [(1, "a"), (1, "b"), (0, "slow")]


async def test_what_one_raises_is_raised() -> None:
    streams = [ScriptedStream([Unavailable("gone")]), ScriptedStream([asyncio.Event()])]
    with pytest.raises(Unavailable):
        async for _ in merge_streams(streams):
            pass
    assert len(asyncio.all_tasks()) == 1


async def test_nothing_waits_once_nobody_listens() -> None:
    streams = [ScriptedStream([text_delta(0, "a")]), ScriptedStream([asyncio.Event()])]
    async with aclosing(merge_streams(streams)) as deltas:
        await anext(deltas)
    assert len(asyncio.all_tasks()) == 1
