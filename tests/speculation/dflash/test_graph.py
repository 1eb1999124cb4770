"""A pass as a graph gives what it gives operation by operation, and writes what it writes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from luceasync.pipeline.capture import Capture
from luceasync.ranking.proposals import TreeProposer
from luceasync.speculation.dflash.graph import NUM_EAGER_CALLS, EagerRunner, GraphRunner

NUM_LANES, VOCAB = 4, 300


class Memory:
    """A pass that proposes trees from what is in memory, and writes to it."""

    def __init__(self, device: torch.device) -> None:
        self.rows = torch.zeros(NUM_LANES, VOCAB, device=device)
        self.propose = TreeProposer(12, VOCAB, device)

    def work(self, lanes: Tensor, logits: Tensor):
        self.rows[lanes] = logits[:, 0]
        return self.propose(lanes, logits + self.rows[lanes][:, None])


def inputs(call: int, num_entries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(call)
    lanes = torch.randperm(NUM_LANES, generator=generator)[:num_entries]
    return lanes.to(device), torch.randn(num_entries, 5, VOCAB, generator=generator).to(device)


def test_eagerly_is_the_work_itself():
    run = EagerRunner()
    assert run("key", lambda a, b: a - b, torch.tensor(5), torch.tensor(3)) == 2
    assert run.num_unsettled == 0


class Again:
    """Stands for a Capture: to replay is to run once more, into the same output."""

    device = torch.device("cpu")

    def __call__(self, run, *, num_warmups: int):
        for _ in range(num_warmups):
            run()
        output = run()
        return SimpleNamespace(replay=lambda: output.copy_(run()), output=output)


def test_each_shape_is_captured_when_it_has_come_up_often_enough():
    run, num_runs = GraphRunner(Again()), 0

    def double(x: Tensor) -> Tensor:
        nonlocal num_runs
        num_runs += 1
        return 2 * x

    for call in range(NUM_EAGER_CALLS):
        assert run("key", double, torch.full((3,), call)).tolist() == [2 * call] * 3
    assert num_runs == run.num_unsettled == NUM_EAGER_CALLS
    first = run("key", double, torch.full((3,), 7))
    assert run.num_unsettled == NUM_EAGER_CALLS + 1
    given = torch.full((3,), 8)
    second = run("key", double, given)
    assert second is first and first.tolist() == [16] * 3 and given.tolist() == [8] * 3
    assert run("key", double, torch.ones(2)).tolist() == [2, 2]  # of another shape
    assert run.num_unsettled == NUM_EAGER_CALLS + 2
    run.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_gives_and_writes_what_eager_operations_do():
    device = torch.device("cuda", 0)
    eager, captured = Memory(device), Memory(device)
    run = GraphRunner(Capture(device))
    for call in range(3 * (NUM_EAGER_CALLS + 3)):
        given = inputs(call, 1 + call % 3, device)  # three shapes in turn
        expected, found = eager.work(*given), run("key", captured.work, *given)
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.parents, expected.parents)
        assert torch.equal(captured.rows, eager.rows)
    assert run.num_unsettled == 3 * (NUM_EAGER_CALLS + 1)
    run.close()
