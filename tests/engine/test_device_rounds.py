"""Rounds in which the device accepts, the next of which begins before the host has read the last
one, over captured passes on a CPU: answers are those of an engine without a drafter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from luceasync.config import (
    Config,
    DraftConfig,
    EngineConfig,
    KvFlashConfig,
    ModelConfig,
    PlacementConfig,
)
from luceasync.engine import streams
from luceasync.engine.decoding import LaneDecoding, SpeculativeDecoding
from luceasync.engine.engine import LocalEngine
from luceasync.engine.load import DecodeWith, speculate
from luceasync.engine.start import build_engine
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.captured_round import CapturedRound
from luceasync.ranking.proposals import Proposal, propose_chain
from luceasync.request import Constraint, Request, Sampling, TokenPrompt
from luceasync.speculation.choice import RoundShape, StepCosts
from luceasync.speculation.dflash.passes import LocalDraft
from luceasync.speculation.drafter import BlockDrafter
from luceasync.speculation.lookup import LOOKUP
from luceasync.speculation.speculator import Speculator
from tests import tiny
from tests.pipeline.recaptured import recaptured
from tests.speculation import mtp_models

PROMPTS = [tuple(3 + (n * n + i) % 400 for i in range(n)) for n in (5, 70, 13, 61)]
BLOCK = 8


@dataclass(frozen=True)
class Answer:
    """What a client sees."""

    ids: tuple[int, ...]
    text: str
    reason: str


async def ask(engine: LocalEngine, prompt: tuple[int, ...], **fields) -> Answer:
    stream = await engine.open(Request(TokenPrompt(prompt), **{"ignore_eos": True, **fields}))
    deltas = [delta async for delta in stream]
    assert deltas[-1].finish is not None
    ids = tuple(token for delta in deltas for token in delta.token_ids)
    return Answer(ids, "".join(delta.text for delta in deltas), deltas[-1].finish.reason)


async def converse(engine: LocalEngine) -> list[tuple[tuple[int, ...], Answer]]:
    """Answers beside each other, of several lengths, one of them drawn; then each again alone,
    which a stop ends, and what takes up as much as can be of that.
    """
    drawn = Sampling(temperature=1.0, seed=1)
    said = await asyncio.gather(
        ask(engine, PROMPTS[0], max_tokens=40),
        ask(engine, PROMPTS[1], max_tokens=9),
        ask(engine, PROMPTS[2], max_tokens=30, sampling=drawn),
        ask(engine, PROMPTS[3], max_tokens=70),
    )
    found = list(zip(PROMPTS, said, strict=True))
    for prompt, answer in found[:]:
        middle = len(answer.text) // 2
        again = await ask(engine, prompt, max_tokens=60, stop=(answer.text[middle : middle + 3],))
        longer = (*prompt, *again.ids, 7, 8, 9)
        found += [(prompt, again), (longer, await ask(engine, longer, max_tokens=90))]
    return found


@dataclass
class KnowingDraft:
    """Proposes how the lane's text goes on, with another token at every fifth position; its rows
    are logits. `answers`: by the number of prompt tokens and the first one after it, all tokens.
    """

    answers: Mapping[tuple[int, int], Sequence[int]]
    device = torch.device("cpu")
    texts: dict[int, Sequence[int]] = field(default_factory=dict)  # by lane
    written: dict[int, set[int]] = field(default_factory=dict)

    def propose(self, anchors, lanes, begins, block, *, reach=None) -> Tensor:
        rows = torch.zeros(len(anchors), block - 1, tiny.VOCAB_SIZE)
        places = zip(anchors.tolist(), lanes.tolist(), begins.tolist(), strict=True)
        for entry, (anchor, lane, begin) in enumerate(places):
            if (begin, anchor) in self.answers:
                self.texts[lane] = self.answers[begin, anchor]
            for slot, token in enumerate(self.texts.get(lane, ())[begin + 1 : begin + block]):
                is_wrong = (begin + 1 + slot) % 5 == 0
                rows[entry, slot, (token + is_wrong) % tiny.VOCAB_SIZE] = 1
        return rows

    def propose_from(self, rows: Tensor, anchors: Tensor, budget: int | None) -> Proposal:
        return propose_chain(anchors, rows)

    def write_context(self, features, lanes, begins, counts) -> None:
        for lane, begin, count in zip(*map(Tensor.tolist, (lanes, begins, counts)), strict=True):
            self.written.setdefault(lane, set()).update(range(begin, begin + count))

    def set_valid_from(self, lane: int, position: int) -> None:
        self.written[lane] = set()


class Cheap(StepCosts):
    """A round always pays; one that copies takes longer than others."""

    def seconds(self, num_lanes, shape):
        return 4.0 if shape is not None and shape.drafter == LOOKUP else 1.0

    def is_due(self, num_lanes, shape):
        return False


@asynccontextmanager
async def speculating(
    model_dir: Path, folder: Path, said: list[tuple[tuple[int, ...], Answer]], parallel: int
) -> AsyncIterator[LocalEngine]:
    """An engine over captured passes, with a drafter that knows these answers."""

    def decode_with(backend: LayerSplitBackend, speculator: Speculator) -> LaneDecoding:
        longest_last = sorted(said, key=lambda pair: len(pair[1].ids))
        draft = KnowingDraft({(len(p), a.ids[0]): (*p, *a.ids) for p, a in longest_last})
        ring = speculator.drafters[0].passes.ring
        passes = LocalDraft(draft, ring, draft.propose_from, is_beside=True)
        drafters = [BlockDrafter(passes, [RoundShape(BLOCK)])]
        return SpeculativeDecoding(backend, Speculator(backend, drafters, parallel, Cheap()))

    with recaptured():
        engine = build_engine(
            Config(
                model=ModelConfig(model_dir=model_dir, dtype="fp32"),
                engine=EngineConfig(max_ctx_tokens=512, parallel=parallel),
                draft=DraftConfig(tiny.save_draft(folder, tiny.draft_config()), lookup="off"),
            ),
            decode_with=decode_with,
        )
        async with engine:
            await engine.load()
            yield engine


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to captured rounds, in order."""
    found: list[str] = []
    for name in ("start", "queue"):
        monkeypatch.setattr(CapturedRound, name, heard(getattr(CapturedRound, name), name, found))
    return found


