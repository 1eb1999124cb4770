"""An engine that copies proposals from texts says what one that decodes plainly says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from luceasync.engine.copies import PromptCopies
from luceasync.engine.decoding import SpeculativeDecoding
from luceasync.engine.load import DecodeWith, speculate
from luceasync.speculation.choice import RoundPlan, RoundShape
from luceasync.speculation.lookup import LOOKUP
from tests import tiny
from tests.engine.answers import LOOP, TEXTS, Told, ask, ask_all, started
from tests.processes import placed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(tiny_dir: Path) -> list[Told]:
    """What is said without speculation."""

    async def said() -> list[Told]:
        async with started(tiny_dir, draft_dir="none") as engine:
            return await ask_all(engine)

    return asyncio.run(said())


def rounds_of(*blocks: int) -> DecodeWith:
    """A round of copies for every lane at every step, whatever it costs; of these sizes in turn."""
    sizes = itertools.cycle(blocks)

    def decode_with(backend, speculator):
        def force(lanes: Sequence[int]) -> RoundPlan:
            return RoundPlan(RoundShape(next(sizes), None, LOOKUP), tuple(lanes), False)

        return SpeculativeDecoding(backend, speculator, force=force)

    return decode_with


@pytest.mark.covered(1)
@pytest.mark.parametrize(
    ("num_shards", "parallel", "decode_with"),
    [(1, 4, speculate), (1, 1, rounds_of(32)), (3, 4, rounds_of(16, 4, 8))],
    ids=["chosen", "one lane", "three shards"],
)
async def test_every_answer_is_the_plain_one(tiny_dir, plain, num_shards, parallel, decode_with):
    sizes = {"num_shards": num_shards, "parallel": parallel}
    async with started(tiny_dir, decode_with, **sizes) as engine:
        assert await ask_all(engine) == plain
        status = engine.status().speculation
    assert status is not None and [*status.drafters] == [LOOKUP]
    assert status.drafters[LOOKUP].accepted_total > 4


@pytest.mark.any_family
@pytest.mark.usefixtures("forked_backends")
async def test_with_layers_in_other_processes_it_is_the_plain_one_too(tiny_dir, plain, tmp_path):
    where = placed(tmp_path, "three", "shared")
    async with started(tiny_dir, rounds_of(8, 32), placement=where) as engine:
        assert await ask_all(engine) == plain
        status = engine.status().speculation
    assert status is not None and status.drafters[LOOKUP].accepted_total > 4


@pytest.mark.any_family
async def test_beside_a_drafter_that_fills_blocks_it_is_the_plain_one_too(
    tiny_dir, plain, tmp_path
):
    draft_dir = tiny.save_draft(tmp_path / "draft", tiny.draft_config())

    def decode_with(backend, speculator):
        shapes, turn = speculator.shapes, itertools.count()

        def force(lanes: Sequence[int]) -> RoundPlan:
            """Rounds of either drafter, and of one for half of the lanes."""
            number = next(turn)
            shape = shapes[number % len(shapes)]
            others = dict.fromkeys(lanes[number % 2 :: 2], LOOKUP) if number % 3 else {}
            return RoundPlan(shape, tuple(lanes), False, others=others)

        return SpeculativeDecoding(backend, speculator, force=force)

    tree = {"ddtree": True, "ddtree_budget": 12}
    async with started(tiny_dir, decode_with, draft_dir=draft_dir, **tree) as engine:
        assert await ask_all(engine) == plain
        status = engine.status().speculation
    assert status is not None and {*status.drafters} == {LOOKUP, "dflash"}
    assert status.rounds_total == sum(d.rounds_total for d in status.drafters.values())


@pytest.mark.any_family
async def test_an_answer_tells_of_its_rounds(tiny_dir):
    async with started(tiny_dir, rounds_of(8)) as engine:
        _, [finish] = await ask(engine, "hello hello hello", **LOOP)
        status = engine.status().speculation
    assert finish.speculation is not None and status is not None
    assert finish.speculation.rounds == status.rounds_total > 0
    assert finish.speculation.accepted == status.drafters[LOOKUP].accepted_total


async def test_an_answer_that_was_read_back_is_copied_from(tiny_dir):
    """Whatever was restored: the index is of the prompt's tokens."""
    async with started(tiny_dir, rounds_of(32)) as engine:
        text = "some words that come again " * 12
        for _ in range(2):
            _, [finish] = await ask(engine, text, **LOOP)
    assert finish.restore.tier == "memory"
    assert finish.speculation is not None and finish.speculation.accepted > 0


@pytest.mark.any_family
@pytest.mark.parametrize("draft", [{"draft_dir": "none"}, {"lookup": "off"}])
async def test_nothing_is_copied_where_that_is_off(tiny_dir, draft):
    async with started(tiny_dir, **draft) as engine:
        _, [finish] = await ask(engine, "hello hello hello", **LOOP)
        assert engine.status().speculation is None
    assert finish.speculation is None


@pytest.mark.any_family
async def test_a_prompt_that_cannot_be_indexed_is_answered_without_lookup(
    tiny_dir, plain, monkeypatch, caplog
):
    """It is indexed in a thread, and asked for by the engine's; no other request is touched."""
    index = PromptCopies.index

    def faulty(copies, prompt, stop_ids):
        if TEXTS[1] in (prompt.text or ""):
            raise MemoryError("no room for it")
        return index(copies, prompt, stop_ids)

    monkeypatch.setattr(PromptCopies, "index", faulty)
    monkeypatch.setattr("luceasync.engine.copies.LATE_TOKENS", 8)
    async with started(tiny_dir, rounds_of(8)) as engine:
        assert await ask_all(engine) == plain
        status = engine.status().speculation
    assert status is not None and status.unindexed_total == 1
    [told] = [r.getMessage() for r in caplog.records if "indexed" in r.getMessage()]
    assert "not indexed for lookup: MemoryError('no room for it')" in told


@pytest.mark.any_family
async def test_no_text_is_copied_from_another_one(tiny_dir, monkeypatch):
    """Not even from one of the same client, however equal they are."""
    seen = []

    def decode_with(backend, speculator):
        [lookup] = speculator.drafters
        propose = lookup.propose

        def heard(anchors, shape):
            proposal = propose(anchors, shape)
            for anchor, row in zip(anchors, proposal.tokens.tolist(), strict=True):
                if anchor.text is not None:
                    seen.append((set(anchor.text.ids), set(row)))
            return proposal

        monkeypatch.setattr(lookup, "propose", heard)
        return rounds_of(16)(backend, speculator)

    async with started(tiny_dir, decode_with) as engine:
        await ask_all(engine)
    assert seen and all(rows <= own for own, rows in seen)
