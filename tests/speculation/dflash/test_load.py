"""A drafter that was loaded as planned: no answer changes, and a GPU is waited for once a round."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from luceasync.config import Config, DraftConfig, EngineConfig, ModelConfig, PlacementConfig
from luceasync.engine.decoding import SpeculativeDecoding
from luceasync.engine.sampling.choose import nothing
from luceasync.models.files import ModelFiles
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.request import Sampling
from luceasync.speculation.choice import RoundPlan, RoundShape, StepCosts
from luceasync.speculation.dflash.load import LoadedDraft, load_draft
from luceasync.speculation.dflash.placement import DFlashPlacement, plan_with_drafter
from luceasync.speculation.drafter import BlockDrafter
from luceasync.speculation.speculator import Speculator
from luceasync.text.tokenizer import Tokenizer
from tests import tiny
from tests.speculation.scripted import Lanes, plain_answers, prepare, speculated_answers

GPU = pytest.param(("cuda:0",), "cuda:0", marks=pytest.mark.gpu)
PLACES = [(("cpu:0",), "cpu:0"), (("cpu:0", "cpu:1"), "cpu:0"), (("cpu:0",), "cpu:3"), GPU]
SAMPLINGS = [Sampling(), Sampling(temperature=0.8), Sampling(repetition_penalty=1.3)]


class Opened:
    """A tiny target and a random drafter, on these devices."""

    def __init__(self, model_dir: Path, draft_dir: Path, devices, draft_device: str) -> None:
        if not draft_dir.exists():
            tiny.save_draft(draft_dir, tiny.draft_config())
        config = Config(
            model=ModelConfig(model_dir, dtype="fp32"),
            placement=PlacementConfig(devices),
            engine=EngineConfig(parallel=3, max_ctx_tokens=256),
            draft=DraftConfig(draft_dir, device=draft_device, ddtree=True, ddtree_budget=12),
        )
        report, drafter = plan_with_drafter(config)
        assert drafter is not None
        self.drafter: DFlashPlacement = drafter
        taps = drafter.spec.taps
        self.backend = LayerSplitBackend.open(ModelFiles(model_dir), report.plan, taps=taps)
        self.draft: LoadedDraft = load_draft(drafter, report.plan, self.backend)
        self.tokenizer = Tokenizer.load(model_dir)

    def prepared(self, max_tokens: int = 16):
        return [
            prepare(self.tokenizer, sampling, seed=seed, max_tokens=max_tokens)
            for seed, sampling in enumerate(SAMPLINGS)
        ]

    def close(self) -> None:
        self.draft.close()
        self.backend.close()


@pytest.fixture
def opened(tiny_dir: Path, tmp_path: Path, devices, draft_device) -> Iterator[Opened]:
    opened = Opened(tiny_dir, tmp_path / "draft", devices, draft_device)
    yield opened
    opened.close()


@pytest.mark.covered(1)
@pytest.mark.slow
@pytest.mark.parametrize(("devices", "draft_device"), PLACES)
def test_wherever_the_drafter_is_no_answer_changes(opened):
    plain = plain_answers(opened.backend, opened.prepared())
    for shape in opened.drafter.shapes:
        speculator = opened.draft.speculator
        found = speculated_answers(opened.backend, speculator, opened.prepared(), shape)
        assert found == plain, shape


@pytest.mark.parametrize(("devices", "draft_device"), [PLACES[1], GPU])
def test_no_answer_changes_with_tokens_that_a_selector_chooses(
    tiny_dir, tmp_path, devices, draft_device
):
    draft_dir = tiny.save_draft(tmp_path / "draft", tiny.draft_config(**tiny.DFLASH2))
    opened = Opened(tiny_dir, draft_dir, devices, draft_device)
    plain = plain_answers(opened.backend, opened.prepared(8))
    for shape in opened.drafter.shapes[-2:]:  # a chain and a tree
        speculator = opened.draft.speculator
        found = speculated_answers(opened.backend, speculator, opened.prepared(8), shape)
        assert found == plain, shape
    opened.close()


class AlwaysPays(StepCosts):
    """Each step is a round."""

    def seconds(self, num_lanes: int, shape: RoundShape | None) -> float:
        return 100.0 if shape is None else 1.0

    def is_due(self, num_lanes: int, shape: RoundShape | None) -> bool:
        return False


@pytest.mark.parametrize(("devices", "draft_device"), [PLACES[0], GPU])
def test_rounds_in_a_row_change_no_answer(opened, monkeypatch: pytest.MonkeyPatch):
    """On a GPU the next one begins before the host has read the last one."""
    num_after, queue_after = 0, Speculator.queue_after

    def counted(self, queued, anchors, *, alone):
        nonlocal num_after
        after = queue_after(self, queued, anchors, alone=alone)
        num_after += after is not None
        return after

    monkeypatch.setattr(Speculator, "queue_after", counted)

    def greedy():
        lengths = enumerate((40, 9, 30))
        return [prepare(opened.tokenizer, Sampling(), seed=s, max_tokens=n) for s, n in lengths]

    chain = next(shape for shape in opened.drafter.shapes if shape.budget is None)
    drafters = [BlockDrafter(opened.draft.speculator.drafters[0].passes, [chain])]
    speculator = Speculator(opened.backend, drafters, 3, AlwaysPays())
    decoding = SpeculativeDecoding(opened.backend, speculator)
    lanes = Lanes(opened.backend, greedy(), speculator)
    while running := [g for g in lanes.running if not lanes.is_over(g)]:
        decoding.step(running, alone=True, meanwhile=nothing)
        lanes.show(running)
    assert lanes.answers() == plain_answers(opened.backend, greedy())
    if opened.backend.plan.runs_async:
        assert num_after > 10


@pytest.mark.parametrize(("devices", "draft_device"), [GPU])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_round_waits_for_the_gpu_only_where_it_reads_tokens(opened):
    """That wait is for an event. An operation that waits by itself raises here."""
    greedy = [p for p in opened.prepared(100) if p.request.sampling == Sampling()]
    lanes = Lanes(opened.backend, greedy, opened.draft.speculator)
    for shape in opened.drafter.shapes:
        plan = RoundPlan(shape, (0,), False)
        for _ in range(4):  # until its graphs are captured
            lanes.round(list(lanes.running), plan)
        try:
            torch.cuda.set_sync_debug_mode("error")
            lanes.round(list(lanes.running), plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("devices", "draft_device"), [PLACES[0]])
def test_closing_twice_is_closing_once(opened):
    opened.draft.close()
    assert opened.draft.speculator.drafters[0].passes.ring.num_bytes > 0  # still referenced
