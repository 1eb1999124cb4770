"""A decode step: a round for the lanes that it pays for, a plain step for the others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from luceasync.engine.decoding import SpeculativeDecoding, anchors_of, takes_best_twice
from luceasync.engine.sampling.choose import NUM_CANDIDATES, nothing, rank_request_of
from luceasync.engine.sequence import Generation
from luceasync.grammar.guide import Guide
from luceasync.ranking.logits import BEST
from luceasync.request import Sampling
from luceasync.speculation.choice import RoundPlan, RoundShape
from luceasync.text.tokenizer import Tokenizer
from tests.pipeline.conftest import make_backend
from tests.speculation.scripted import (
    BLOCK,
    TAPS,
    VERIFY_ROWS,
    Answer,
    Lanes,
    ScriptedDraft,
    plain_answers,
    prepare,
    speculator_of,
)

__all__ = ["make_backend"]
NUM_LANES = 3


@pytest.fixture
def backend(tiny_dir, make_backend):
    return make_backend(tiny_dir, verify_rows=VERIFY_ROWS, taps=TAPS)


@pytest.fixture
def prepared(tiny_dir):
    tokenizer = Tokenizer.load(tiny_dir)
    return lambda: [
        prepare(tokenizer, Sampling(temperature=lane / 2), seed=lane) for lane in range(NUM_LANES)
    ]


def only(speculating: Sequence[int]):
    """Plans in which of all lanes these speculate."""
    return lambda lanes: RoundPlan(RoundShape(BLOCK), tuple(set(lanes) & set(speculating)), True)


def decode_to_the_end(backend, prepared, draft, speculating: Sequence[int]) -> Lanes:
    speculator = speculator_of(backend, draft)
    lanes = Lanes(backend, prepared, speculator)
    decoding = SpeculativeDecoding(backend, speculator, force=only(speculating))
    while lanes.running:
        running = list(lanes.running)
        decoding.step(running, alone=True, meanwhile=nothing)
        lanes.show(running)
        lanes.running = [g for g in running if not lanes.is_over(g)]
    return lanes


@pytest.mark.covered(2)
@pytest.mark.slow
@pytest.mark.parametrize("speculating", [(), (1,), (0, 2), (0, 1, 2)])
def test_every_lane_gets_the_plain_answer_whichever_speculate(backend, prepared, speculating):
    plain = plain_answers(backend, prepared())
    texts = [(*p.prompt.ids, *a.token_ids) for p, a in zip(prepared(), plain, strict=True)]
    draft = ScriptedDraft(dict(enumerate(texts)), lambda lane, position: position % 5 == 0)
    lanes = decode_to_the_end(backend, prepared(), draft, speculating)
    assert [Answer.of(deltas) for deltas in lanes.deltas] == plain
    rounds = [lanes.speculator.speculation(lane).rounds for lane in range(NUM_LANES)]
    assert [n > 0 for n in rounds] == [lane in speculating for lane in range(NUM_LANES)]


def test_an_anchor_is_the_newest_token_at_its_position(backend, prepared):
    lanes = Lanes(backend, prepared())
    for anchor, generation in zip(anchors_of(lanes.running), lanes.running, strict=True):
        assert anchor.position == len(generation.prepared.prompt.ids)
        assert anchor.token == generation.last_token


def decoding(prepared) -> Generation:
    """A generation with one token."""
    generation = Generation(prepared)
    generation.append(3, None)
    return generation


def test_the_next_step_is_likely_for_a_choice_that_takes_two_best_tokens(make_prepared):
    generation = decoding(make_prepared(0, [0], max_tokens=3))
    assert takes_best_twice(generation)
    assert rank_request_of([generation.next_row], 8, NUM_CANDIDATES) == BEST
    generation.append(4, None)
    assert not takes_best_twice(generation), "one token is left"


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": Sampling(temperature=0.5)},
        {"sampling": Sampling(logit_bias={3: 1.0})},
        {"top_logprobs": 0},
        {"guide": Guide(None, None, 1)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_token_that_only_the_host_can_choose_comes_before_the_next_step(make_prepared, fields):
    assert not takes_best_twice(decoding(make_prepared(0, [0], max_tokens=9, **fields)))
