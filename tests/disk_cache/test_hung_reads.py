"""A disk hangs from the first read that is given up to the first one that comes back."""

from __future__ import annotations

import asyncio

import pytest

from luceasync.disk_cache.disk import HungReads


@pytest.mark.parametrize(
    ("fault", "words"), [(None, ""), (OSError("EIO"), "EIO"), (ValueError("given up"), "")]
)
async def test_the_first_that_comes_back_ends_it(fault, words):
    heard: list[str] = []
    hung = HungReads(heard.append)
    calls: list[asyncio.Future] = [asyncio.get_running_loop().create_future() for _ in range(2)]
    for call in calls:
        hung.leave(call)
    assert hung and heard == []
    if fault is None:
        calls[1].set_result(None)
    else:
        calls[1].set_exception(fault)
    await asyncio.sleep(0)
    assert not hung and heard == [words]
    calls[0].set_exception(OSError("late"))
    await asyncio.sleep(0)
    assert heard == [words]
