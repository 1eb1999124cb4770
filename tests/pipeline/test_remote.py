"""Stages in other processes compute what one process does, bit by bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from luceasync.config import PlacementConfig
from luceasync.errors import StageFailed
from luceasync.ipc.supervised import LEAST_S, Heartbeat
from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.precision import Precision
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import make_plan
from luceasync.pipeline.remote import connection, fleet
from luceasync.pipeline.remote.discovery import choose_processes
from luceasync.pipeline.remote.fleet import Fleet
from luceasync.ranking.logits import Masks, RankRequest
from tests.later import later
from tests.pipeline.heard import HeardTaps
from tests.processes import ARRANGEMENTS, BACKEND, placed
from tests.test_stages import SPAN, life, turn

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_backends")]

TAPS = (0, 3)
NODE_BYTES = 16 << 20
REMOTE = [name for name in ARRANGEMENTS if name != "one"]


class Opened:
    """A model over the stages of an arrangement."""

    def __init__(self, model_dir: Path, placement: PlacementConfig, runs_async: bool) -> None:
        """`runs_async`: as if all devices queued their work."""
        spec = read_spec(model_dir)
        chosen = choose_processes(
            placement.devices, placement, lambda name: name.startswith("cpu"), None
        )
        offers = [
            replace(
                offer_of("cpu:0", 2**33),
                name=name,
                process=process,
                runs_async=runs_async,
            )
            for name, process in zip(placement.devices, chosen.of_devices, strict=True)
        ]
        plan = make_plan(
            spec,
            offers,
            precision=Precision.of("fp32"),
            weights=None,
            parallel=4,
            max_ctx_tokens=256,
            prefill_chunk_tokens=None,
            verify_rows=[6],
        )
        self.fleet = Fleet(
            ModelFiles(model_dir), plan, chosen.programs, placement.ipc_transport, NODE_BYTES
        )
        self.backend = LayerSplitBackend.open(
            ModelFiles(model_dir), plan, taps=TAPS, open_remote=self.fleet.open_stage
        )

    def close(self) -> None:
        self.backend.close()
        self.fleet.close()


@pytest.fixture
def open_in(tiny_dir: Path, tmp_path: Path) -> Iterator:
    opened: list[Opened] = []

    def open_backend(
        arrangement: str,
        transport: str = "auto",
        runs_async: bool = False,
        module: str = BACKEND,
    ) -> LayerSplitBackend:
        folder = tmp_path / f"{len(opened)}"
        folder.mkdir()
        placement = placed(folder, arrangement, transport, module)
        opened.append(Opened(tiny_dir, placement, runs_async))
        return opened[-1].backend

    open_backend.opened = opened
    yield open_backend
    for each in opened:
        each.close()


def test_experts_are_not_asked_for_behind_a_chunk(open_in, monkeypatch: pytest.MonkeyPatch):
    """The answer would come after it, and a step of other lanes would wait as long."""
    num_asked = []
    monkeypatch.setattr(fleet._Experts, "ask", lambda self, connection: num_asked.append(1))
    backend = open_in("two", runs_async=True)
    backend.reset(0)
    backend.prefill(0, 0, list(range(8)), project=False)  # and is not waited for
    backend.raise_if_failed()
    assert not num_asked
    backend.prefill(0, 8, list(range(8)), project=True)
    backend.raise_if_failed()
    assert len(num_asked) == 1


@pytest.mark.covered(1)
@pytest.mark.parametrize("transport", ["shared", "stream"])
@pytest.mark.parametrize("arrangement", REMOTE)
def test_the_numbers_are_those_of_one_process(open_in, arrangement: str, transport: str):
    here, there = open_in("one"), open_in(arrangement, transport)
    assert torch.equal(life(there), life(here))
    num_remote = sum(not name.startswith("cpu") for name in ARRANGEMENTS[arrangement][0].split(","))
    assert there.num_shards == (3 - num_remote, num_remote)


@pytest.mark.covered(1)
@pytest.mark.parametrize("transport", ["shared", "stream"])
@pytest.mark.parametrize("arrangement", ["three", "between"])
def test_nodes_go_between_processes(open_in, arrangement: str, transport: str):
    one, several = open_in("one"), open_in(arrangement, transport)
    life(one)
    life(several)
    for source, target in ((one, several), (several, one)):
        target.nodes.adopt("other", SPAN, source.nodes.export("n"))
        assert torch.equal(life(target, "other"), life(target, "n"))


@pytest.mark.any_family
def test_nodes_of_each_arrangement_are_taken_up_by_each_other_one(open_in):
    several = {name: open_in(name, "shared") for name in ARRANGEMENTS}
    expected = life(several["one"])
    given = {}
    for name, backend in several.items():
        assert torch.equal(life(backend), expected)
        given[name] = backend.nodes.export("n")
    for target in several.values():
        for name, node in given.items():
            target.nodes.adopt(name, SPAN, node)
            assert torch.equal(life(target, name), life(target, "n"))


def remote_stage(backend: LayerSplitBackend):
    """The one that is not of this process."""
    [stage] = [stage for stage in backend._stages if stage.num_shards[1]]
    return stage


def pid_of(backend: LayerSplitBackend) -> int:
    return remote_stage(backend)._connection._started.child.pid


@pytest.mark.covered(0)
def test_a_node_in_shared_memory_moves_no_bytes(open_in):
    backend = open_in("between", "shared")
    life(backend)
    traffic = remote_stage(backend).traffic
    before = traffic.payload_bytes_sent + traffic.payload_bytes_received
    packets = traffic.packet_bytes_sent + traffic.packet_bytes_received
    backend.nodes.export("n")
    backend.nodes.restore(2, ["n"], SPAN.end)
    assert traffic.payload_bytes_sent + traffic.payload_bytes_received == before
    assert traffic.packet_bytes_sent + traffic.packet_bytes_received - packets <= 4096


@pytest.mark.covered(0)
def test_no_answer_is_as_wide_as_the_vocabulary(open_in):
    backend = open_in("two", "shared")
    traffic = remote_stage(backend).traffic
    backend.prefill(0, 0, range(3, 10), project=False)
    backend.decode([0], [7], [5]).rank(RankRequest()).candidates()
    before = traffic.payload_bytes_received
    backend.decode([0], [8], [5]).rank(RankRequest()).candidates()
    assert traffic.payload_bytes_received == before  # the token stands in the packet
    backend.decode([0], [9], [5]).rank(RankRequest(num_ranked=4)).candidates()
    assert traffic.payload_bytes_received - before == 8 * (1 + 4 + 4 + 1)


@pytest.mark.covered(0)
def test_what_was_ranked_before_can_still_be_asked_for(open_in):
    backend = open_in("two", "shared")
    backend.prefill(0, 0, range(3, 10), project=False)
    logits = backend.decode([0], [7], [5])
    ranking = logits.rank(RankRequest(num_ranked=4, num_top=1))
    values = ranking.candidates().block.values
    words = np.eye(1, -(-logits.num_vocab // 32), dtype=np.int32) << 1  # token 1 alone
    masked = RankRequest(num_ranked=2, masks=Masks(np.zeros(1, np.int64), words), is_of_masked=True)
    again = logits.rank(masked)
    assert again.candidates().best.tolist() == [1]
    assert ranking.whole_row(0).values[:4].tolist() == values[0].tolist()
    assert again.whole_row(0).ids[0] == 1
    assert ranking.logprob(0, 7) == pytest.approx(logits.whole()[0].log_softmax(-1)[7].item())


@pytest.mark.any_family
@pytest.mark.parametrize("num_kept", [40, 64])
def test_of_a_prompt_only_rows_cross_that_a_ring_keeps(open_in, num_kept: int):
    heard, backend = HeardTaps(num_kept), open_in("two")
    backend.prefill(0, 0, range(3, 103), project=False)
    traffic = remote_stage(backend).traffic
    before = traffic.payload_bytes_received
    backend.send_chunk_taps(heard, 0, 0, 100)
    row_bytes = heard.taps[1].shape[-1] * 4
    assert traffic.payload_bytes_received - before == num_kept * row_bytes  # of the one tap there
    here, all_rows = HeardTaps(), open_in("one")
    all_rows.prefill(0, 0, range(3, 103), project=False)
    all_rows.send_chunk_taps(here, 0, 0, 100)
    for found, expected in zip(heard.taps, here.taps, strict=True):
        assert torch.equal(found[:, 100 - num_kept : 100], expected[:, 100 - num_kept : 100])


def test_only_tapped_rows_that_are_kept_cross(open_in):
    backend = open_in("two", "shared")
    stage = remote_stage(backend)
    backend.prefill(0, 0, range(3, 10), project=False)
    backend.verify([0], [7], torch.tensor([[5, 6, 7, 8, 9, 10]]))
    before = stage.traffic.payload_bytes_received
    taps = stage.passes.taps([[0, 2, 3]])
    assert taps
    [num_kept] = {torch.count_nonzero(rows.abs().sum(-1)).item() for rows in taps.values()}
    row_bytes = sum(rows.shape[-1] * rows.element_size() for rows in taps.values())
    assert num_kept == 3
    assert stage.traffic.payload_bytes_received - before <= 1.1 * num_kept * row_bytes


@pytest.mark.covered(0)
def test_a_chunk_is_not_waited_for_where_work_is_queued(open_in):
    backend = open_in("two", runs_async=True)
    traffic = remote_stage(backend).traffic
    before = traffic.packets_received
    backend.prefill(0, 0, range(3, 67), project=False)
    assert traffic.packets_received == before
    assert torch.equal(life(backend), life(open_in("one")))


@pytest.mark.any_family
@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_step_is_announced_while_its_activation_is_computed(open_in, monkeypatch, transport: str):
    monkeypatch.setattr("luceasync.pipeline.remote.passes.HOST", torch.device("meta"))
    backend = open_in("two", transport)
    traffic = remote_stage(backend).traffic
    assert torch.equal(life(backend), life(open_in("one")))
    backend.prefill(1, 0, range(3, 10), project=False)
    before = traffic.packets_sent
    backend.decode([1], [7], [5])
    assert traffic.packets_sent == before + 2


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_the_state_within_a_chunk_is_saved_where_it_is(open_in, transport: str):
    assert torch.equal(turn(open_in("two", transport)), turn(open_in("one")))


@pytest.mark.covered(0)
def test_neighbours_in_processes_are_passed_payloads_by_reference(open_in):
    backend = open_in("three", "shared")
    first, last = [stage for stage in backend._stages if stage.num_shards[1]]
    backend.prefill(0, 0, range(3, 10), project=True)
    assert last.traffic.payload_bytes_lent == first.traffic.payload_bytes_received > 0
    assert last.traffic.payload_bytes_sent == 0


@pytest.mark.covered(0)
def test_a_process_that_hangs_is_a_failed_group(open_in, monkeypatch):
    backend = open_in("two")
    backend.check_alive()
    monkeypatch.setattr(connection, "PING_S", 0.3)
    os.kill(pid_of(backend), signal.SIGSTOP)
    with pytest.raises(StageFailed, match=r"silent for 0\.3 s.*its process lives"):
        backend.check_alive()


@pytest.mark.covered(0)
def test_a_process_that_hangs_in_a_pass_is_ended_long_before_the_pass_is_due(open_in, monkeypatch):
    monkeypatch.setattr(fleet, "HEARTBEAT", Heartbeat(0.05, 2.0))
    backend = open_in("two")
    began_s = time.monotonic()
    with (
        later(0.3, os.kill, pid_of(backend), signal.SIGSTOP),
        pytest.raises(StageFailed, match=r"gave no sign of life for .* s; .* by SIGKILL"),
    ):
        while True:
            backend.prefill(0, 0, range(3, 67), project=True)
    assert time.monotonic() - began_s < LEAST_S


@pytest.mark.covered(0)
def test_a_process_that_dies_is_a_failed_group(open_in):
    backend = open_in("two")
    life(backend)
    os.kill(pid_of(backend), signal.SIGKILL)
    with pytest.raises(StageFailed, match=r"stage 1 of the model failed: .*SIGKILL"):
        backend.prefill(0, 0, [3, 4, 5], project=True)
    with pytest.raises(StageFailed):
        backend.check_alive()
    with pytest.raises(StageFailed):
        backend.reset(0)


@pytest.mark.any_family
@pytest.mark.covered(1)
@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_group_is_brought_back_alone_with_what_lies_in_shared_memory(open_in, transport: str):
    backend = open_in("three", transport)
    expected = life(backend)
    first, last = [stage for stage in backend._stages if stage.num_shards[1]]
    restored, other = life(backend, "n"), first._connection._started.child.pid
    os.kill(last._connection._started.child.pid, signal.SIGKILL)
    with pytest.raises(StageFailed):
        backend.prefill(0, 0, [3, 4, 5], project=True)
    backend.nodes.drop("never was")  # what the process need not hear
    lost: list = []
    assert backend.restart_failed(lost.extend)
    assert first._connection._started.child.pid == other
    assert lost == ([] if transport == "shared" else ["n"])
    if transport == "shared":
        assert torch.equal(life(backend, "n"), restored)
    assert torch.equal(life(backend), expected)
    assert not backend.restart_failed(lost.extend)
    assert len(lost) == (transport == "stream")


@pytest.mark.covered(0)
def test_a_save_that_a_death_cuts_short_leaves_nothing(open_in):
    backend = open_in("between", "shared")
    life(backend)
    os.kill(pid_of(backend), signal.SIGKILL)
    with pytest.raises(StageFailed):
        backend.nodes.save(1, "half", SPAN)
    lost: list = []
    backend.restart_failed(lost.extend)
    assert lost == []
    parts = [part for stage in backend._stages for part in stage.nodes]
    assert [set(part._nodes) for part in parts] == [{"n"}] * 3


@pytest.mark.covered(0)
def test_a_process_that_does_not_come_back_is_said_and_tried_again(open_in, tmp_path: Path):
    backend = open_in("two")
    [program] = tmp_path.glob("*/luceasync-backend")
    good = program.read_text()
    program.write_text("#!/bin/sh\necho no driver >&2; exit 1\n")
    os.kill(pid_of(backend), signal.SIGKILL)
    with pytest.raises(StageFailed):
        backend.check_alive()
    for words in ("failure 2 in a row", "failure 3 in a row"):
        with pytest.raises(StageFailed, match="no driver"):
            backend.restart_failed(lambda nodes: None)
        [status] = open_in.opened[-1].fleet.status.all
        assert "no driver" in status.detail and words in status.detail
    program.write_text(good)
    backend.restart_failed(lambda nodes: None)
    [status] = open_in.opened[-1].fleet.status.all
    assert (status.detail, status.num_starts) == ("", 4)
    assert torch.equal(life(backend), life(open_in("one")))


@pytest.mark.covered(0)
def test_what_has_crossed_is_counted_over_all_lives(open_in):
    backend = open_in("two")
    fleet = open_in.opened[-1].fleet
    life(backend)
    [before] = fleet.status.all
    assert before.calls_total > 3 and before.call_s_total > 0
    assert before.sent_bytes_total > 64 * 64 * 4 and before.received_bytes_total > 512 * 4
    assert before.node_bytes > 0 and before.resident_bytes > 1 << 24
    assert (before.name, before.devices) == ("group 1 of the model", ("hip:0", "hip:1"))
    os.kill(pid_of(backend), signal.SIGKILL)
    with pytest.raises(StageFailed):
        backend.prefill(0, 0, [3, 4, 5], project=True)
    [dead] = fleet.status.all
    assert dead.detail and dead.calls_total == before.calls_total
    backend.restart_failed(lambda nodes: None)
    [after] = fleet.status.all
    assert after.calls_total > before.calls_total  # of nodes that it was told of
    assert after.sent_bytes_total > before.sent_bytes_total
