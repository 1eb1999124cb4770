"""The head that a model brings drafts what its formulas say, wherever it and the model run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from luceasync.config import (
    CacheConfig,
    Config,
    DraftConfig,
    EngineConfig,
    KvFlashConfig,
    ModelConfig,
    PlacementConfig,
)
from luceasync.engine.start import build_engine
from luceasync.models.files import ModelFiles
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.request import Request, Sampling, TokenPrompt
from luceasync.speculation.choice import RoundShape
from luceasync.speculation.dflash.load import load_mtp
from luceasync.speculation.dflash.placement import plan_with_drafter
from luceasync.speculation.mtp import NAME, mtp_of
from tests import tiny
from tests.gguf.tiny_files import K_MIX, Tiny, write
from tests.reference.mtp import Mistake, SlowHead
from tests.speculation import mtp_models

NUM_DRAFTED = 3
SHAPE = RoundShape(NUM_DRAFTED + 1, None, NAME)
MISTAKES = {
    name: Mistake(**{name: True})
    for name in Mistake.__dataclass_fields__  # one at a time
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head whose weights are all random, so that every part of it counts."""
    return mtp_models.save(tmp_path_factory.mktemp("mtp"), copies=0.0)


@pytest.fixture(scope="module")
def slow(model_dir: Path) -> SlowHead:
    return SlowHead(model_dir, mtp_models.build())


class Loaded:
    """The model and its head on these devices."""

    def __init__(self, model_dir: Path, num_shards: int = 1, head_rows: int = 0) -> None:
        self.config = config_of(model_dir, num_shards)
        files = ModelFiles(model_dir)
        report, _ = plan_with_drafter(self.config, files)
        self.mtp = mtp_of(self.config, files, report.plan.devices, report.plan.precision)
        assert self.mtp is not None
        self.backend = LayerSplitBackend.open(files, report.plan, taps=self.mtp.taps)
        mtp = replace(self.mtp, head_rows=head_rows)
        self.speculator, self._close = load_mtp(mtp, report.plan, self.backend, files.weights.open)
        self.passes = self.speculator.drafters[0].passes

    def prefill(self, lane: int, begin: int, ids: Sequence[int]) -> None:
        self.backend.prefill(lane, begin, ids, project=False)
        self.speculator.prefilled(lane, begin, len(ids))

    def verify(self, lanes: Sequence[int], begins: Sequence[int], rows, paths) -> None:
        self.backend.verify(lanes, begins, torch.tensor(rows))
        self.backend.commit(paths)
        self.backend.send_taps(self.passes, lanes, begins, paths, len(rows[0]))

    def drafted(self, lane: int, position: int, token: int) -> list[int]:
        with torch.inference_mode():
            found = self.passes.propose([token], [lane], [position], SHAPE).tokens
        assert found[0, 0] == token
        return found[0, 1:].tolist()

    def close(self) -> None:
        self._close()
        self.backend.close()


def config_of(model_dir: Path, num_shards: int) -> Config:
    return Config(
        model=ModelConfig(model_dir, dtype="fp32"),
        placement=PlacementConfig(devices=tuple(f"cpu:{i}" for i in range(num_shards))),
        engine=EngineConfig(parallel=4, max_ctx_tokens=256),
        draft=DraftConfig(NAME),
    )


@pytest.fixture(params=[1, 3], ids=["one shard", "three shards"])
def loaded(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Loaded]:
    loaded = Loaded(model_dir, request.param)
    yield loaded
    loaded.close()


def text(seed: int, num_tokens: int = 60) -> list[int]:
    choice = random.Random(seed)
    return [choice.randrange(tiny.VOCAB_SIZE) for _ in range(num_tokens)]


def test_after_a_prompt_it_drafts_what_the_formulas_say(loaded: Loaded, slow: SlowHead):
    for lane in range(4):
        ids = text(lane)
        loaded.prefill(lane, 0, ids[:-1])
        assert loaded.drafted(lane, len(ids) - 1, ids[-1]) == slow.draft(ids, NUM_DRAFTED)


def test_a_prompt_in_pieces_makes_no_difference(loaded: Loaded, slow: SlowHead):
    ids = text(7, 100)
    for begin, end in ((0, 40), (40, 41), (41, 99)):
        loaded.prefill(2, begin, ids[begin:end])
    assert loaded.drafted(2, 99, ids[99]) == slow.draft(ids, NUM_DRAFTED)


def test_after_rounds_of_all_lengths_it_has_what_was_kept(loaded: Loaded, slow: SlowHead):
    choice, ids = random.Random(5), text(11, 30)
    loaded.prefill(1, 0, ids[:-1])
    for kept in (1, 4, 2, 3, 1):
        position = len(ids) - 1
        drafted = loaded.drafted(1, position, ids[-1])  # its rows must not stay
        assert drafted == slow.draft(ids, NUM_DRAFTED)
        after = [choice.randrange(tiny.VOCAB_SIZE) for _ in range(NUM_DRAFTED)]
        loaded.verify([1], [position], [[ids[-1], *after]], [range(kept)])
        ids += [*after[: kept - 1], choice.randrange(tiny.VOCAB_SIZE)]
    assert loaded.drafted(1, len(ids) - 1, ids[-1]) == slow.draft(ids, NUM_DRAFTED)


