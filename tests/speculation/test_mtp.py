"""The head that a model brings drafts what its formulas say, wherever it and the model run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from luceasync.pipeline.passes import LaneText
from luceasync.request import Request, Sampling, TokenPrompt
from luceasync.speculation import mtp_network
from luceasync.speculation.choice import RoundPlan, RoundShape, StepCosts
from luceasync.speculation.dflash.load import load_mtp
from luceasync.speculation.dflash.placement import plan_with_drafter
from luceasync.speculation.mtp import NAME, mtp_of
from luceasync.speculation.speculator import Speculator
from tests import tiny
from tests.gguf.tiny_files import K_MIX, Tiny, write
from tests.pipeline.recaptured import recaptured
from tests.reference.mtp import Mistake, SlowHead
from tests.speculation import mtp_models

NUM_DRAFTED = 3
SHAPE = RoundShape(NUM_DRAFTED + 1, None, NAME)
SMALL_RING = 24  # tokens that it sees
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

    def __init__(
        self,
        model_dir: Path,
        num_shards: int = 1,
        head_rows: int = 0,
        devices: tuple[str, ...] = (),
    ) -> None:
        """`devices`: none: CPUs, as many as shards."""
        self.config = config_of(model_dir, devices or tuple(f"cpu:{i}" for i in range(num_shards)))
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


def config_of(model_dir: Path, devices: tuple[str, ...]) -> Config:
    return Config(
        model=ModelConfig(model_dir, dtype="fp32"),
        placement=PlacementConfig(devices=devices),
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


def test_plain_steps_of_lanes_that_come_and_go_are_taken_up(loaded: Loaded, slow: SlowHead):
    """However many there are in a row; a lane begins anew in between."""
    texts, ends = {lane: text(lane + 20) for lane in range(3)}, dict.fromkeys(range(3), 5)
    for lane, ids in texts.items():
        loaded.prefill(lane, 0, ids[:5])
    for lanes, num_steps in (((0, 1), 20), ((0,), 3), ((2, 0), 18), ((1, 2, 0), 5)):
        for _ in range(num_steps):
            begins = [ends[lane] for lane in lanes]
            loaded.backend.decode(lanes, begins, [texts[lane][ends[lane]] for lane in lanes])
            loaded.backend.send_taps(loaded.passes, lanes, begins, [[0]] * len(lanes), 1)
            ends |= {lane: ends[lane] + 1 for lane in lanes}
        if lanes == (0,):
            loaded.backend.reset(1)
            loaded.speculator.start(1)
            loaded.prefill(1, 0, texts[1][:5])
            ends[1] = 5
    assert [*ends.values()] == [51, 10, 28]
    for lane, end in ends.items():
        ids = texts[lane][: end + 1]
        assert loaded.drafted(lane, end, ids[-1]) == slow.draft(ids, NUM_DRAFTED)


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


class Steady(StepCosts):
    """Nothing is to be measured."""

    def is_due(self, num_lanes, shape):
        return False


@dataclass(frozen=True)
class Drafted:
    """Behind a text: tokens, and the rows that the model's head saw for them."""

    ids: list[int]
    tokens: list[int]
    rows: torch.Tensor


class InRounds:
    """Lanes whose rounds the device accepts. `given`: each text before a round, and the tokens that
    it got, unless the text was to end; `drafted`: what was drafted behind each, if it is heard,
    which a graph does not tell.
    """

    def __init__(self, loaded: Loaded, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.loaded = loaded
        self.speculator = Speculator(loaded.backend, loaded.speculator.drafters, 4, Steady())
        self.texts: dict[int, list[int]] = {}
        self.drafted: list[Drafted] = []
        self.given: list[tuple[list[int], list[int]]] = []
        self._proposed: list[dict[int, tuple[list[int], torch.Tensor]]] = []  # by lane
        if monkeypatch is not None:
            self._hear(monkeypatch)

    @property
    def lengths(self) -> set[int]:
        """How many tokens rounds gave."""
        return {len(given) for _, given in self.given}

    def _hear(self, monkeypatch: pytest.MonkeyPatch) -> None:
        network, rows = self.loaded.passes.network, []
        propose, choose = network.propose, network._choose

        def heard(anchors, lanes, begins, num_tokens, *, reach):
            rows.clear()
            found = propose(anchors, lanes, begins, num_tokens, reach=reach).tolist()
            pairs = zip(found, torch.cat(rows, 1), strict=True)
            self._proposed.append(dict(zip(lanes.tolist(), pairs, strict=True)))
            return torch.tensor(found)

        monkeypatch.setattr(network, "propose", heard)
        monkeypatch.setattr(network, "_choose", lambda z, at: (rows.append(z), choose(z, at))[1])

    def drafts(self, lane: int) -> Drafted:
        """What is drafted behind the lane's text, asked by the host."""
        ids = self.texts[lane]
        self.loaded.drafted(lane, len(ids) - 1, ids[-1])
        tokens, rows = self._proposed.pop()[lane]
        return Drafted(ids, tokens[1:], rows)

    def begin(self, lane: int, ids: list[int]) -> None:
        self.loaded.backend.reset(lane)
        self.speculator.start(lane)
        self.loaded.prefill(lane, 0, ids[:-1])
        self.texts[lane] = ids

    def run(self, lanes: Sequence[int], *, num_rounds: int = 4, num_left: int = 99) -> None:
        """Rounds each of which is queued before the tokens of the one before it are read."""
        texts = {lane: self.texts[lane] for lane in lanes}
        places = [LaneText(n, len(t) - 1, t[-1], num_left, ()) for n, t in texts.items()]
        before = len(self.given)
        queued = self.speculator.queue(places, RoundPlan(SHAPE, tuple(lanes), False))
        del self._proposed[:-1]  # those of captures
        for missing in reversed(range(num_rounds)):
            assert queued is not None, "the host takes part"
            after = self.speculator.queue_after(queued, (), alone=True) if missing else None
            tokens = self.speculator.arrived(queued)
            proposed = self._proposed.pop(0) if self._proposed else {}
            taken = [self._take(*each, proposed) for each in zip(lanes, tokens, strict=True)]
            self.speculator.settle(queued, taken, tokens, after)
            queued = after
        if num_left <= NUM_DRAFTED:
            del self.given[before:]

    def _take(self, lane: int, given: list[int], proposed):
        """The lane's text goes on, unless it has ended."""
        if not given:
            return None
        ids = self.texts[lane]
        if lane in proposed:
            tokens, rows = proposed[lane]
            self.drafted.append(Drafted(ids, tokens[1:], rows))
            assert tokens[: len(given)] == [ids[-1], *given[:-1]], "what was accepted"
        self.given.append((ids, given))
        self.texts[lane] = [*ids, *given]
        return len(ids) - 1, len(given)


@pytest.fixture
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp_network, "RING_TOKENS", SMALL_RING + mtp_network.SPARE_PLACES)


