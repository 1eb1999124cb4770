"""A draw from unmasked candidates is that of the masked row, or undecided."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from luceasync.engine.sampling.choose import MaskedRanking, RankedRows, rank
from luceasync.engine.sampling.row import RowSampling
from luceasync.ranking.local import LocalLogits
from luceasync.ranking.logits import NO_TOKEN
from luceasync.request import Sampling
from tests.chosen import choose

ROWS = 20


def random_logits(rng: np.random.Generator, vocab: int) -> torch.Tensor:
    """Flat or peaked, with equal ones or without, some of them nothing."""
    logits = rng.standard_normal((ROWS, vocab)) * rng.choice([0.1, 0.5, 2.0, 6.0])
    if rng.random() < 0.4:
        logits = (logits * 4).round() / 4
    if rng.random() < 0.2:
        logits[:, rng.integers(0, vocab, vocab // 3)] = -np.inf
    if rng.random() < 0.6:
        logits[np.arange(ROWS), rng.integers(0, vocab, ROWS)] += rng.choice([3.0, 9.0])
    return torch.from_numpy(logits.astype(np.float32))


def random_rows(rng: np.random.Generator, vocab: int) -> list[RowSampling]:
    sampling = Sampling(
        temperature=rng.choice([1e-4, 0.1, 0.7, 1.0, 2.0, 50.0, 1e35]),
        top_k=int(rng.choice([0, 0, 0, 1, 2, 5, 20, vocab - 1, vocab, 10 * vocab])),
        top_p=rng.choice([1.0, 1.0, 1.0, 0.0, 0.3, 0.9, 0.999]),
        min_p=rng.choice([0.0, 0.0, 0.0, 0.01, 0.3, 1.0]),
    )
    places = rng.integers(0, 1000, ROWS).tolist()
    return [RowSampling(sampling, int(rng.integers(2**60)), place) for place in places]


def random_bits(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """bool [rows, 32 words], also of tokens that are not there."""
    return rng.random((ROWS, -(-vocab // 32) * 32)) < rng.choice([0.02, 0.3, 0.9, 0.99])


def what_told(ranked: RankedRows, index: int, row: RowSampling, bits: np.ndarray, word: np.ndarray):
    """How the token becomes known, and which it is, if that is before the device is asked again."""
    firm = ranked.unmasked(index, row.position)
    if firm != NO_TOKEN:
        assert firm == ranked.choose(index, row.position)[0]
        if bits[firm]:
            return "firm", firm
    behind = ranked.masked(index, row.position, word)
    return ("nothing", NO_TOKEN) if behind is None else ("candidates", behind)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_candidates", [16, 64, 1024])
def test_firm_tokens_and_candidates_say_what_a_mask_gives(num_candidates: int, seed: int):
    rng, told = np.random.default_rng(1000 * num_candidates + seed), Counter()
    for _ in range(25):
        vocab = int(rng.choice([60, 300, 3000]))
        logits, rows = LocalLogits(random_logits(rng, vocab)), random_rows(rng, vocab)
        bits = random_bits(rng, vocab)
        words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        masked = {i: replace(row, mask=words[i]) for i, row in enumerate(rows)}
        truth = choose(logits, [*masked.values()], num_candidates=num_candidates).token_ids
        ranked = rank(logits, rows, num_candidates=num_candidates)
        behind = MaskedRanking(logits, {i: masked[i] for i in range(0, ROWS, 3)}, num_candidates)
        for i, row in enumerate(rows):
            how, token = what_told(ranked, i, row, bits[i], words[i])
            assert how == "nothing" or token == truth[i], (how, row, vocab)
            assert ranked.masked(i, row.position, words[i]) in (None, truth[i]), (row, vocab)
            assert i not in behind or behind.choose(i, row.position) == truth[i], (row, vocab)
            told[how] += 1
    assert min(told[how] for how in ("firm", "candidates", "nothing")) > 20


def test_a_step_that_top_k_cuts_may_get_a_lower_id_behind_a_mask():
    logits = LocalLogits(torch.tensor([[0.0, 1.05, 0.0, 1.1, 1.2] + [-9.0] * 20]))
    row = RowSampling(Sampling(temperature=1.0, top_k=2), seed=0, position=0)
    low = next(row.position for row in positions(row) if choose(logits, [row]).token_ids == [3])
    refused = np.array([~(1 << 4)], np.int32)  # token 1 takes the place of token 4, below token 3
    masked = replace(row, position=low, mask=refused)
    assert choose(logits, [masked]).token_ids == [1]
    ranked = rank(logits, [row])
    assert ranked.unmasked(0, low) == NO_TOKEN and ranked.masked(0, low, refused) == 1


def positions(row: RowSampling) -> list[RowSampling]:
    return [replace(row, position=position) for position in range(100)]


def test_what_lets_few_through_is_decided_by_the_candidates_that_there_are():
    """All of it is among them, so that nothing is left to be asked for."""
    logits = torch.randn(50, 5000, generator=torch.Generator().manual_seed(1))
    rows = [RowSampling(Sampling(temperature=1.0), 0, position) for position in range(50)]
    ranked = rank(LocalLogits(logits), rows, num_candidates=64)
    for i, ids in enumerate(logits.topk(8).indices.numpy()):
        mask = np.zeros(-(-5000 // 32), np.uint32)
        np.bitwise_or.at(mask, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
        assert ranked.masked(i, i, mask.view(np.int32)) in ids.tolist()


def test_nothing_is_said_behind_a_mask_that_no_candidate_passes():
    ranked = rank(
        LocalLogits(torch.arange(3000.0)[None]), [RowSampling(Sampling(temperature=1.0), 0, 0)]
    )
    assert ranked.masked(0, 0, np.array([7] + [0] * 93, np.int32)) is None
