"""A stream gives what was pushed, in order, and ends; closing it cancels once."""

from __future__ import annotations

import asyncio

import pytest

from luceasync.engine.streams import LocalStream
from luceasync.request import Delta, Finish, Timings, Usage
from tests.deltas import text_delta

DEADLINE_S = 5.0


def text(piece: str, index: int = 0) -> Delta:
    return text_delta(index, piece)


def last(index: int = 0) -> Delta:
    return Delta(index, finish=Finish("stop", Usage(1, 1), Timings(0, 0, 0, 1, 0)))


def make_stream(num_choices: int = 1) -> tuple[LocalStream, list[str]]:
    """A stream and the list that grows with each cancellation."""
    cancelled: list[str] = []
    return LocalStream(7, num_choices, lambda: cancelled.append("cancel")), cancelled


async def read(stream: LocalStream) -> list[Delta]:
    async with asyncio.timeout(DEADLINE_S):
        return [delta async for delta in stream]


async def start_reading(stream: LocalStream) -> asyncio.Task[list[Delta]]:
    """A task that already waits for the next delta."""
    task = asyncio.create_task(read(stream))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_deltas_come_in_the_order_they_were_pushed():
    stream, cancelled = make_stream()
    deltas = [text("a"), text("b"), last()]
    for delta in deltas:
        stream.push(delta)
    assert await read(stream) == deltas
    assert (stream.num_prompt_tokens, stream.num_open, cancelled) == (7, 0, [])


async def test_a_waiting_reader_gets_each_delta_as_it_comes():
    stream, _ = make_stream()
    deltas = [text("a"), text("b"), last()]
    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(read(stream))
        for delta in deltas:
            await asyncio.sleep(0)
            stream.push(delta)
    assert reader.result() == deltas


async def test_it_ends_after_the_last_choice_has_finished():
    stream, _ = make_stream(num_choices=2)
    for delta in (last(1), text("a")):
        stream.push(delta)
    reader = await start_reading(stream)
    assert stream.num_open == 1
    stream.push(last(0))
    assert await reader == [last(1), text("a"), last(0)]


async def test_a_stream_that_was_read_to_its_end_stays_ended():
    stream, _ = make_stream()
    stream.push(last())
    assert len(await read(stream)) == 1
    assert await read(stream) == []


async def test_closing_wakes_a_waiting_reader():
    stream, cancelled = make_stream()
    reader = await start_reading(stream)
    await stream.aclose()
    assert await reader == []
    assert cancelled == ["cancel"]


async def test_closing_twice_cancels_once():
    stream, cancelled = make_stream(num_choices=2)
    stream.push(last(0))
    await stream.aclose()
    await stream.aclose()
    assert cancelled == ["cancel"]


async def test_closing_what_has_finished_cancels_nothing():
    stream, cancelled = make_stream()
    stream.push(last())
    await stream.aclose()
    assert cancelled == []


@pytest.mark.parametrize("num_before", [0, 2])
async def test_after_closing_deltas_are_dropped_but_finishes_counted(num_before: int):
    stream, _ = make_stream()
    for _ in range(num_before):
        stream.push(text("a"))
    await stream.aclose()
    stream.push(text("b"))
    assert stream.num_open == 1
    stream.push(last())
    assert stream.num_open == 0
    assert await read(stream) == []


async def test_a_reader_that_is_cancelled_loses_nothing():
    stream, _ = make_stream()
    reader = await start_reading(stream)
    reader.cancel()
    await asyncio.wait([reader])
    stream.push(last())
    assert await read(stream) == [last()]