def heard(method, name: str, found: list[str]):
    def run(self, *args):
        found.append(name)
        return method(self, *args)

    return run


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("parallel", [3, 1])
async def test_answers_are_those_without_a_drafter(
    tiny_dir: Path, tmp_path: Path, parallel: int, queued: list[str]
):
    async with started(tiny_dir, parallel) as engine:
        expected = await converse(engine)
    async with speculating(tiny_dir, tmp_path / "draft", expected, parallel) as engine:
        rehearsed = len(queued)
        assert await converse(engine) == expected
        status = engine.status().speculation
    assert {answer.reason for _, answer in expected} == {"stop", "length"}
    num_started, num_queued = (queued[rehearsed:].count(name) for name in ("start", "queue"))
    assert num_queued > 2 * num_started, "most rounds were queued before they were asked for"
    assert sum(status.accepted_by_slot) > status.rounds_total


async def go_on_after_leaving(
    engine: LocalEngine, whole: list[tuple[tuple[int, ...], Answer]]
) -> list[tuple[tuple[int, ...], Answer]]:
    """Answers that are left in the middle, and what follows on more of them than was read."""
    found = []
    for prompt, answer in whole:
        stream = await engine.open(Request(TokenPrompt(prompt), ignore_eos=True, max_tokens=150))
        num_read = 0
        async for delta in stream:
            num_read += len(delta.token_ids)
            if num_read > 20:
                break
        await stream.aclose()
        longer = (*prompt, *answer.ids[:100])
        found.append((longer, await ask(engine, longer, max_tokens=20)))
    return found


@pytest.mark.slow
async def test_what_was_run_ahead_of_a_client_that_leaves_is_not_kept(
    tiny_dir: Path, tmp_path: Path, queued: list[str]
):
    async with started(tiny_dir, 2) as engine:
        whole = [(p, await ask(engine, p, max_tokens=150)) for p in PROMPTS]
        expected = await go_on_after_leaving(engine, whole)
    async with speculating(tiny_dir, tmp_path / "draft", [*whole, *expected], 2) as engine:
        assert await go_on_after_leaving(engine, whole) == expected


