"""An engine with a drafter says what one without says, and tells what speculation did."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from luceasync.config import Config, DraftConfig, EngineConfig, ModelConfig
from luceasync.engine.decoding import SpeculativeDecoding
from luceasync.engine.engine import LocalEngine
from luceasync.engine.load import DecodeWith, speculate
from luceasync.engine.start import build_engine
from luceasync.request import ChatPrompt, Finish, Request, Sampling
from luceasync.speculation.choice import TRIAL_ROUNDS, RoundPlan, RoundShape, StepCosts
from luceasync.speculation.drafter import BlockDrafter
from luceasync.speculation.speculator import Speculator
from tests import tiny

pytestmark = pytest.mark.slow

REQUESTS = [
    {},
    {"sampling": Sampling(temperature=1.0, seed=4)},
    {"sampling": Sampling(repetition_penalty=1.4, presence_penalty=0.4), "top_logprobs": 2},
    {"sampling": Sampling(temperature=0.7, top_p=0.9, seed=1), "max_tokens": 7},
    {"stop": ("a", "e", "t"), "sampling": Sampling(temperature=1.0, seed=9)},
]


@pytest.fixture
def draft_dir(tmp_path: Path) -> Path:
    return tiny.save_draft(tmp_path / "draft", tiny.draft_config())


@asynccontextmanager
async def started(model_dir: Path, decode_with: DecodeWith = speculate, **draft: Any):
    engine = build_engine(
        Config(
            model=ModelConfig(model_dir=model_dir, dtype="fp32"),
            engine=EngineConfig(max_ctx_tokens=512, parallel=4),
            draft=DraftConfig(**draft),
        ),
        decode_with=decode_with,
    )
    async with engine:
        await engine.load()
        yield engine


async def ask(engine: LocalEngine, text: str, **fields: Any) -> tuple[tuple[int, ...], str, Finish]:
    request = Request(
        ChatPrompt([{"role": "user", "content": text}]), **{"max_tokens": 30, **fields}
    )
    deltas = [delta async for delta in await engine.open(request)]
    ids = tuple(token for delta in deltas for token in delta.token_ids)
    return ids, "".join(delta.text for delta in deltas), deltas[-1].finish


async def ask_all(
    engine: LocalEngine, num_alone: int = len(REQUESTS)
) -> list[tuple[tuple[int, ...], str, str]]:
    """So many requests alone, then all of them together, which finds their prefixes kept."""
    texts = [f"question {i} " * (i + 1) for i in range(len(REQUESTS))]
    pairs = list(zip(texts, REQUESTS, strict=True))
    alone = [await ask(engine, text, **fields) for text, fields in pairs[:num_alone]]
    together = await asyncio.gather(*(ask(engine, text, **fields) for text, fields in pairs))
    return [(ids, text, finish.reason) for ids, text, finish in [*alone, *together]]


@pytest.mark.covered(1)
@pytest.mark.parametrize("tree", [{}, {"ddtree": True, "ddtree_budget": 12}], ids=["chain", "tree"])
async def test_every_answer_is_the_one_without_a_drafter(tiny_dir, draft_dir, tree):
    async with started(tiny_dir, draft_dir="none") as engine:
        plain = await ask_all(engine)
    async with started(tiny_dir, draft_dir=draft_dir, **tree) as engine:
        assert await ask_all(engine) == plain


@pytest.mark.any_family
async def test_an_answer_tells_what_speculation_did(tiny_dir, draft_dir):
    async with started(tiny_dir, draft_dir=draft_dir) as engine:
        _, _, finish = await ask(engine, "hello", ignore_eos=True)
        status = engine.status().speculation
    told = finish.speculation
    assert told.rounds == status.rounds_total > 0
    assert told.accepted == sum(status.accepted_by_slot)
    assert 1 <= told.tau <= 8


@pytest.mark.any_family
async def test_without_a_drafter_there_is_nothing_to_tell(tiny_dir):
    async with started(tiny_dir, draft_dir="none") as engine:
        _, _, finish = await ask(engine, "hello")
        assert engine.status().speculation is None
    assert finish.speculation is None


class Dear(StepCosts):
    """A round takes as long as two tokens."""

    def seconds(self, num_lanes, shape):
        return 1.0 if shape is None else 2.0

    def is_due(self, num_lanes, shape):
        return False


@pytest.mark.any_family
async def test_a_drafter_that_is_never_right_is_given_up(tiny_dir, draft_dir):
    def decode_with(backend, speculator):
        drafters = [BlockDrafter(speculator.drafters[0].passes, [RoundShape(8)])]
        speculator = Speculator(backend, drafters, 4, Dear())
        return SpeculativeDecoding(backend, speculator)

    async with started(tiny_dir, decode_with, draft_dir=draft_dir, lookup="off") as engine:
        _, _, finish = await ask(engine, "hello", max_tokens=120, ignore_eos=True)
    assert finish.speculation.off_reason == "1.00 tokens a round, 2.10 would pay for it"
    # The step after the last trial was planned while that was under way.
    assert finish.speculation.rounds == TRIAL_ROUNDS + 1


@pytest.mark.any_family
async def test_a_measurement_says_what_every_round_is(tiny_dir, draft_dir):
    """Whatever it costs: a drafter that is never right is not given up."""

    def decode_with(backend, speculator):
        def force(lanes):
            return RoundPlan(RoundShape(8, 12), tuple(lanes), False)

        return SpeculativeDecoding(backend, speculator, force=force)

    tree = {"ddtree": True, "ddtree_budget": 12, "lookup": "off"}
    async with started(tiny_dir, decode_with, draft_dir=draft_dir, **tree) as engine:
        _, _, finish = await ask(engine, "hello", max_tokens=120, ignore_eos=True)
    assert finish.speculation.off_reason is None
    assert finish.speculation.proposed == 12 * finish.speculation.rounds
    assert finish.speculation.accepted + finish.speculation.rounds == 119


async def test_a_kept_prefix_brings_its_features(tiny_dir, draft_dir):
    text = "many words " * 20
    async with started(tiny_dir, draft_dir=draft_dir) as engine:
        await ask(engine, text, ignore_eos=True)
        _, _, finish = await ask(engine, text, ignore_eos=True, max_tokens=5)
    assert finish.restore.tier == "memory"
    assert finish.speculation.off_reason != "restored without features"
    assert finish.speculation.rounds > 0
