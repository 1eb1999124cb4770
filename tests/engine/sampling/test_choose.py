"""The sampler against its slow truth, and what must not change a row's tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.engine.sampling import choose as sampler
from luceasync.engine.sampling.draw import uniform
from luceasync.engine.sampling.row import RowSampling, TokenCounts
from luceasync.ranking.local import LocalLogits
from luceasync.ranking.logits import NO_TOKEN
from luceasync.ranking.proposals import Proposal
from luceasync.request import Sampling
from tests import chosen as chosen_tokens
from tests.reference import sampler as slow

VOCAB = 60
PROMPT_IDS = (3, 7, 7, 11)
GENERATED_IDS = (7, 20, 20, 20, 5)


def random_logits(
    rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 2.0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * spread


def choose(logits: torch.Tensor, rows, **how) -> chosen_tokens.ChosenTokens:
    return chosen_tokens.choose(LocalLogits(logits), rows, **how)


def rank(logits: torch.Tensor, rows, **how) -> sampler.RankedRows:
    return sampler.rank(LocalLogits(logits), rows, **how)


def row_of(sampling: Sampling, seed: int = 0, position: int = 0, **extra) -> RowSampling:
    counts = TokenCounts(PROMPT_IDS)
    for token_id in GENERATED_IDS:
        counts.add(token_id)
    return RowSampling(sampling, seed, position, counts, **extra)


def truth(logits: torch.Tensor, row: RowSampling) -> int:
    edited = slow.edit_logits(logits.float().tolist(), row.sampling, PROMPT_IDS, GENERATED_IDS)
    return slow.choose_token(edited, row.sampling, uniform(row.seed, row.position))


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 2, 7, VOCAB, 10 * VOCAB]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 3.0]), max_size=3
    ),
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(samplings, st.integers(0, 2**64), st.integers(0, 1000), st.sampled_from([1, 4, 1024]))
def test_any_parameters_give_the_token_of_the_slow_truth(sampling, seed, position, num_candidates):
    logits = random_logits(1, seed=seed % 97)
    row = row_of(sampling, seed, position)
    chosen = choose(logits, [row], num_candidates=num_candidates)
    assert chosen.token_ids == [truth(logits[0], row)]


@settings(max_examples=150, deadline=None)
@given(samplings, st.integers(0, 2**32), st.integers(1, 80))
def test_few_candidates_and_a_full_sort_choose_the_same(sampling, seed, num_candidates):
    logits = random_logits(1, vocab=3000, seed=seed % 89, spread=1.0)
    row = row_of(sampling, seed)
    few, sorted_whole = (choose(logits, [row], num_candidates=n) for n in (num_candidates, 2999))
    assert few == sorted_whole


@settings(max_examples=150, deadline=None)
@given(samplings, st.integers(0, 2**32), st.sampled_from([1, 3, 30]), st.booleans())
def test_a_draw_that_looks_at_the_first_candidates_gives_what_all_give(
    sampling, seed, num_first, is_coarse
):
    logits = random_logits(1, vocab=3000, seed=seed % 89, spread=1.0)
    logits = logits.round() if is_coarse else logits
    row = row_of(sampling, seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampler, "NUM_FIRST", num_first)
        few = choose(logits, [row])
        patched.setattr(sampler, "NUM_FIRST", 3000)
        assert few == choose(logits, [row])


@pytest.mark.parametrize("top_k", [90, 150, 200])  # within the highest third, and beyond it
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_equal_logits_are_ranked_by_id_in_every_dtype(dtype, top_k):
    logits = (torch.arange(500) % 3).to(dtype).repeat(50, 1)
    rows = [row_of(Sampling(temperature=1.0, top_k=top_k), seed) for seed in range(50)]
    assert choose(logits, rows).token_ids == [truth(logits[0], row) for row in rows]


def mixed_rows() -> list[RowSampling]:
    samplings = [
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=0.8, top_p=0.9),
        Sampling(temperature=0.7, top_k=20, top_p=0.8),
        Sampling(temperature=1.2, min_p=0.05, repetition_penalty=1.2),
        Sampling(temperature=1.0, top_k=1900, logit_bias={5: 4.0}),
        Sampling(presence_penalty=1.0, frequency_penalty=0.5),
    ]
    return [row_of(s, seed=i, position=40 + i) for i, s in enumerate(samplings)]


@pytest.mark.parametrize("top_logprobs", [None, 3])
def test_a_row_alone_is_the_row_in_a_batch(top_logprobs):
    rows = [replace(row, top_logprobs=top_logprobs) for row in mixed_rows()]
    for seed in range(20):
        logits = random_logits(len(rows), vocab=2011, seed=seed)
        together = choose(logits, rows)
        for i, row in enumerate(rows):
            alone = choose(logits[i : i + 1], [row])
            assert alone.token_ids == together.token_ids[i : i + 1]
            assert alone.logprobs == together.logprobs[i : i + 1]


def test_the_logits_given_are_left_as_they_were():
    logits = random_logits(7, vocab=2011)
    before = logits.clone()
    choose(logits, mixed_rows())
    assert torch.equal(logits, before)


def test_plain_greedy_rows_take_the_lowest_id_among_the_highest():
    logits = torch.zeros(3, VOCAB, dtype=torch.bfloat16)
    logits[1, [9, 4]] = 1.0
    assert choose(logits, [RowSampling(Sampling(), 0, 0)] * 3).token_ids == [0, 4, 0]


def test_greedy_rows_obey_penalties_and_bias():
    logits = torch.zeros(2, VOCAB)
    logits[:, 20], logits[:, 30] = 2.0, 1.0
    rows = [row_of(Sampling(presence_penalty=1.5)), row_of(Sampling(logit_bias={31: 100.0}))]
    assert choose(logits, rows).token_ids == [30, 31]


def test_a_banned_token_is_never_drawn():
    logits = torch.tensor([[0.0, -math.inf, -math.inf, 1.0, -math.inf]]).repeat(200, 1)
    rows = [RowSampling(Sampling(temperature=2.0), seed, 0) for seed in range(200)]
    assert set(choose(logits, rows).token_ids) == {0, 3}
    assert set(choose(logits, rows, num_candidates=3).token_ids) == {0, 3}


def test_logprobs_are_of_the_raw_logits_whatever_was_drawn():
    logits = random_logits(1)
    row = row_of(Sampling(temperature=3.0, top_k=5, logit_bias={8: 50.0}), top_logprobs=4)
    chosen = choose(logits, [row])
    expected = slow.log_softmax(logits[0].tolist())
    best = sorted(range(VOCAB), key=lambda token: -expected[token])[:4]
    assert chosen.token_ids == [8]
    assert chosen.logprobs[0].chosen == pytest.approx(expected[8], abs=1e-5)
    assert [token for token, _ in chosen.logprobs[0].top] == best
    assert [x for _, x in chosen.logprobs[0].top] == pytest.approx(
        [expected[token] for token in best], abs=1e-5
    )


def test_logprobs_are_given_to_the_rows_that_asked():
    rows = [RowSampling(Sampling(), 0, 0, top_logprobs=n) for n in (None, 0, 2)]
    found = choose(random_logits(3), rows).logprobs
    assert found[0] is None
    assert [len(x.top) for x in found[1:]] == [0, 2]


def test_logprobs_reach_tokens_that_only_a_full_sort_finds():
    logits = random_logits(40, vocab=3000, spread=0.1)
    rows = [RowSampling(Sampling(temperature=1.0), s, 0, top_logprobs=0) for s in range(40)]
    found = choose(logits, rows, num_candidates=8)
    expected = logits.log_softmax(-1)
    for i, (token_id, logprob) in enumerate(zip(found.token_ids, found.logprobs, strict=True)):
        assert logprob.chosen == expected[i, token_id].item()


def test_equal_logprobs_are_listed_by_id():
    row = RowSampling(Sampling(), 0, 0, top_logprobs=5)
    found = choose(torch.zeros(1, 4000, dtype=torch.bfloat16), [row]).logprobs[0]
    assert [token for token, _ in found.top] == [0, 1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("num_candidates", [3, 1024])
def test_draws_follow_the_distribution(num_candidates):
    num_draws, logits = 20_000, torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, 1.5, -3.0, 0.2]])
    row = RowSampling(Sampling(temperature=0.9), 1234, 0)
    rows = [replace(row, position=position) for position in range(num_draws)]
    drawn = choose(logits.expand(num_draws, -1), rows, num_candidates=num_candidates).token_ids
    expected = num_draws * (logits[0].double() / 0.9).softmax(-1).numpy()
    chi_squared = ((np.bincount(drawn, minlength=8) - expected) ** 2 / expected).sum()
    assert chi_squared < 24.3  # 7 degrees of freedom, p = 0.001


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_chooses_the_tokens_of_the_cpu(dtype):
    rows = [replace(row, top_logprobs=5) for row in mixed_rows()]
    for seed in range(20):
        logits = random_logits(len(rows), vocab=50_000, seed=seed).to(dtype)
        on_cpu, on_gpu = choose(logits, rows), choose(logits.cuda(), rows)
        assert on_gpu.token_ids == on_cpu.token_ids
        for ours, theirs in zip(on_gpu.logprobs, on_cpu.logprobs, strict=True):
            assert ours.chosen == pytest.approx(theirs.chosen, abs=1e-5)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("only_greedy", [True, False])
def test_a_gpu_is_waited_for_once(only_greedy):
    logits = random_logits(7, vocab=50_000, spread=6.0).cuda()
    rows = [RowSampling(Sampling(), 0, 0)] * 7 if only_greedy else mixed_rows()
    choose(logits, rows)
    with pytest.warns(UserWarning) as warned:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            choose(logits, rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing CUDA operation" in str(w.message) for w in warned) == 1


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=5)], ids=str
)
@pytest.mark.parametrize("top_logprobs", [None, 2])
def test_logits_that_are_no_numbers_give_no_token(sampling: Sampling, top_logprobs: int | None):
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    logits[1, 7] = float("nan")
    rows = [RowSampling(sampling, 1, i, top_logprobs=top_logprobs) for i in range(3)]
    choice = choose(logits, rows)
    assert [token == NO_TOKEN for token in choice.token_ids] == [False, True, False]
    assert choice.logprobs[1] is None


# --- rows that are chosen one by one --------------------------------------------------------------


@pytest.mark.parametrize("top_logprobs", [None, 3])
def test_a_ranked_row_chosen_at_a_position_is_the_row_that_asked_for_it(top_logprobs):
    rows = [replace(row, top_logprobs=top_logprobs) for row in mixed_rows()]
    logits = random_logits(len(rows), vocab=2011, seed=5)
    ranked = rank(logits, [replace(row, position=0) for row in rows])
    for i, row in reversed(list(enumerate(rows))):
        alone = choose(logits[i : i + 1], [row])
        assert ranked.choose(i, row.position) == (alone.token_ids[0], alone.logprobs[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_verified_proposal_comes_to_the_host_with_its_rows(temperature):
    parents = torch.tensor([[-1, 0]], dtype=torch.int32)
    proposal = Proposal(torch.tensor([[2**40, 7]]), parents)
    rows = [row_of(Sampling(temperature=temperature))] * 2
    ranked = rank(random_logits(2), rows, proposal=proposal)
    assert ranked.proposal.tolist() == [[2**40, -1], [7, 0]]


@pytest.mark.slow
def test_rounding_of_the_logits_does_not_change_what_a_seed_draws():
    """A flat distribution, where neighbours in the ranking are as near as rounding is large."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, 8192, generator=generator)
    rounded = logits * (1 + 1e-6 * torch.randn(logits.shape, generator=generator))
    assert (logits.argsort(-1) != rounded.argsort(-1)).any()
    hot = Sampling(temperature=2.0)
    for seed in range(15):
        rows = [RowSampling(hot, seed, position) for position in range(40)]
        assert choose(logits, rows).token_ids == choose(rounded, rows).token_ids
