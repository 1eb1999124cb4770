"""Deltas leave the outbox once, in order; reach their streams; and end up in the history."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest

from luceasync.engine.streams import DeltaOutbox, LocalStream, OpenAnswers
from luceasync.request import Delta, Finish, Speculation, Timings, Usage
from luceasync.text.prompt import RenderedPrompt
from tests.deltas import text_delta

DEADLINE_S = 5.0
IDS = array("i", (1, 2))
FINISH = Finish("stop", Usage(2, 3), Timings(0, 1, 2, 2, 2))


# --- the outbox --------------------------------------------------------------------------------


class Speaker:
    """A generation, as far as an outbox looks at it."""

    def __init__(self, stream_id: int, *texts: str | None) -> None:
        self.prepared = self
        self.stream_id = stream_id
        self.texts = list(texts)

    @property
    def has_ended(self) -> bool:
        return self.texts == ["end"]

    def shown(self, speculation: Speculation | None = None, residence=None) -> Delta | None:
        text = self.texts.pop(0)
        if text == "unreadable":
            self.texts.insert(0, text)
            raise ZeroDivisionError("no text")
        finish = Finish("stop", Usage(1, 1), Timings(0, 0, 0, 1, 0), speculation=speculation)
        return None if text is None else Delta(0, (text,), finish=finish if text == "end" else None)


def shown(emitted) -> list[tuple]:
    return [(stream_id, *delta.pieces) for stream_id, delta in emitted]


def test_text_is_detokenized_when_it_is_taken():
    outbox, speaker = DeltaOutbox(), Speaker(1, "a")
    outbox.advanced(speaker)
    assert outbox
    assert speaker.texts == ["a"]
    assert shown(outbox.take()) == [(1, "a")]
    assert not outbox
    assert outbox.take() == []


def test_a_generation_that_holds_everything_back_makes_no_delta():
    outbox = DeltaOutbox()
    outbox.advanced(Speaker(1, None))
    assert outbox.take() == []


def test_an_end_takes_what_was_not_shown_and_goes_before_others():
    outbox, ending = DeltaOutbox(), Speaker(1, "end")
    outbox.advanced(ending)
    outbox.advanced(Speaker(2, "b"))
    assert not outbox.has_end
    outbox.ended(ending, Speculation(rounds=3))
    assert outbox.has_end
    (_, last), other = outbox.take()
    assert last.finish.speculation.rounds == 3
    assert shown([other]) == [(2, "b")]


def test_deltas_made_before_a_failure_are_taken_after_it():
    outbox = DeltaOutbox()
    for speaker in (Speaker(1, "a"), Speaker(2, "unreadable"), Speaker(3, "c"), Speaker(4, "end")):
        outbox.advanced(speaker)
    with pytest.raises(ZeroDivisionError):
        outbox.take()
    outbox.drop_undetokenized()
    assert shown(outbox.take()) == [(1, "a"), (4, "end")]


# --- a stream ----------------------------------------------------------------------------------


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


async def test_deltas_come_in_the_order_in_which_they_were_pushed():
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


async def test_closing_a_finished_stream_cancels_nothing():
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


# --- open answers ------------------------------------------------------------------------------


class RecordingHistory:
    """A tenant's history that records what is remembered."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def remember(self, text, ids, said) -> None:
        self.calls.append((text, ids, list(said)))


def prompt(history: RecordingHistory, text: str | None = "hello") -> RenderedPrompt:
    return RenderedPrompt(SimpleNamespace(history=history), text, IDS, ())


def at_once(call) -> None:
    """No event loop."""
    call()


def delta(index: int, *ids: int, finish: Finish | None = None) -> Delta:
    return Delta(index, (), ids, (), finish)


async def test_each_delta_goes_to_its_stream_and_the_ends_are_returned():
    answers = OpenAnswers(at_once)
    first = answers.open(0, prompt(RecordingHistory()), 1, lambda: None)
    second = answers.open(1, prompt(RecordingHistory()), 1, lambda: None)
    deltas = [(1, delta(0, 5)), (0, delta(0, 6, finish=FINISH)), (1, delta(0, finish=FINISH))]
    assert answers.deliver(deltas) == [("", FINISH), ("", FINISH)]
    assert [d.token_ids for d in [d async for d in first]] == [(6,)]
    assert [d.token_ids for d in [d async for d in second]] == [(5,), ()]
    assert repr(answers) == "OpenAnswers(0)"


def test_an_answer_is_open_until_its_last_choice_has_ended():
    answers = OpenAnswers(at_once)
    answers.open(0, prompt(RecordingHistory()), 2, lambda: None)
    answers.deliver([(0, delta(1, finish=FINISH))])
    assert repr(answers) == "OpenAnswers(1)"


def test_an_answer_is_remembered_with_its_prompt():
    answers, history = OpenAnswers(at_once), RecordingHistory()
    answers.open(0, prompt(history), 2, lambda: None)
    answers.deliver([(0, delta(0, 5)), (0, delta(1, 7)), (0, delta(0, 6, finish=FINISH))])
    assert history.calls == []  # its reader comes first
    answers.remember(), answers.remember()
    assert history.calls == [("hello", IDS, [5, 6])]


def test_whether_an_answer_can_come_back_is_tried_once_when_it_has_begun():
    tried: list[tuple] = []
    check = SimpleNamespace(begin=tried.append)
    asked = replace(prompt(RecordingHistory()), answer_returns=check)
    answers = OpenAnswers(at_once)
    answers.open(0, asked, 2, lambda: None)
    assert not tried
    answers.deliver([(0, delta(0, 5)), (0, delta(1, 7)), (0, delta(0, 6, finish=FINISH))])
    assert tried == [(5,), (7,)]


def test_after_a_prompt_of_ids_nothing_is_remembered():
    answers, history = OpenAnswers(at_once), RecordingHistory()
    answers.open(0, prompt(history, text=None), 1, lambda: None)
    assert answers.deliver([(0, delta(0, 5, finish=FINISH))]) == [("", FINISH)]
    answers.remember()
    assert history.calls == []
