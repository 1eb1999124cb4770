"""Tokens of verified rows are distributed as plain sampling distributes them, whatever was
proposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from luceasync.cyext.copies import CopyIndex
from luceasync.engine.acceptance import Acceptance
from luceasync.engine.decoding import choose_next
from luceasync.engine.sampling.row import RowSampling, TokenCounts
from luceasync.engine.sequence import Generation
from luceasync.ranking.local import LocalLogits
from luceasync.ranking.proposals import Proposal, TreeProposer, propose_chain
from luceasync.request import Sampling
from luceasync.speculation.drafter import Anchor, LiveText
from luceasync.speculation.lookup import LookupDrafter, lookup_shapes
from tests.chosen import choose
from tests.engine.choices import make_choice

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


def likely_text(num_tokens: int = 120) -> tuple[int, ...]:
    """What the model might have said: a prompt that may be copied from."""
    generator, ids = torch.Generator().manual_seed(9), [START]
    for _ in range(num_tokens):
        shares = (NEXT[ids[-1]] / 0.5).softmax(-1)
        ids.append(int(torch.multinomial(shares, 1, generator=generator)))
    return tuple(ids)


TEXT = likely_text()


def generation_of(seed: int, sampling: Sampling, prompt: Sequence[int] = (START,)) -> Generation:
    """A choice that has said START and may say two tokens more."""
    prepared = make_choice(
        prompt,
        stream_id=seed,
        max_tokens=3,
        sampling=sampling,
        seed=seed,
        counts=TokenCounts(()),
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


def copied(drafter: LookupDrafter, texts: Mapping[int, LiveText], running: Sequence[Generation]):
    """What stands in each choice's text behind where its end stood before."""
    anchors = []
    for g in running:
        assert g.last_token is not None
        lane = g.prepared.stream_id % BATCH
        text = texts.setdefault(lane, LiveText(g.lease.sequence, CopyIndex()))
        anchors.append(Anchor(lane, len(text.ids) - 1, g.last_token, text))
    return drafter.propose(anchors, drafter.shapes[0])


def sample_pairs(
    sampling: Sampling, budget: int | None, *, copies: bool = False
) -> tuple[Tensor, float]:
    """How often each pair of tokens followed START, [vocab, vocab], and tokens a round."""
    counts, num_rounds = torch.zeros(VOCAB, VOCAB), 0
    for begin in range(0, NUM_SAMPLES, BATCH):
        seeds = range(FIRST_SEED + begin, FIRST_SEED + begin + BATCH)
        choices = [generation_of(seed, sampling, TEXT if copies else (START,)) for seed in seeds]
        drafter, texts = LookupDrafter(lookup_shapes([SLOTS + 1]), BATCH), {}
        said: dict[int, tuple[int, ...]] = {}
        running = choices
        while running:
            anchors = torch.tensor([g.last_token for g in running])
            if copies:
                proposal = copied(drafter, texts, running)
            else:
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
@pytest.mark.covered(1)
@pytest.mark.parametrize(
    ("budget", "copies"),
    [(None, False), (12, False), (None, True)],
    ids=["chain", "tree", "copies"],
)
@pytest.mark.parametrize("presence_penalty", [0.0, 0.7])
def test_thousands_of_samples_are_distributed_as_plain_sampling(budget, copies, presence_penalty):
    sampling = Sampling(temperature=0.8, presence_penalty=presence_penalty)
    found, tau = sample_pairs(sampling, budget, copies=copies)
    expected = exact_pairs(sampling) * NUM_SAMPLES
    assert expected.min() > 5 and found.sum() == NUM_SAMPLES
    chi_squared = ((found - expected) ** 2 / expected).sum()
    freedom = torch.tensor((VOCAB * VOCAB - 1) / 2)
    assert torch.special.gammaincc(freedom, chi_squared / 2) > 0.01
    assert tau > 1.1, "rows that were proposed are accepted here"


# --- guided choices ------------------------------------------------------------------------------


class OnlyEven:
    """A guide after which even tokens may come; counts for how many rows it made masks."""

    failure = None
    is_over = is_fitting = False
    num_masks = num_rounds = 0

    def mask(self) -> np.ndarray:
        self.num_masks += 1
        return np.full(94, 0x55555555, np.int32)  # of 3,000 tokens or fewer

    def masks(self, tokens, parents, first: int = 0) -> dict[int, np.ndarray]:
        return {row: self.mask() for row in range(first, len(tokens))}

    def allows(self, token: int) -> bool:
        return token % 2 == 0

    def foresee(self, tokens: list[int], *, is_missed: bool) -> int:
        self.num_rounds += 1
        return len(tokens) if all(map(self.allows, tokens)) else 0

    def consume(self, token: int) -> None:
        assert self.allows(token)

    def consume_all(self, tokens: list[int]) -> None:
        assert all(map(self.allows, tokens))

    def catch_up(self) -> None:
        """It is not behind."""

    def missed(self, token: int) -> None:
        """Whatever."""


