"""The fuzz tries every field, and tells a wrong answer from a refusal; its short form."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable

import pytest

from luceasync.server.openai.chat_body import ChatBody
from tests.acceptance import fuzz_requests
from tests.acceptance.hostile import extremes, routes

NUM_REQUESTS = 60


def all_of(bodies: Iterable[bytes]) -> bytes:
    """The few that are long come last, where nothing is looked for in them that stands before."""
    return b"\n".join(sorted(bodies, key=len))


def test_every_field_has_extremes_and_every_one_of_them_comes():
    values = extremes.extremes()
    assert values.keys() == set(ChatBody.__struct_fields__) - {"messages", "model"}
    said = all_of(extremes.pairs(sum(map(len, values.values()))))
    for name, given in values.items():
        for value in given:
            assert f'"{name}":{value}'.encode() in said


def test_most_pairs_are_of_values_that_are_taken_alone():
    num_singles = sum(map(len, extremes.extremes().values()))
    pairs = list(extremes.pairs(num_singles + 400))[num_singles:]
    parsed = sum(fields_of(body) is not None for body in pairs)
    assert parsed > 200


def fields_of(body: bytes) -> dict[str, object] | None:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (500, b'{"error":{"message":"x"}}'),
        (503, b'{"error":{"message":"x"}}'),
        (400, b'{"error":{"message":""}}'),
        (400, b'{"error":{"message":"' + b"x" * 3000 + b'"}}'),
        (200, b'{"choices":[{"finish_reason":"error"}]}'),
        (200, b'data: {"error":{}}\n\ndata: [DONE]\n\n'),
        (200, b'data: {"choices":[]}\n\n'),
        (
            200,
            b'{"choices":[{"finish_reason":"stop","logprobs":'
            b'{"content":[{"logprob":null,"top_logprobs":[]}]}}]}',
        ),
    ],
)
def test_what_is_wrong_is_told(status, answer):
    assert extremes.wrong_in(status, answer)


def test_refusals_and_answers_are_right():
    assert extremes.wrong_in(400, b'{"error":{"message":"no"}}') is None
    assert extremes.wrong_in(200, b'{"choices":[{"finish_reason":"stop"}]}') is None
    assert extremes.wrong_in(200, b'data: {"choices":[]}\n\ndata: [DONE]\n\n') is None


@pytest.mark.slow
async def test_pairs_of_extremes_end_nobody(capsys):
    statuses, wrong = await fuzz_requests.in_process(extremes.pairs(NUM_REQUESTS, seed=7))
    assert wrong == []
    assert statuses.total() == NUM_REQUESTS
    assert set(statuses) == {200, 400}


@pytest.mark.parametrize("path", routes.ROUTES)
def test_every_field_of_every_route_has_extremes_and_every_one_of_them_comes(path):
    asked = routes.ROUTES[path]
    values = routes.extremes(asked)
    assert values.keys() == set(asked.body.__struct_fields__) >= asked.needs.keys()
    said = all_of(routes.pairs(asked, sum(map(len, values.values()))))
    for name, given in values.items():
        for value in given:
            assert f'"{name}":{value}'.encode() in said


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (500, b'{"error":{"message":"x"}}'),
        (400, b'{"error":{"message":""}}'),
        (200, b'{"count":NaN}'),
        (200, b'event: error\ndata: {"type":"error"}\n\n'),
        (200, b'data: {"error":{}}\n\n'),
    ],
)
def test_what_is_wrong_with_an_answer_of_any_route_is_told(status, answer):
    with contextlib.suppress(ValueError):
        assert routes.wrong_in(status, answer)


@pytest.mark.slow
async def test_extremes_of_every_route_end_nobody(capsys):
    statuses, wrong = await fuzz_requests.of_all_routes(NUM_REQUESTS, seed=7)
    assert wrong == []
    assert set(statuses) == {200, 400}
