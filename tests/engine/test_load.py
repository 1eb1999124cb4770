"""A rehearsal times steps of all kinds before the first request, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from luceasync.config import Config, DraftConfig, EngineConfig, ModelConfig
from luceasync.engine.decoding import PlainDecoding, SpeculativeDecoding
from luceasync.engine.load import Rehearsal, in_turns, rehearsal_for, rehearse
from luceasync.engine.start import build_engine
from luceasync.errors import PlacementError
from luceasync.speculation.choice import FIRST_WAIT_STEPS, RoundShape, StepCosts
from luceasync.status import SpeculationStatus
from luceasync.text.tokenizer import Tokenizer
from tests import tiny
from tests.speculation import dflash2_models, mtp_models
from tests.speculation.conftest import make_backend  # noqa: F401
from tests.speculation.scripted import BLOCK, SHAPES, TAPS, VERIFY_ROWS, random_speculator


@pytest.fixture
def backend(tiny_dir: Path, make_backend):  # noqa: F811
    return make_backend(tiny_dir, verify_rows=VERIFY_ROWS, taps=TAPS)


@pytest.fixture
def tokenizer(tiny_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_dir)


@pytest.fixture
def costs() -> StepCosts:
    return StepCosts()


@pytest.fixture
def speculator(backend, tiny_dir: Path, tmp_path: Path, costs: StepCosts):
    return random_speculator(backend, tiny_dir, tmp_path / "draft", costs)


def small_part(**fields) -> Rehearsal:
    sizes = {"chunk_tokens": 32, "max_ctx_tokens": 256, "vocab_size": 512, "shapes": SHAPES}
    return rehearsal_for(**{**sizes, "runs_async": True, **fields})


def rehearsed(backend, speculator, tokenizer: Tokenizer, **options) -> None:
    decoding = SpeculativeDecoding(backend, speculator.rehearsing(), force=in_turns(SHAPES))
    rehearse(backend, decoding, tokenizer, small_part(), **options)


@pytest.mark.slow
def test_the_cost_of_steps_is_measured_and_trusted(backend, speculator, costs, tokenizer):
    rehearsed(backend, speculator, tokenizer, limit_s=60.0)
    for shape in (*SHAPES, None):
        assert costs.seconds(1, shape) is not None
        for _ in range(FIRST_WAIT_STEPS):
            costs.observe(4, shape, 1.0)
        assert not costs.is_due(1, shape)


@pytest.mark.parametrize("fits", [True, False])
async def test_a_drafter_that_proposes_noise_is_told_in_a_line(tmp_path, caplog, fits):
    model_dir = mtp_models.save(tmp_path / "target", cycle=8)
    if fits:
        successors = mtp_models.successors(0, cycle=8)
        draft_dir = dflash2_models.save(tmp_path / "draft", model_dir, successors)
    else:  # of another model
        draft_dir = tiny.save_draft(tmp_path / "draft", tiny.draft_config())
    config = Config(
        model=ModelConfig(model_dir, dtype="fp32"),
        engine=EngineConfig(max_ctx_tokens=256, parallel=1),
        draft=DraftConfig(draft_dir, lookup="off"),
    )
    async with build_engine(config) as engine:
        await engine.load()
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [f"{draft_dir} drafts noise: " in words for words in told] == ([] if fits else [True])


@pytest.mark.slow
def test_what_its_text_shows_is_not_trusted(backend, speculator, tokenizer):
    rehearsed(backend, speculator, tokenizer)
    nothing = (0,) * (BLOCK - 1)
    assert speculator.status == SpeculationStatus(0, nothing, nothing, 0.0, 0.0, 0.0)


@pytest.mark.slow
def test_the_lane_is_as_if_nothing_had_run_on_it(backend, speculator, tokenizer):
    rehearsed(backend, speculator, tokenizer)
    assert len(speculator.drafters[0].passes.ring.valid(0)) == 0
    lanes = [backend.prefill(lane, 0, (5, 6, 7), project=True).clone() for lane in (0, 1)]
    torch.testing.assert_close(*lanes)


class Counting(PlainDecoding):
    """Counts its steps."""

    num_steps = 0

    def step(self, generations, *, alone, meanwhile):
        self.num_steps += 1
        super().step(generations, alone=alone, meanwhile=meanwhile)


@pytest.mark.parametrize(
    ("num_steps", "max_tokens", "limit_s", "expected"),
    [(7, 100, 60.0, 7), (7, 4, 60.0, 3), (7, 100, -1.0, 0)],
)
def test_it_ends_with_the_steps_the_context_or_the_time(
    backend, tokenizer, num_steps, max_tokens, limit_s, expected
):
    decoding = Counting(backend)
    part = Rehearsal((1, 2, 3, 4, 5), 2, max_tokens, num_steps)
    rehearse(backend, decoding, tokenizer, part, limit_s=limit_s)
    assert decoding.num_steps == expected


def test_logits_that_are_no_numbers_are_left_to_requests(backend, tokenizer, monkeypatch):
    decoding, prefill = Counting(backend), backend.prefill

    def broken(*args, **options):
        return torch.full_like(prefill(*args, **options), torch.nan)

    monkeypatch.setattr(backend, "prefill", broken)
    rehearse(backend, decoding, tokenizer, small_part())
    assert decoding.num_steps == 0


def test_steps_take_turns():
    plan = in_turns([RoundShape(4), RoundShape(2)])
    told = [plan([3]) for _ in range(6)]
    assert [p.shape for p in told] == [None, RoundShape(2), RoundShape(4)] * 2
    assert [p.speculating for p in told] == [(), (3,), (3,)] * 2
    assert all(p.is_measured for p in told)


def test_the_prompt_is_a_whole_chunk_where_kernels_are_compiled():
    part = small_part()
    assert len(part.prompt_ids) == 32 and part.max_tokens == 256 - 32
    assert len(small_part(runs_async=False).prompt_ids) == 16


@pytest.mark.parametrize("max_ctx_tokens", [1, 2, 40])
def test_half_the_context_is_left(max_ctx_tokens):
    part = small_part(max_ctx_tokens=max_ctx_tokens)
    assert len(part.prompt_ids) == max(1, max_ctx_tokens // 2)


def test_tokens_are_the_models():
    assert max(small_part(vocab_size=5).prompt_ids) == 4


def test_one_plain_step_where_nothing_is_to_be_timed():
    assert small_part(shapes=()).num_steps == 1


# --- errors ---------------------------------------------------------------------------------------


TOLD = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.63 GiB of "
    "which 1.21 GiB is free. Of the allocated memory 6.1 GiB is allocated by PyTorch. See the docs."
)


async def test_running_out_of_device_memory_is_an_error_of_one_line(
    start_engine, tiny_dir: Path, monkeypatch
):
    def too_much(*args: object) -> None:
        raise torch.OutOfMemoryError(TOLD)

    monkeypatch.setattr("luceasync.engine.load.rehearse", too_much)
    with pytest.raises(
        PlacementError, match=r"1.21 GiB is free. Free some of it, or lower"
    ) as told:
        async with start_engine():
            pass
    assert "\n" not in str(told.value) and "PyTorch" not in str(told.value)
