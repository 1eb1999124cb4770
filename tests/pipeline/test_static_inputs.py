"""Inputs of captured passes: what is not copied, and when parameters are taken; on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from luceasync.models.pass_rows import NO_LANE
from luceasync.models.trees import ROOT
from luceasync.pipeline.graph import TreeStep
from luceasync.pipeline.passes import Batch, PassInput
from luceasync.pipeline.static_inputs import (
    FedTokens,
    Feedback,
    KnownInputs,
    StaticInputs,
    TreeInputs,
    feed_best,
    place_numbers,
)

CPU = torch.device("cpu")
NO_TOKEN = -1


def at(lanes: tuple[int, ...], begins: tuple[int, ...]) -> Batch:
    return Batch(lanes, begins, 1)


@dataclass
class Step:
    """A step of two entries whose best token is its input plus one."""

    inputs: StaticInputs = field(default_factory=lambda: StaticInputs(2, CPU, None))
    feedback: Feedback = field(default_factory=lambda: Feedback(2, CPU))
    num_copies: int = 0

    def run(self) -> FedTokens:
        """Run it on its inputs."""
        given, place, found = self.inputs.given, self.inputs.place, self.feedback.found
        logits = torch.nn.functional.one_hot(given[:, 0] + 1, 100).float()
        feed_best(logits, given, place, found, NO_TOKEN)
        self.fed = self.feedback.send()
        self.inputs.fed(self.fed)
        return self.fed

    def __call__(self, batch: Batch, given: PassInput) -> list[list[int]]:
        """Tokens, lanes and positions that the pass reads."""
        self.inputs._staged.fill_(255)
        self.inputs.set(batch, given)
        self.num_copies += not self.inputs._staged.eq(255).all()
        seen = [self.inputs.given[:, 0].tolist(), *self.inputs.place.tolist()]
        self.run()
        return seen


def test_nothing_is_copied_for_a_step_that_continues_where_it_fed_itself():
    step = Step()
    assert step(at((3, 1), (10, 20)), (5, 6)) == [[5, 6], [3, 1], [10, 20]]
    for more in range(1, 4):
        assert step.fed.fetch()[:, 0].tolist() == [5 + more, 6 + more]
        seen = step(at((3, 1), (10 + more, 20 + more)), [5 + more, 6 + more])
        assert seen == [[5 + more, 6 + more], [3, 1], [10 + more, 20 + more]]
    assert step.num_copies == 1


@pytest.mark.parametrize(
    ("lanes", "begins", "tokens"),
    [
        ((3, 1), (11, 21), (6, 8)),  # another token than the best one
        ((3, 1), (10, 20), (6, 7)),  # the same positions again
        ((3, 1), (11, 1), (6, 7)),  # the lane has another sequence
        ((1, 3), (11, 21), (6, 7)),
        ((3, NO_LANE), (11, 0), (6, 0)),
    ],
)
def test_any_other_input_is_copied(lanes, begins, tokens):
    step = Step()
    step(at((3, 1), (10, 20)), (5, 6))
    step.fed.fetch()
    assert step(at(lanes, begins), tokens) == [[*tokens], [*lanes], [*begins]]
    assert step.num_copies == 2


def test_tokens_not_yet_fetched_are_copied():
    step = Step()
    step(at((3, 1), (10, 20)), (5, 6))
    assert step(at((3, 1), (11, 21)), (6, 7)) == [[6, 7], [3, 1], [11, 21]]


def test_a_padding_entry_keeps_its_input():
    step = Step()
    for more in range(4):
        seen = step(at((3, NO_LANE), (10 + more, 0)), (5 + more, 0))
        assert seen == [[5 + more, 0], [3, NO_LANE], [10 + more, 0]]
        assert step.fed.fetch()[:, 0].tolist() == [6 + more, 0]
    assert step.num_copies == 1


def test_a_step_that_feeds_itself_keeps_the_tokens_of_the_one_before():
    step = Step()
    step(at((3, 1), (10, 20)), (5, 6))
    first, second = step.fed, step.run()
    assert (
        first.tokens is None and first.fetch()[:, 0].tolist() == [6, 7] and first.tokens == (6, 7)
    )
    assert second.tokens is None and second.fetch()[:, 0].tolist() == [7, 8]
    assert step(at((3, 1), (12, 22)), (7, 8)) == [[7, 8], [3, 1], [12, 22]]
    assert step.num_copies == 1
    assert second.fetch()[:, 0].tolist() == [7, 8] and step.fed.fetch()[:, 0].tolist() == [8, 9]


def test_after_a_step_that_was_not_wanted_the_place_is_copied_again():
    step = Step()
    step(at((3, 1), (10, 20)), (5, 6))
    first = step.fed
    step.run()
    first.fetch()
    assert step(at((3, 1), (11, 21)), (6, 7)) == [[6, 7], [3, 1], [11, 21]]
    assert step.num_copies == 2


def test_no_token_is_found_but_not_fed():
    step = Step()
    step(at((3, 1), (10, 20)), (5, 6))
    logits = torch.tensor([[0.0, float("nan")], [0.0, 1.0]])
    feed_best(logits, step.inputs.given, step.inputs.place, step.feedback.found, NO_TOKEN)
    assert step.inputs.given.tolist() == [[0], [1]], "an embedding has a row of each"
    assert step.feedback.found.tolist() == [NO_TOKEN, 1]


def test_new_inputs_are_of_no_lane_and_a_run_before_the_first_step_leaves_them_so():
    step = Step()
    step.run()
    assert step.inputs.given.tolist() == [[0], [0]]
    assert step.inputs.place.tolist() == [[NO_LANE] * 2, [0, 0]]


def test_a_place_set_before_its_tokens_is_right_with_any():
    inputs = StaticInputs(2, CPU, None)
    for batch, tokens in ((at((3, 1), (10, 20)), (5, 6)), (at((3, 1), (11, 21)), (5, 6))):
        inputs.set_place(batch)
        assert inputs.place.tolist() == [[*batch.lanes], [*batch.begins]]
        inputs.set(batch, tokens)
        assert inputs.given[:, 0].tolist() == [*tokens]


def test_an_activation_is_always_copied():
    inputs = StaticInputs(2, CPU, (4, torch.float32))
    for seed in range(2):
        x = torch.full((2, 1, 4), float(seed))
        inputs.set(at((0, 1), (7, 8)), x)
        assert torch.equal(inputs.given, x) and inputs.place.tolist() == [[0, 1], [7, 8]]


def test_tokens_may_come_as_a_tensor():
    inputs = StaticInputs(2, CPU, None)
    tokens = torch.arange(2).view(2, 1)
    inputs.set(at((0, 1), (7, 8)), tokens)
    assert torch.equal(inputs.given, tokens) and inputs.place.tolist() == [[0, 1], [7, 8]]


def test_nothing_is_known_at_first():
    held, batch = KnownInputs(), at((0,), (0,))
    assert not held.is_at(batch) and not held.has(batch, (0,))
    held.put(batch)
    assert held.is_at(batch) and not held.has(batch, (0,))
    held.give([0])
    assert held.has(batch, (0,))


def inputs() -> TreeInputs:
    return TreeInputs(2, 3, CPU, None)


def test_new_inputs_are_of_no_lane_and_keep_nothing() -> None:
    new = inputs()
    assert new.lanes.tolist() == [NO_LANE] * 2 and new.counts.tolist() == [0, 0]
    assert new.given.shape == (2, 3) and new.given.dtype == torch.int64
    assert TreeInputs(2, 3, CPU, (8, torch.float32)).given.shape == (2, 3, 8)


def test_a_place_is_there_when_the_pass_takes_it() -> None:
    trees = inputs()
    trees.place.put_numbers(place_numbers(Batch((5, NO_LANE), (70, 0), 3)))
    assert trees.lanes.tolist() == [NO_LANE] * 2
    trees.place.take()
    assert trees.lanes.tolist() == [5, NO_LANE] and trees.begins.tolist() == [70, 0]


def test_rows_hang_on_each_other_again_after_a_tree() -> None:
    trees, line = inputs(), [[ROOT, 0, 1]] * 2
    assert trees.parents.tolist() == line
    for tree in ([[ROOT, 0, 0], [ROOT, 0, 1]], [[ROOT, 0, 1], [ROOT, 0, 0]]):
        trees.set_parents(torch.tensor(tree, dtype=torch.int32))
        assert trees.parents.tolist() == tree
    for _ in range(2):
        trees.set_parents(None)
        assert trees.parents.tolist() == line


class Captured:
    """A pass that records its parameters."""

    def __init__(self, inputs: TreeInputs) -> None:
        self.inputs = inputs
        self.seen: list[list[list[int]]] = []

    def replay(self) -> None:
        self.inputs.paths.take()
        both = zip(self.inputs.rows.tolist(), self.inputs.counts.tolist(), strict=True)
        self.seen.append([rows[:count] for rows, count in both])


def test_a_commit_sees_the_paths_that_it_was_asked_for() -> None:
    trees = inputs()
    committed = Captured(trees)
    step = TreeStep(trees, committed, {}, committed)
    paths = [[[0, 2], [0]], [[], [0, 1, 2]], [[], []]]
    for each in paths:
        step.commit(each)
    assert committed.seen == paths