class Asked(LocalLogits):
    """Logits that know how often they were ranked."""

    num_times = 0

    def rank(self, wanted, proposal=None):
        self.num_times += 1
        return super().rank(wanted, proposal)


def guided(seed: int, sampling: Sampling) -> tuple[Generation, OnlyEven]:
    guide = OnlyEven()
    generation = generation_of(seed, sampling)
    prepared = replace(generation.prepared, guide=guide, max_tokens=12, counts=None)
    generation = Generation(prepared)
    generation.append(START, None)
    return generation, guide


def said_plainly(seed: int, sampling: Sampling, after: Tensor) -> list[int]:
    """Token by token, each of them behind a mask."""
    said, mask = [START], OnlyEven().mask()
    while len(said) < 12:
        row = RowSampling(sampling, seed, len(said) + 1, mask=mask)
        said += choose(LocalLogits(after[said[-1]][None]), [row]).token_ids
    return said


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_p=0.8),
    Sampling(temperature=1.0, top_k=2),
    Sampling(temperature=1.0, top_k=2, min_p=0.1),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("budget", [None, 12], ids=["chain", "tree"])
@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_a_guided_choice_says_in_rounds_what_masks_would_give_row_by_row(sampling, budget, spread):
    after = NEXT * spread
    choices = [guided(seed, sampling) for seed in range(40)]
    running = [generation for generation, _ in choices]
    number = 0
    while running:
        number += 1
        anchors = torch.tensor([g.last_token for g in running])
        proposal = propose(anchors, number, budget)
        acceptance = Acceptance(running)
        assert acceptance.fit(proposal, SLOTS) is proposal
        acceptance(proposal, LocalLogits(after[proposal.tokens]))
        running = [g for g in running if not g.has_ended]
    for generation, _ in choices:
        seed = generation.prepared.seed
        assert list(generation.shown().token_ids) == said_plainly(seed, sampling, after)


def one_round(best: list[int], proposed: list[int]) -> tuple[list[int], OnlyEven, int]:
    """What a round says whose rows say these tokens almost surely, the guide, and how often the
    logits were ranked.
    """
    generation, guide = guided(0, Sampling(temperature=1.0))
    logits = torch.zeros(1, len(best), VOCAB)
    logits[0, range(len(best)), best] = 60.0
    asked = Asked(logits)
    proposal = Proposal(torch.tensor([[START, *proposed]]), None)
    [path] = Acceptance([generation])(proposal, asked)
    said = list(generation.lease.sequence)[2:]
    assert len(path) == len(said)
    return said, guide, asked.num_times


def test_a_round_of_firm_tokens_that_may_come_is_asked_for_once_and_needs_no_mask():
    said, guide, num_ranked = one_round([2, 4, 2], [2, 4])
    assert said == [2, 4, 2]
    assert (guide.num_rounds, guide.num_masks, num_ranked) == (1, 0, 1)


def test_a_drawn_token_that_may_not_come_is_drawn_again_of_what_is_there():
    said, guide, num_ranked = one_round([2, 3, 2], [2, 4])
    assert said[0] == 2 and said[1] in (0, 2, 4)
    assert (guide.num_rounds, guide.num_masks, num_ranked) == (1, 1, 1)


def test_what_is_firm_before_a_row_that_is_not_is_said_in_one_go():
    generation, guide = guided(0, Sampling(temperature=1.0))
    logits = torch.zeros(1, 3, VOCAB)
    logits[0, 0, 2] = 60.0
    proposal = Proposal(torch.tensor([[START, 2, 1]]), None)
    Acceptance([generation])(proposal, LocalLogits(logits))
    assert guide.num_rounds == 1 and guide.num_masks == 1
    assert list(generation.lease.sequence)[2] == 2


@pytest.mark.parametrize("is_alone", [True, False])
def test_where_candidates_do_not_decide_the_device_is_asked_once_more(is_alone: bool):
    """Flat rows of a large vocabulary, in a round and in a plain step."""
    logits = torch.randn(1, 3, 3000, generator=torch.Generator().manual_seed(2))
    sampling = Sampling(temperature=1.5)
    mask = OnlyEven().mask()
    rows = [RowSampling(sampling, 0, 2 + i, mask=mask) for i in range(3)]
    truth = choose(LocalLogits(logits[0]), rows).token_ids
    generation, _ = guided(0, sampling)
    asked = Asked(logits[:, 0] if is_alone else logits)
    if is_alone:
        choose_next([generation], asked)
    else:
        Acceptance([generation])(Proposal(torch.tensor([[START, *truth[:2]]]), None), asked)
    assert list(generation.lease.sequence)[2:] == truth[: 1 if is_alone else 3]
    assert asked.num_times == 2