def test_plain_steps_are_taken_up_too(loaded: Loaded, slow: SlowHead):
    ids = text(3, 25)
    loaded.prefill(0, 0, ids[:20])
    for position in range(20, 24):
        loaded.backend.decode([0], [position], [ids[position]])
        loaded.backend.send_taps(loaded.passes, [0], [position], [[0]], 1)
    assert loaded.drafted(0, 24, ids[24]) == slow.draft(ids, NUM_DRAFTED)


def test_a_lane_that_was_restored_drafts_from_what_came_since(loaded: Loaded, slow: SlowHead):
    ids = text(9)
    loaded.backend.prefill(3, 0, ids[:40], project=False)  # as a restore: the head hears nothing
    loaded.prefill(3, 40, ids[40:-1])
    assert loaded.drafted(3, len(ids) - 1, ids[-1]) == slow.draft(ids, NUM_DRAFTED, begin=40)


def test_a_lane_that_begins_again_keeps_nothing(loaded: Loaded, slow: SlowHead):
    loaded.prefill(0, 0, text(1, 90))
    loaded.backend.reset(0)
    loaded.speculator.start(0)
    ids = text(2, 20)
    loaded.prefill(0, 0, ids[:-1])
    assert loaded.drafted(0, 19, ids[19]) == slow.draft(ids, NUM_DRAFTED)


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_the_usual_mistakes_would_be_seen(model_dir: Path, slow: SlowHead, mistake: Mistake):
    wrong = SlowHead(model_dir, slow.model, mistake)
    texts = [text(seed, 30) for seed in range(4)]
    assert [wrong.draft(ids, 3) for ids in texts] != [slow.draft(ids, 3) for ids in texts]


def test_with_a_part_of_the_head_it_drafts_the_first_tokens_and_those_of_the_prompt(
    model_dir: Path, slow: SlowHead
):
    """Of which each lane has its own: a rare name is drafted where the prompt has it."""
    num_first, loaded = 128, Loaded(model_dir, head_rows=128)
    for seed in range(4, 12):
        lane, ids = seed % 4, text(seed, 80)
        loaded.backend.reset(lane)
        loaded.speculator.start(lane)
        for begin, end in ((0, 30), (30, 79)):
            loaded.prefill(lane, begin, ids[begin:end])
        allowed = {*range(num_first), *ids[:-1]}
        assert loaded.drafted(lane, 79, ids[79]) == slow.draft(ids, NUM_DRAFTED, allowed=allowed)
    loaded.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiny_file",
    [Tiny("qwen3_5", {"": "Q8_0"}, nextn=True), Tiny("qwen3_5_moe", K_MIX, nextn=True, tied=True)],
    ids=["Q8_0", "K-quants, experts"],
)
def test_a_gguf_file_drafts_what_a_directory_of_its_numbers_does(tiny_file: Tiny, tmp_path: Path):
    drafts, rows = zip(*map(drafts_and_rows, write(tiny_file, tmp_path)), strict=True)
    assert drafts[0] == drafts[1]
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-3, atol=1e-4)


def drafts_and_rows(path: Path) -> tuple[list[list[int]], torch.Tensor]:
    """What is drafted behind a few prompts, and what the model's head saw for it."""
    loaded, choice = Loaded(path), random.Random(3)
    network, heard = loaded.passes.network, []
    choose = network._choose
    network._choose = lambda hidden, lanes: (heard.append(hidden), choose(hidden, lanes))[1]
    drafts = []
    for lane in range(4):
        ids = [choice.randrange(256) for _ in range(50)]
        loaded.prefill(lane, 0, ids[:-1])
        drafts.append(loaded.drafted(lane, 49, ids[49]))
    loaded.close()
    return drafts, torch.cat(heard)


@pytest.mark.slow
async def test_with_a_pool_smaller_than_the_text_nothing_changes(tmp_path: Path):
    """The head has a ring of its own, whatever chunks of the model are on the device."""
    model_dir = mtp_models.save(tmp_path, cycle=8)
    plain, _ = await answer(model_dir, "none", None)
    found, told = await answer(model_dir, NAME, 640)
    assert found == plain and told.accepted > 0


async def answer(model_dir: Path, draft: str, pool_tokens: int | None):
    """Greedy tokens behind 900 others, and what speculation did for them."""
    config = Config(
        model=ModelConfig(model_dir, dtype="fp32"),
        engine=EngineConfig(max_ctx_tokens=2048, parallel=1, prefill_chunk_tokens=64),
        cache=CacheConfig(memory_bytes=1 << 26),
        draft=DraftConfig(draft, lookup="off"),
        kvflash=KvFlashConfig(pool_tokens=pool_tokens),
    )
    async with build_engine(config) as engine:
        await engine.load()
        prompt = TokenPrompt(tuple(text(1, 900)))
        request = Request(prompt, max_tokens=60, sampling=Sampling(), ignore_eos=True)
        deltas = [delta async for delta in await engine.open(request)]
    assert deltas[-1].finish is not None
    tokens = [token for delta in deltas for token in delta.token_ids]
    return tokens, deltas[-1].finish.speculation
