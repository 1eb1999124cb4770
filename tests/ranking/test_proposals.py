"""Trees built on the device are those of the published heap, and whatever comes they are trees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from luceasync.models.trees import ROOT
from luceasync.ranking.proposals import Proposal, TreeProposer, propose_chain
from tests.reference import ddtree

CPU = torch.device("cpu")


def random_logits(entries: int, slots: int, vocab: int, seed: int, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(entries, slots, vocab, generator=generator) * spread


def propose(logits: Tensor, budget: int) -> Proposal:
    anchors = torch.arange(logits.shape[0]) + 900
    return TreeProposer(budget, logits.shape[2], CPU)(anchors, logits)


def paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """The tokens from the root's child to each row."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]


def probabilities(logits: Tensor, found: list[tuple[int, ...]]) -> list[float]:
    logprobs = logits.double().log_softmax(-1)
    return [sum(float(logprobs[d, t]) for d, t in enumerate(path)) for path in found]


shapes = st.tuples(st.integers(1, 3), st.integers(1, 7), st.sampled_from([5, 40, 300]))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(shapes, st.integers(1, 70), st.integers(0, 10**6), st.sampled_from([0.3, 3.0, 20.0]))
def test_the_tree_expects_what_the_heap_expects(shape, budget, seed, spread):
    logits = random_logits(*shape, seed, spread)
    proposal = propose(logits, budget)
    for entry in range(shape[0]):
        logprobs = logits[entry].log_softmax(-1)
        _, _, sums = ddtree.best_first(logprobs.tolist(), budget)
        found = paths(proposal.tokens[entry].tolist(), proposal.parents[entry].tolist())
        distinct = [0.0, *probabilities(logits[entry], sorted(set(found)))]
        assert ddtree.expected_length(distinct) == pytest.approx(
            ddtree.expected_length(sums), rel=1e-5
        )


@settings(max_examples=80, deadline=None)
@given(shapes, st.integers(1, 70), st.integers(0, 10**6), st.sampled_from([0.0, 3.0, 200.0]))
def test_parents_come_first_even_among_equals(shape, budget, seed, spread):
    """Spread 0: all equal; 200: probabilities of 1 and of 0, where a child ties its parent."""
    proposal = propose(random_logits(*shape, seed, spread), budget)
    assert proposal.tokens.shape == proposal.parents.shape == (shape[0], budget + 1)
    assert (proposal.parents[:, 0] == ROOT).all()
    rows = torch.arange(1, budget + 1)
    assert (proposal.parents[:, 1:] >= 0).all() and (proposal.parents[:, 1:] < rows).all()


def test_no_path_is_proposed_twice_while_there_are_others():
    proposal = propose(random_logits(4, 6, 300, 1), 60)
    for tokens, parents in zip(proposal.tokens.tolist(), proposal.parents.tolist(), strict=True):
        assert len(set(paths(tokens, parents))) == 60


def test_the_first_rows_of_a_bigger_tree_are_the_smaller_tree():
    logits = random_logits(2, 5, 300, 2)
    small, large = propose(logits, 8), propose(logits, 22)
    assert torch.equal(small.tokens, large.tokens[:, :9])
    assert torch.equal(small.parents, large.parents[:, :9])


def test_a_draft_whose_logits_are_no_numbers_proposes_a_tree_all_the_same():
    logits = random_logits(2, 4, 50, 3)
    logits[0] = torch.nan
    logits[1, 2, 5] = torch.inf
    proposal = propose(logits, 12)
    assert ((proposal.tokens[:, 1:] >= 0) & (proposal.tokens[:, 1:] < 50)).all()
    assert (proposal.parents[:, 1:] < torch.arange(1, 13)).all()
    assert (proposal.parents[:, 1:] >= 0).all()


def test_row_0_is_the_anchor():
    logits = random_logits(3, 4, 50, 4)
    anchors = torch.tensor([7, 8, 9])
    for proposal in (TreeProposer(5, 50, CPU)(anchors, logits), propose_chain(anchors, logits)):
        assert proposal.tokens[:, 0].tolist() == [7, 8, 9]


def test_a_chain_takes_the_best_of_each_slot():
    proposal = propose_chain(torch.tensor([1]), torch.eye(4, 9)[None])
    assert proposal.tokens.tolist() == [[1, 0, 1, 2, 3]]
    assert proposal.parents is None
