"""What a family reads: deltas of choices that end well, or an exception."""

from __future__ import annotations

from dataclasses import replace

import pytest

from luceasync.errors import DisplacedFromQueue, GenerationFailed, RequestError, Unavailable
from luceasync.request import Delta
from luceasync.server.answering import AnswerStream
from luceasync.server.metrics import Metrics
from luceasync.server.request_log import RequestNote
from tests.deltas import text_delta
from tests.server.scripted import ScriptedEngine, ScriptedStream, Step, answer, finish


async def read(script: list[Step], num_choices: int = 1) -> list[Delta]:
    clock = Metrics(ScriptedEngine()).clock()
    return [
        delta
        async for delta in AnswerStream(
            ScriptedStream(script), num_choices, clock, RequestNote("x")
        )
    ]


async def test_the_deltas_pass_unchanged():
    script = [*answer("a", "b"), *answer("c", index=1)]
    assert await read(script, num_choices=2) == script


@pytest.mark.parametrize(
    ("reason", "error", "kind", "words"),
    [
        ("error", "out of memory", GenerationFailed, "out of memory"),
        ("error", None, GenerationFailed, "failed"),
        ("cancelled", None, Unavailable, "cancelled"),
    ],
)
async def test_a_choice_that_failed_is_an_exception(reason, error, kind, words):
    with pytest.raises(kind, match=words):
        await read([text_delta(0, "a", (1,)), Delta(0, finish=finish(reason, error=error))])


async def test_a_choice_whose_group_failed_may_be_asked_for_again():
    lost = replace(finish("error", error="group 1 failed"), error_kind="unavailable")
    with pytest.raises(Unavailable, match="group 1 failed"):
        await read([text_delta(0, "a", (1,)), Delta(0, finish=lost)])


async def test_a_choice_that_gave_its_place_to_another_client_says_when_to_come_back():
    gone = replace(finish("error", error="busy"), error_kind="gave_way", retry_after_s=7)
    with pytest.raises(DisplacedFromQueue, match="Retry after 7 s") as caught:
        await read([Delta(0, finish=gone)])
    assert caught.value.retry_after_s == 7


async def test_a_choice_whose_grammar_cannot_be_followed_is_the_requests_fault():
    """Clients that ask again after a 500 would get it again."""
    lost = replace(finish("error", error="too many items"), error_kind="request")
    with pytest.raises(RequestError, match="too many items") as caught:
        await read([text_delta(0, "a", (1,)), Delta(0, finish=lost)])
    assert caught.value.status == 400 and caught.value.code == "cannot_be_followed"


async def test_a_choice_without_an_end_is_a_failure():
    with pytest.raises(GenerationFailed, match="before every choice"):
        await read(answer("a"), num_choices=2)


async def test_closing_closes_the_engines_stream():
    inner = ScriptedStream([])
    await AnswerStream(inner, 1, Metrics(ScriptedEngine()).clock(), RequestNote("x")).aclose()
    assert inner.closed.is_set()