async def read_late(engine: LocalEngine) -> list[tuple[tuple[int, ...], Answer]]:
    """An answer that is not read before another one has ended, and that one."""
    unread = await engine.open(Request(TokenPrompt(PROMPTS[0]), ignore_eos=True, max_tokens=90))
    await asyncio.sleep(0.2)
    other = await ask(engine, PROMPTS[1], max_tokens=60, client="other")
    deltas = [delta async for delta in unread]
    ids = tuple(token for delta in deltas for token in delta.token_ids)
    text = "".join(delta.text for delta in deltas)
    return [(PROMPTS[0], Answer(ids, text, deltas[-1].finish.reason)), (PROMPTS[1], other)]


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("parallel", [2, 1])
async def test_an_answer_that_is_not_read_gets_what_has_run_already(
    tiny_dir: Path,
    tmp_path: Path,
    parallel: int,
    queued: list[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(streams, "MAX_UNREAD_TOKENS", 16)
    async with started(tiny_dir, parallel) as engine:
        expected = await read_late(engine)
    async with speculating(tiny_dir, tmp_path / "draft", expected, parallel) as engine:
        assert await read_late(engine) == expected


SCHEMA = Constraint("json_schema", '{"type": "array", "maxItems": 3}', "response_format")


@pytest.fixture(scope="module")
def head_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that repeats itself, with a head that is right about half the time."""
    return mtp_models.save(tmp_path_factory.mktemp("mtp"))


async def mixed(engine: LocalEngine) -> list[Answer]:
    """More answers than lanes. In rounds with one that has a schema or is drawn, the host takes
    part; a pool's always.
    """
    drawn = Sampling(temperature=1.0, seed=1)
    return await asyncio.gather(
        ask(engine, PROMPTS[0], max_tokens=50),
        ask(engine, PROMPTS[1], max_tokens=20, constraint=SCHEMA, ignore_eos=False),
        ask(engine, PROMPTS[2], max_tokens=60),
        ask(engine, PROMPTS[3], max_tokens=12, sampling=drawn),
        ask(engine, (*PROMPTS[3], 5), max_tokens=50),
        ask(engine, (*PROMPTS[2], 5), max_tokens=40),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "pool_tokens", "lookup", "device"),
    [
        pytest.param(4, None, "off", "cpu:0", id="four"),
        pytest.param(1, None, "off", "cpu:0", id="one"),
        pytest.param(2, 512, "off", "cpu:0", id="a pool"),
        pytest.param(1, None, "on", "cpu:0", id="beside lookup"),
        pytest.param(4, None, "off", "cuda:0", id="a GPU", marks=pytest.mark.gpu),
        pytest.param(1, None, "on", "cuda:0", id="beside lookup on a GPU", marks=pytest.mark.gpu),
    ],
)
async def test_answers_with_the_head_in_the_weights_are_those_without_it(
    head_dir: Path,
    parallel: int,
    pool_tokens: int | None,
    lookup: str,
    device: str,
    queued: list[str],
):
    async with started(head_dir, parallel, pool_tokens, device=device) as engine:
        expected = await mixed(engine)
        whole = [(p, await ask(engine, p, max_tokens=90)) for p in PROMPTS[:1]]
        resumed = await go_on_after_leaving(engine, whole)

    def decode_with(backend: LayerSplitBackend, speculator: Speculator) -> LaneDecoding:
        cheap = Speculator(backend, speculator.drafters, parallel, Cheap())
        return SpeculativeDecoding(backend, cheap)

    with recaptured() if device.startswith("cpu") else nullcontext():
        async with started(
            head_dir, parallel, pool_tokens, "mtp", lookup, decode_with=decode_with, device=device
        ) as engine:
            rehearsed = len(queued)
            assert await mixed(engine) == expected
            assert await go_on_after_leaving(engine, whole) == resumed
            status = engine.status().speculation
    num_started, num_queued = (queued[rehearsed:].count(name) for name in ("start", "queue"))
    assert status is not None and sum(status.accepted_by_slot) > 40
    assert num_queued > 1.5 * num_started if pool_tokens is None else not num_queued
    assert {*status.drafters} == {"mtp"} | ({LOOKUP} if lookup == "on" else set())


@asynccontextmanager
async def started(
    model_dir: Path,
    parallel: int,
    pool_tokens: int | None = None,
    draft: str = "none",
    lookup: str = "off",
    decode_with: DecodeWith = speculate,
    device: str = "cpu:0",
) -> AsyncIterator[LocalEngine]:
    config = Config(
        model=ModelConfig(model_dir=model_dir, dtype="fp32"),
        placement=PlacementConfig(devices=(device,)),
        engine=EngineConfig(max_ctx_tokens=512, parallel=parallel),
        draft=DraftConfig(draft, lookup=lookup),  # type: ignore[arg-type]
        kvflash=KvFlashConfig(pool_tokens),
    )
    async with build_engine(config, decode_with=decode_with) as engine:
        await engine.load()
        yield engine
