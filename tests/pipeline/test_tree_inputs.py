"""What a captured pass over trees of rows is told, and when it takes it; on a CPU."""

from __future__ import annotations

import torch

from luceasync.models.pass_rows import NO_LANE
from luceasync.models.trees import ROOT
from luceasync.pipeline.graph import TreeStep
from luceasync.pipeline.passes import Batch
from luceasync.pipeline.static_inputs import TreeInputs, place_numbers

CPU = torch.device("cpu")


def inputs() -> TreeInputs:
    return TreeInputs(2, 3, CPU, None)


def test_new_inputs_are_of_no_lane_and_keep_nothing() -> None:
    new = inputs()
    assert new.lanes.tolist() == [NO_LANE] * 2 and new.counts.tolist() == [0, 0]
    assert new.given.shape == (2, 3) and new.given.dtype == torch.int64
    assert TreeInputs(2, 3, CPU, (8, torch.float32)).given.shape == (2, 3, 8)


def test_a_place_is_there_when_the_pass_takes_it() -> None:
    told = inputs()
    told.place.put(place_numbers(Batch((5, NO_LANE), (70, 0), 3)))
    assert told.lanes.tolist() == [NO_LANE] * 2
    told.place.take()
    assert told.lanes.tolist() == [5, NO_LANE] and told.begins.tolist() == [70, 0]


def test_rows_hang_on_each_other_again_after_a_tree() -> None:
    told, line = inputs(), [[ROOT, 0, 1]] * 2
    assert told.parents.tolist() == line
    for tree in ([[ROOT, 0, 0], [ROOT, 0, 1]], [[ROOT, 0, 1], [ROOT, 0, 0]]):
        told.set_parents(torch.tensor(tree, dtype=torch.int32))
        assert told.parents.tolist() == tree
    for _ in range(2):
        told.set_parents(None)
        assert told.parents.tolist() == line


class Captured:
    """A pass that looks at what it has been told."""

    def __init__(self, told: TreeInputs) -> None:
        self.told = told
        self.seen: list[list[list[int]]] = []

    def replay(self) -> None:
        self.told.paths.take()
        both = zip(self.told.rows.tolist(), self.told.counts.tolist(), strict=True)
        self.seen.append([rows[:count] for rows, count in both])


def test_a_commit_sees_the_paths_that_it_was_asked_for() -> None:
    told = inputs()
    committed = Captured(told)
    step = TreeStep(told, committed, {}, committed)
    paths = [[[0, 2], [0]], [[], [0, 1, 2]], [[], []]]
    for each in paths:
        step.commit(each)
    assert committed.seen == paths
