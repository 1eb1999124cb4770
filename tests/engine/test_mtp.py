"""An engine that drafts with the head of its model says what one that decodes plainly says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from luceasync.config import CacheConfig, KvFlashConfig
from luceasync.engine.decoding import SpeculativeDecoding
from luceasync.engine.load import DecodeWith, speculate
from luceasync.errors import ConfigError
from luceasync.speculation.choice import RoundPlan
from luceasync.speculation.lookup import LOOKUP
from luceasync.speculation.mtp import NAME
from tests.engine.answers import LOOP, Told, ask, ask_all, started
from tests.processes import placed
from tests.speculation import mtp_models

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*falling back")]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that repeats itself, and a head that is right about half the time."""
    return mtp_models.save(tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> list[Told]:
    """What is said without speculation."""

    async def said() -> list[Told]:
        async with started(model_dir, draft_dir="none") as engine:
            return await ask_all(engine)

    return asyncio.run(said())


def in_turns(backend, speculator) -> SpeculativeDecoding:
    """Rounds of every shape in turn, whatever they cost; with lookup, of one drafter for half of
    the lanes, and now and then a plain step.
    """
    shapes, turn = speculator.shapes, itertools.count()
    copies = any(shape.drafter == LOOKUP for shape in shapes)

    def force(lanes: Sequence[int]) -> RoundPlan:
        number = next(turn)
        if number % 7 == 6:
            return RoundPlan(None, (), False)
        shape = shapes[number % len(shapes)]
        others = dict.fromkeys(lanes[number % 2 :: 2], LOOKUP) if copies and number % 3 else {}
        return RoundPlan(shape, tuple(lanes), False, others=others)

    return SpeculativeDecoding(backend, speculator, force=force)


@pytest.mark.parametrize(
    ("num_shards", "parallel", "lookup", "pool_tokens", "decode_with"),
    [
        (1, 4, "on", None, speculate),
        (1, 1, "off", None, in_turns),
        (3, 4, "on", 512, in_turns),
    ],
    ids=["chosen", "one lane", "three shards, a pool that holds all"],
)
async def test_every_answer_is_the_plain_one(
    model_dir: Path,
    plain: list[Told],
    num_shards: int,
    parallel: int,
    lookup: str,
    pool_tokens: int | None,
    decode_with: DecodeWith,
):
    sizes = {"num_shards": num_shards, "parallel": parallel, "kvflash": KvFlashConfig(pool_tokens)}
    async with started(model_dir, decode_with, lookup=lookup, **sizes) as engine:
        assert await ask_all(engine) == plain
        status = engine.status().speculation
    assert status is not None
    assert {*status.drafters} == ({NAME} if lookup == "off" else {NAME, LOOKUP})
    assert status.drafters[NAME].accepted_total > 10


@pytest.mark.usefixtures("forked_backends")
async def test_with_layers_in_other_processes_it_is_the_plain_one_too(model_dir, plain, tmp_path):
    where = placed(tmp_path, "three", "shared")
    async with started(model_dir, in_turns, placement=where) as engine:
        assert await ask_all(engine) == plain
        status = engine.status().speculation
    assert status is not None and status.drafters[NAME].accepted_total > 10


async def test_after_a_restart_it_goes_on_from_what_comes(model_dir, tmp_path):
    """Its rows are in no node: the answer is the same, and the next rounds are accepted as ever."""
    text, told = "some words that come again " * 6, []
    cache = CacheConfig(cache_dir=tmp_path, min_tokens=1)
    for draft_dir, tier in (("none", None), (NAME, "disk"), (NAME, "disk")):
        async with started(model_dir, cache=cache, draft_dir=draft_dir) as engine:
            said, [finish] = await ask(engine, text, max_tokens=100, **LOOP)
        assert finish.restore.tier == tier
        told.append(said)
    assert told[1] == told[2] == told[0]
    assert finish.speculation is not None and finish.speculation.accepted > 10


async def test_it_drafts_where_nothing_else_is_named_and_not_where_it_is(model_dir):
    for draft_dir, expected in ((None, {NAME, LOOKUP}), ("lookup", {LOOKUP})):
        async with started(model_dir, in_turns, draft_dir=draft_dir) as engine:
            await ask(engine, "hello hello hello", **LOOP)
            status = engine.status().speculation
        assert status is not None and {*status.drafters} <= expected, draft_dir
        assert (NAME in status.drafters) == (NAME in expected)


async def test_a_model_without_such_a_head_is_refused_in_one_line(tiny_dir):
    with pytest.raises(ConfigError, match=r"^--draft mtp: \S+: the model's config "):
        async with started(tiny_dir, draft_dir=NAME):
            pass
