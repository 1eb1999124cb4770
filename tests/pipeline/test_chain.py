"""Several stages are one model: in order, all of them or none, and a failure of one is reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from luceasync.errors import SnapshotMismatch
from luceasync.host_cache.nodes import Nodes, Span
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.passes import Passes
from tests.pipeline.fake_stage import Calls, FakeStage
from tests.pipeline.heard import taps_of
from tests.pipeline.plans import plan_of
from tests.pipeline.specs import make_spec

SPAN = Span(0, 64, with_state=False)


class Bench:
    """A backend over fake stages, stage i of which has `sizes[i]` shards."""

    def __init__(self, *sizes: int, taps: tuple[int, ...] = ()) -> None:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        plan = plan_of([8192.0] * sum(sizes), max_ctx_tokens=512, verify_rows=[4])
        ranges = zip([0, *ends], ends, strict=False)
        self.plan = replace(plan, stages=tuple(ranges))
        self.calls: Calls = []
        self.stages = [FakeStage(self.plan, i, self.calls) for i in range(len(sizes))]
        self.backend = LayerSplitBackend(make_spec(), self.plan, self.stages, taps=taps)

    def verbs(self, *wanted: str) -> list[tuple[int, str]]:
        return [(stage, verb) for stage, verb, _ in self.calls if verb in wanted]


def test_the_fake_has_all_that_a_stage_has():
    stage = Bench(1, 1).stages[0]
    for protocol, body in ((Passes, stage.passes), (Nodes, stage.nodes[0])):
        names = [name for name in vars(protocol) if not name.startswith("_")]
        assert names and all(hasattr(body, name) for name in names)


def test_what_one_stage_gives_the_next_one_is_given():
    bench = Bench(1, 1, 2)
    logits = bench.backend.prefill(0, 0, [3, 4], project=True)
    assert logits.tolist() == [4012.0]
    assert bench.backend.prefill(0, 2, [3], project=False) is None
    assert bench.backend.decode([0], [3], [7]).whole()[0].tolist() == [7012.0]
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert bench.backend.verify([0], [3], tokens).whole()[0, :, 0].tolist() == [
        1012,
        2012,
        3012,
        4012,
    ]
    passes = bench.verbs("prefill", "decode", "verify")
    assert [stage for stage, _ in passes] == [0, 1, 2] * 4


def test_every_stage_follows_the_page_map_before_a_pass_and_forgets_a_lane():
    bench = Bench(1, 2)
    bench.backend.reset(1)
    bench.backend.prefill(1, 0, [5] * 70, project=False)
    assert bench.verbs("reset", "place", "prefill") == [
        (stage, verb) for verb in ("reset", "place", "prefill") for stage in (0, 1)
    ]


def test_paths_are_committed_by_every_stage():
    bench = Bench(1, 1)
    bench.backend.verify([0], [0], torch.zeros((1, 4), dtype=torch.int64))
    bench.backend.commit([[0, 1]])
    committed = [what for _, verb, what in bench.calls if verb == "commit"]
    assert [paths[0] for paths in committed] == [[0, 1], [0, 1]]


def test_the_ends_are_those_of_the_first_and_of_the_last_stage():
    bench = Bench(1, 1)
    assert bench.backend.embed(torch.tensor([3])).tolist() == [[3.0]]
    proposal = bench.backend.propose_from(torch.tensor([[[3]]]), torch.tensor([7]), None)
    assert proposal.tokens.tolist() == [[7, 3]]


def test_the_last_stage_is_the_one_that_is_waited_for():
    bench = Bench(1, 1)
    bench.backend.synchronize()
    assert bench.verbs("synchronize") == [(1, "synchronize")]


def test_taps_come_from_all_stages_in_the_order_in_which_they_were_asked_for():
    last = Bench(1, 1).plan.shards[-1].end - 1
    bench = Bench(1, 1, taps=(last, 0))
    bench.backend.decode([0], [0], [1])
    assert [int(tap[0, 0, 0]) for tap in taps_of(bench.backend)] == [last, 0]


def test_shards_of_all_stages_are_counted_where_they_are():
    assert Bench(1, 2).backend.num_shards == (0, 3)


def test_a_save_without_room_in_one_stage_leaves_nothing_in_any():
    bench = Bench(1, 1)
    bench.stages[1].fails["save"] = MemoryError("no room")
    with pytest.raises(MemoryError):
        bench.backend.nodes.save(0, "n", SPAN)
    assert bench.verbs("save", "drop") == [(0, "save"), (1, "save"), (0, "drop"), (1, "drop")]
    assert not bench.stages[0].nodes[0].held


def test_copies_have_arrived_when_they_have_in_every_stage():
    bench, called = Bench(1, 1), []
    ticket = bench.backend.nodes.save(0, "n", SPAN)
    ticket.when_done(lambda: called.append(1))
    bench.stages[1].tickets[0].arrive()
    assert not ticket.is_done and not called
    bench.stages[0].tickets[0].arrive()
    assert ticket.is_done and called == [1]


def test_a_lane_is_empty_and_has_room_before_anything_is_put_into_it():
    bench = Bench(1, 1)
    bench.backend.nodes.restore(0, ["n"], 64)
    assert bench.verbs("reset", "place", "restore") == [
        (stage, verb) for verb in ("reset", "place", "restore") for stage in (0, 1)
    ]


def test_a_node_of_another_split_is_given_to_whom_its_layers_belong():
    source, target = Bench(1), Bench(1, 2)
    source.backend.nodes.save(0, "n", SPAN)
    given = source.backend.nodes.export("n")
    target.backend.nodes.adopt("n", SPAN, given)
    for stage in target.stages:
        for shard, nodes in zip(stage.shards, stage.nodes, strict=True):
            assert nodes.held["n"].keys() == nodes.shapes(SPAN).keys()
            assert all(name.startswith(f"ls{shard}_") for name in nodes.held["n"])
    taken = target.backend.nodes.export("n")
    assert {t.data_ptr() for t in taken.values()} == {t.data_ptr() for t in given.values()}


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_node_that_is_wrong_in_one_stage_is_owned_by_none(is_missing: bool):
    bench = Bench(1, 1)
    bench.backend.nodes.save(0, "n", SPAN)
    given = bench.backend.nodes.export("n")
    last = max(given)
    given = {**given, last: given[last][:-1]}
    if is_missing:
        del given[last]
    with pytest.raises(SnapshotMismatch, match=last):
        bench.backend.nodes.adopt("other", SPAN, given)
    assert not bench.verbs("adopt")


@pytest.mark.parametrize("verb", ["prefill", "place", "restore"])
def test_a_failed_stage_is_reported_and_later_stages_are_not_called(verb: str):
    bench = Bench(1, 1, 1)
    bench.stages[1].fails[verb] = ConnectionError("the stage is gone")
    with pytest.raises(ConnectionError, match="the stage is gone"):
        if verb == "restore":
            bench.backend.nodes.restore(0, ["n"], 64)
        else:
            bench.backend.prefill(0, 0, [1], project=True)
    assert bench.verbs(verb) == [(0, verb), (1, verb)]
    bench.backend.close()
    bench.backend.close()
    assert all(stage.is_closed for stage in bench.stages)


def test_copies_that_fail_in_one_stage_are_reported_to_the_waiter():
    bench = Bench(1, 1)
    ticket = bench.backend.nodes.save(0, "n", SPAN)
    bench.stages[0].tickets[0].arrive()
    bench.stages[1].tickets[0].arrive(ConnectionError("the stage is gone"))
    assert ticket.is_done
    with pytest.raises(ConnectionError):
        ticket.wait()
