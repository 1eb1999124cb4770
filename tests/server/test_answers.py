"""The one way to an answer: failures are exceptions, and every stream is closed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from luceasync.errors import DisplacedFromQueue, GenerationFailed, RequestError, Unavailable
from luceasync.request import Delta
from luceasync.server.answers import AnswerStream
from tests.deltas import text_delta
from tests.server.scripted import ScriptedStream, Step, answer, finish


def ignore(delta: Delta) -> None:
    """An observer."""


async def read(script: list[Step], num_choices: int = 1) -> list[Delta]:
    return [delta async for delta in AnswerStream(ScriptedStream(script), num_choices, ignore)]


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


async def test_a_choice_whose_stage_failed_is_unavailable():
    lost = replace(finish("error", error="group 1 failed"), error_kind="unavailable")
    with pytest.raises(Unavailable, match="group 1 failed"):
        await read([text_delta(0, "a", (1,)), Delta(0, finish=lost)])


async def test_a_choice_displaced_by_another_client_has_retry_after():
    gone = replace(finish("error", error="busy"), error_kind="gave_way", retry_after_s=7)
    with pytest.raises(DisplacedFromQueue, match="Retry after 7 s") as caught:
        await read([Delta(0, finish=gone)])
    assert caught.value.retry_after_s == 7


async def test_a_choice_whose_grammar_cannot_be_followed_is_a_400():
    """Clients retry a 500, and would get it again."""
    lost = replace(finish("error", error="too many items"), error_kind="request")
    with pytest.raises(RequestError, match="too many items") as caught:
        await read([text_delta(0, "a", (1,)), Delta(0, finish=lost)])
    assert caught.value.status == 400 and caught.value.code == "cannot_be_followed"


async def test_a_choice_without_a_finish_is_a_failure():
    with pytest.raises(GenerationFailed, match="before every choice"):
        await read(answer("a"), num_choices=2)


async def test_closing_closes_the_engines_stream():
    inner = ScriptedStream([])
    await AnswerStream(inner, 1, ignore).aclose()
    assert inner.closed.is_set()


async def test_every_delta_is_observed_before_it_is_told():
    seen: list[Delta] = []
    async for delta in AnswerStream(ScriptedStream(answer("a", "b")), 1, seen.append):
        assert seen[-1] is delta
    assert len(seen) == 3