@pytest.fixture
def copying(tmp_path: Path) -> Iterator[Loaded]:
    """A model that says of most tokens the same next one, and a head that is right now and then;
    captured passes.
    """
    with recaptured():
        loaded = Loaded(mtp_models.save(tmp_path))
        yield loaded
        loaded.close()


@pytest.fixture
def slow_copying(copying: Loaded) -> SlowHead:
    model_dir = copying.config.model.model_dir
    assert model_dir is not None
    return SlowHead(Path(model_dir), mtp_models.build())


def come_and_go(rounds: InRounds) -> None:
    for lane in (0, 2, 3):
        rounds.begin(lane, text(lane, 20 + 7 * lane))
    rounds.run([0, 2, 3])
    rounds.begin(1, text(1))  # a lane joins
    rounds.run([0, 1, 2, 3])
    rounds.run([2], num_rounds=2)  # others leave
    rounds.begin(0, text(5))
    rounds.run([0, 3])
    rounds.run([0, 3], num_rounds=3, num_left=2)  # texts end while a round is queued


def check(drafted: Drafted, slow: SlowHead, *, begin: int = 0) -> None:
    tokens, rows = zip(*slow.steps(drafted.ids, NUM_DRAFTED, begin=begin), strict=True)
    assert drafted.tokens == [*tokens]
    torch.testing.assert_close(drafted.rows, torch.stack(rows), rtol=1e-3, atol=1e-4)


def test_in_rounds_that_the_device_accepts_it_drafts_what_the_formulas_say(
    copying: Loaded, slow_copying: SlowHead, monkeypatch: pytest.MonkeyPatch
):
    rounds = InRounds(copying, monkeypatch)
    come_and_go(rounds)
    assert len(rounds.drafted) > 35 and rounds.lengths == {1, 2, 3, 4}
    for drafted in rounds.drafted:
        check(drafted, slow_copying)


@pytest.mark.gpu
def test_on_a_gpu_rounds_give_what_the_formulas_say(tmp_path: Path):
    """The model's best tokens, and as many as what is drafted foresees."""
    loaded = Loaded(mtp_models.save(tmp_path), devices=("cuda:0",))
    rounds, slow = InRounds(loaded), SlowHead(tmp_path, mtp_models.build())
    come_and_go(rounds)
    assert len(rounds.given) > 30 and rounds.lengths == {1, 2, 3, 4}
    for ids, given in rounds.given:
        assert given == slow.round(ids, NUM_DRAFTED)
    loaded.close()


def test_rounds_of_the_device_and_of_the_host_take_turns(
    small_ring: None, copying: Loaded, monkeypatch: pytest.MonkeyPatch
):
    """On a text longer than the ring: what is drafted is what is drafted behind it as a prompt."""
    rounds = InRounds(copying, monkeypatch)
    rounds.begin(0, text(8, 70))
    for number in range(12):
        if number % 3 < 2:
            rounds.run([0])
            continue
        ids = rounds.texts[0]
        rows = [ids[-1], *text(number, NUM_DRAFTED)]
        copying.verify([0], [len(ids) - 1], [rows], [range(2)])
        rounds.texts[0] = [*ids, rows[1], 7]
    assert len(rounds.texts[0]) > 70 + SMALL_RING
    for drafted in rounds.drafted:
        rounds.begin(1, drafted.ids)
        expected = rounds.drafts(1)
        assert drafted.tokens == expected.tokens
        torch.testing.assert_close(drafted.rows, expected.rows, rtol=1e-4, atol=1e-5)


def test_what_was_run_ahead_of_a_text_is_not_taken_for_its_own(
    copying: Loaded, slow_copying: SlowHead, monkeypatch: pytest.MonkeyPatch
):
    rounds, ids = InRounds(copying, monkeypatch), text(6, 30)
    rounds.begin(0, ids)
    place = LaneText(0, len(ids) - 1, ids[-1], 99, ())
    queued = rounds.speculator.queue([place], RoundPlan(SHAPE, (0,), False))
    assert queued is not None
    after = rounds.speculator.queue_after(queued, (), alone=True)
    [given] = rounds.speculator.arrived(queued)
    rounds.speculator.settle(queued, [(len(ids) - 1, len(given))], [given], after)
    begin = len(ids) + len(given) - 1  # the second round's tokens are not taken
    whole = [*ids, *given, *text(7, 9)]
    copying.backend.reset(0)
    copying.backend.prefill(0, 0, whole[:begin], project=False)
    copying.prefill(0, begin, whole[begin:-1])
    rounds.texts[0] = whole
    check(rounds.drafts(0), slow_copying, begin=begin)


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
