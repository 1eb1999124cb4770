"""Tokens of verified rows are distributed as plain sampling distributes them, whatever was
proposed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from luceasync.engine.acceptance import Acceptance
from luceasync.engine.generation import Generation
from luceasync.engine.prepared import Prepared
from luceasync.engine.sampling.row import TokenCounts
from luceasync.ranking.local import LocalLogits
from luceasync.ranking.proposals import Proposal, TreeProposer, propose_chain
from luceasync.request import Sampling

VOCAB, START = 5, 0
NUM_SAMPLES, BATCH = 5_000, 2_500  # the rarest pair is expected five times
FIRST_SEED = 10_000
SLOTS = 3
CPU = torch.device("cpu")
NEXT = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))  # logits by last token


class NoText:
    """A detokenizer that shows nothing."""

    has_stops = stopped = False
    stopped_by = None

    def push(self, token: int):
        return NoText

    text = ""

    def flush(self) -> str:
        return ""


def generation_of(seed: int, sampling: Sampling) -> Generation:
    """A choice that has said START and may say two tokens more."""
    prepared = Prepared(
        stream_id=seed,
        index=0,
        prompt_ids=(START,),
        max_tokens=3,
        stop_ids=frozenset(),
        sampling=sampling,
        seed=seed,
        counts=TokenCounts(()),
        top_logprobs=None,
        tokenizer=None,
        detokenizer=NoText(),
    )
    generation = Generation(prepared)
    generation.append(START, None)
    return generation


def propose(anchors: Tensor, seed: int, budget: int | None) -> Proposal:
    """By a draft that knows the model a little."""
    noise = torch.randn(len(anchors), SLOTS, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits = NEXT[anchors][:, None] + noise
    if budget is None:
        return propose_chain(anchors, logits)
    return TreeProposer(budget, VOCAB, CPU)(anchors, logits)


def sample_pairs(sampling: Sampling, budget: int | None) -> tuple[Tensor, float]:
    """How often each pair of tokens followed START, [vocab, vocab], and tokens a round."""
    counts, num_rounds = torch.zeros(VOCAB, VOCAB), 0
    for begin in range(0, NUM_SAMPLES, BATCH):
        seeds = range(FIRST_SEED + begin, FIRST_SEED + begin + BATCH)
        choices = [generation_of(seed, sampling) for seed in seeds]
        said: dict[int, tuple[int, ...]] = {}
        running = choices
        while running:
            anchors = torch.tensor([g.last_token for g in running])
            proposal = propose(anchors, begin + num_rounds, budget)
            acceptance = Acceptance(running)
            acceptance(proposal, LocalLogits(NEXT[proposal.tokens]))
            num_rounds += len(running)
            for g in running:
                if g.has_ended:
                    said[g.prepared.stream_id] = g.shown().token_ids
            running = [g for g in running if g.prepared.stream_id not in said]
        for ids in said.values():
            counts[ids[-2], ids[-1]] += 1
    return counts, 2 * NUM_SAMPLES / num_rounds


def exact_pairs(sampling: Sampling) -> Tensor:
    """Probabilities of plain sampling: what was said takes the presence penalty."""
    pairs = torch.zeros(VOCAB, VOCAB)

    def after(said: list[int]) -> Tensor:
        logits = NEXT[said[-1]].clone()
        logits[list(set(said))] -= sampling.presence_penalty
        return (logits / sampling.temperature).softmax(-1)

    for first in range(VOCAB):
        pairs[first] = after([START])[first] * after([START, first])
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, 12], ids=["chain", "tree"])
@pytest.mark.parametrize("presence_penalty", [0.0, 0.7])
def test_thousands_of_samples_are_distributed_as_plain_sampling(budget, presence_penalty):
    sampling = Sampling(temperature=0.8, presence_penalty=presence_penalty)
    found, tau = sample_pairs(sampling, budget)
    expected = exact_pairs(sampling) * NUM_SAMPLES
    assert expected.min() > 5 and found.sum() == NUM_SAMPLES
    chi_squared = ((found - expected) ** 2 / expected).sum()
    freedom = torch.tensor((VOCAB * VOCAB - 1) / 2)
    assert torch.special.gammaincc(freedom, chi_squared / 2) > 0.01
    assert tau > 1.1, "rows that were proposed are accepted here"
