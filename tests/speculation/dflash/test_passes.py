"""However a drafter absorbed its context, the next proposal is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from luceasync.host_cache.arena import PlainMemory
from luceasync.speculation.choice import RoundShape
from luceasync.speculation.dflash.feature_contents import FeaturePart, LocalFeatures
from luceasync.speculation.speculator import Speculator
from tests.pipeline.heard import taps_of
from tests.speculation.scripted import (
    BLOCK,
    TAPS,
    VERIFY_ROWS,
    ScriptedDraft,
    random_prompt,
    random_speculator,
    speculator_of,
)

CHAIN = RoundShape(BLOCK)
TOKENS = random_prompt(1, 90)


@pytest.fixture
def backend(tiny_dir: Path, make_backend):
    return make_backend(tiny_dir, verify_rows=VERIFY_ROWS, taps=TAPS)


@pytest.fixture
def speculator(backend, tiny_dir: Path, tmp_path: Path) -> Speculator:
    """With a real drafter."""
    return random_speculator(backend, tiny_dir, tmp_path)


def prefill(backend, speculator: Speculator, lane: int, cuts: list[int]) -> None:
    speculator.start(lane)
    for begin, end in zip([0, *cuts], [*cuts, len(TOKENS)], strict=True):
        backend.prefill(lane, begin, TOKENS[begin:end], project=False)
        speculator.prefilled(lane, begin, end - begin)


@torch.inference_mode()
def proposed(speculator: Speculator, lane: int) -> list[int]:
    proposal = speculator.drafters[0].passes.propose([7], [lane], [len(TOKENS)], CHAIN)
    return proposal.tokens[0].tolist()


def test_chunks_of_any_size_leave_the_same_context(backend, speculator):
    prefill(backend, speculator, 0, [])
    prefill(backend, speculator, 2, [1, 40, 64])
    assert proposed(speculator, 0) == proposed(speculator, 2)


@pytest.mark.slow
def test_chunks_of_any_size_are_taken_up_in_few_sizes(backend, speculator, monkeypatch):
    sizes = set()
    draft = speculator.drafters[0].passes._draft
    write = draft.write_context

    def written(features, *index):
        sizes.add(features.shape[1])
        write(features, *index)

    monkeypatch.setattr(draft, "write_context", written)
    for num_tokens in range(1, len(TOKENS) + 1):
        prefill(backend, speculator, 0, [num_tokens] if num_tokens < len(TOKENS) else [])
    assert len(sizes) == 22  # of the 90


def test_rows_behind_a_short_chunk_leave_nothing(backend, tiny_dir: Path, tmp_path: Path):
    short = random_speculator(backend, tiny_dir, tmp_path, short_rows=(64,))
    prefill(backend, short, 0, [])
    short.start(1)
    backend.prefill(1, 0, TOKENS[:64], project=False)
    short.prefilled(1, 0, 40)  # as if the other 24 rows were padding
    backend.reset(1)
    backend.prefill(1, 0, TOKENS[:40], project=False)
    backend.prefill(1, 40, TOKENS[40:], project=False)
    short.prefilled(1, 40, 50)
    assert proposed(short, 1) == proposed(short, 0)


def test_shards_may_fill_up_a_chunk_or_not(backend, tiny_dir: Path, tmp_path: Path):
    short = random_speculator(backend, tiny_dir, tmp_path, short_rows=(16,))
    prefill(backend, short, 0, [80])
    short.start(1)
    backend.prefill(1, 0, TOKENS[:80], project=False)
    short.prefilled(1, 0, 80)
    backend.prefill(1, 80, TOKENS[80:], project=False)
    taps = taps_of(backend)
    taps[0] = torch.nn.functional.pad(taps[0], (0, 0, 0, 6), value=9.0)
    with torch.inference_mode():
        short.drafters[0].passes.absorb_chunk(taps, 1, 80, 10)
    assert proposed(short, 1) == proposed(short, 0)


def test_a_committed_path_leaves_what_prefill_would(backend, speculator):
    prefill(backend, speculator, 0, [])
    backend.prefill(1, 0, TOKENS[:88], project=False)
    speculator.start(1)
    speculator.prefilled(1, 0, 88)
    rows = torch.tensor([[TOKENS[88], 5, TOKENS[89], 6, 6, 6, 6, 6, 6]])
    parents = torch.tensor([[-1, 0, 0, 1, 2, 2, 3, 4, 5]], dtype=torch.int32)
    backend.verify([1], [88], rows, parents)
    backend.commit([[0, 2]])
    with torch.inference_mode():
        backend.send_taps(speculator.drafters[0].passes, [1], [88], [[0, 2]], BLOCK)
    assert proposed(speculator, 1) == proposed(speculator, 0)


def test_restored_features_propose_what_computed_ones_do(backend, speculator):
    prefill(backend, speculator, 0, [40])
    features = LocalFeatures(speculator.drafters[0].passes, PlainMemory())
    content = features.save(0, 0, len(TOKENS))
    speculator.start(3)
    speculator.restored(3, len(TOKENS), with_features=True)
    features.restore(3, 0, [FeaturePart(content, 0, 40), FeaturePart(content, 40, len(TOKENS))])
    assert proposed(speculator, 3) == proposed(speculator, 0)
    assert speculator.speculation(3).off_reason is None


def test_a_lane_without_features_proposes_all_the_same(backend, speculator):
    speculator.start(1)
    speculator.restored(1, len(TOKENS), with_features=False)
    assert len(proposed(speculator, 1)) == BLOCK
    assert speculator.speculation(1).off_reason == "restored without features"


def test_without_features_nothing_before_the_end_is_seen(backend):
    draft = ScriptedDraft({})
    speculator_of(backend, draft).restored(1, 33, with_features=False)
    assert draft.valid_from[1] == 33


def test_context_with_a_gap_before_it_begins_after_the_gap(backend):
    draft = ScriptedDraft({})
    speculator = speculator_of(backend, draft)
    prefill(backend, speculator, 0, [32])
    backend.prefill(0, 90, TOKENS[:10], project=False)
    assert draft.valid_from[0] == 0
    backend.send_taps(speculator.drafters[0].passes, [0], [99], [range(4)], 10)
    assert draft.valid_from[0] == 99


def test_warming_up_leaves_every_lane_as_it_was(backend, speculator):
    prefill(backend, speculator, 0, [])
    before, passes = proposed(speculator, 0), speculator.drafters[0].passes
    with torch.inference_mode():
        passes.warm_up([CHAIN, RoundShape(4, 6)])
    assert proposed(speculator, 0) == before
    assert passes.ring.valid(0) == range(len(TOKENS))


def test_a_lane_given_to_another_starts_empty(backend):
    draft = ScriptedDraft({})
    speculator = speculator_of(backend, draft)
    prefill(backend, speculator, 0, [])
    speculator.restored(0, len(TOKENS), with_features=False)
    speculator.start(0)
    assert speculator.speculation(0).off_reason is None
    assert speculator.drafters[0].passes.ring.valid(0) == range(0)
