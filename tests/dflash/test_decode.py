"""Speculation changes nothing but the time: the same tokens, texts and ends as plain decoding."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from luceasync.dflash.adapt import Plan, Shape
from luceasync.request import Sampling
from luceasync.text.tokenizer import Tokenizer
from tests.dflash.scripted import (
    BLOCK,
    TAPS,
    VERIFY_ROWS,
    Lanes,
    ScriptedDraft,
    plain_answers,
    prepare,
    random_speculator,
    speculated_answers,
    speculator_of,
)

CHAIN = Shape(BLOCK)
TREES = [Shape(BLOCK, budget) for budget in (8, 22, 60)]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.9),
    Sampling(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3),
    Sampling(temperature=1.0, top_p=0.95, presence_penalty=0.5, logit_bias={7: 4.0, 9: -5.0}),
]


@pytest.fixture
def tokenizer(tiny_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_dir)


@pytest.fixture
def open_backend(tiny_dir: Path, make_backend):
    return lambda num_shards=1: make_backend(
        tiny_dir, num_shards=num_shards, verify_rows=VERIFY_ROWS, taps=TAPS
    )


def scripted(backend, prepared, answers, share_wrong: float) -> ScriptedDraft:
    scripts = {
        lane: (*p.prompt_ids, *a.token_ids)
        for lane, (p, a) in enumerate(zip(prepared, answers, strict=True))
    }
    return ScriptedDraft(
        scripts, lambda lane, p: random.Random(p * 10 + lane).random() < share_wrong
    )


def prepare_four(tokenizer: Tokenizer, **fields):
    return [
        prepare(tokenizer, sampling, seed=seed, top_logprobs=2 * seed or None, **fields)
        for seed, sampling in enumerate(SAMPLINGS)
    ]


@pytest.mark.parametrize("shape", [CHAIN, *TREES], ids=str)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_lanes_together_say_what_each_says_alone(open_backend, tokenizer, num_shards, shape):
    backend = open_backend(num_shards)
    plain = plain_answers(backend, prepare_four(tokenizer))
    draft = scripted(backend, prepare_four(tokenizer), plain, share_wrong=0.3)
    speculator = speculator_of(backend, draft)
    assert speculated_answers(backend, speculator, prepare_four(tokenizer), shape) == plain
    tau = speculator.speculation(0).tau
    assert tau > 2, "long paths are to be accepted here"
