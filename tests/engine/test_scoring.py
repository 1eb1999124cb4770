"""Log-probabilities of a prompt's own tokens: those of the model, whatever is kept and however the
prompt is parted.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from luceasync.engine.steps import SCORED_TOKENS
from luceasync.request import Request, TokenLogprob, TokenPrompt
from tests import tiny
from tests.engine.test_processes import running as several_processes
from tests.engines import running

pytestmark = [pytest.mark.any_family, pytest.mark.usefixtures("forked_backends")]

PROMPT = tuple((7 * i * i + 11 * i) % 500 + 5 for i in range(2 * SCORED_TOKENS + 45))
TOP = 3


@pytest.fixture(params=tiny.FAMILIES)
def model(request, tmp_path: Path):
    return tiny.build(request.param), tmp_path


async def scored(engine, prompt=PROMPT, **fields) -> tuple[list[TokenLogprob], int]:
    """The prompt's log-probabilities, and how many of its tokens were not run."""
    fields = {"max_tokens": 1, "top_logprobs": TOP, "prompt_top_logprobs": TOP, **fields}
    stream = await engine.open(Request(TokenPrompt(prompt), **fields))
    deltas = [delta async for delta in stream]
    assert deltas[-1].finish is not None and deltas[-1].finish.error is None
    told = [one for delta in deltas for one in delta.prompt_logprobs]
    return told, deltas[-1].finish.usage.cached_tokens


def expected(network) -> torch.Tensor:
    """[tokens, vocab], of what follows each token."""
    with torch.inference_mode():
        logits = network(torch.tensor([PROMPT])).logits[0]
    return logits.float().log_softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 3])
async def test_they_are_those_of_the_model(model, shards):
    network, folder = model
    async with running(tiny.save(network, folder), shards=shards) as engine:
        told, _ = await scored(engine)
    rows = expected(network)
    assert len(told) == len(PROMPT)
    assert math.isnan(told[0].logprob)
    for i, one in enumerate(told[1:]):
        assert one.logprob == pytest.approx(float(rows[i, PROMPT[i + 1]]), abs=1e-3)
        best = [top.logprob for top in one.top]
        assert best == pytest.approx(rows[i].topk(TOP).values.tolist(), abs=1e-3)


@pytest.mark.slow
async def test_what_is_kept_is_run_all_the_same_and_what_was_scored_is_kept(model):
    network, folder = model
    async with running(tiny.save(network, folder)) as engine:
        first, _ = await scored(engine)
        again, num_cached = await scored(engine)
        assert num_cached == 0
        assert [one.logprob for one in again[1:]] == [one.logprob for one in first[1:]]
        _, num_cached = await scored(engine, prompt_top_logprobs=None)
        assert num_cached >= len(PROMPT) - 64


@pytest.mark.slow
async def test_a_prompt_alone_can_be_scored(model):
    network, folder = model
    async with running(tiny.save(network, folder)) as engine:
        told, _ = await scored(engine, PROMPT[:7], max_tokens=0)
        assert len(told) == 7


async def test_each_of_several_choices_has_them(model):
    network, folder = model
    async with running(tiny.save(network, folder)) as engine:
        told, _ = await scored(engine, PROMPT[:200], num_choices=2)
        assert len(told) == 400


@pytest.mark.slow
@pytest.mark.covered(0)
async def test_they_come_from_another_process(tiny_dir, tmp_path):
    async with several_processes(tiny_dir, tmp_path / "one", "one") as engine:
        here, _ = await scored(engine)
    async with several_processes(tiny_dir, tmp_path / "several", "three") as engine:
        there, _ = await scored(engine)
    assert [one.logprob for one in there[1:]] == [one.logprob for one in here[1:]]
    assert [one.top for one in there] == [one.top for one in here]
