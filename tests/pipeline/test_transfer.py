"""Copies to the host are complete when read; parameters are taken when a pass begins."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from luceasync.pipeline.capture import Capture
from luceasync.pipeline.transfer import HostCopier, PassParameters
from luceasync.ranking.local import LocalLogits, RankingKernels
from luceasync.ranking.logits import RankRequest
from luceasync.ranking.proposals import Proposal

CPU = torch.device("cpu")


def test_what_was_sent_stays_whatever_is_sent_after_it() -> None:
    send, x = HostCopier(), torch.arange(3.0)
    sent = send(x)
    x += 5
    other = send(x)
    assert sent.fetch().tolist() == [0.0, 1.0, 2.0] and other.fetch().tolist() == [5.0, 6.0, 7.0]


def test_two_rankings_that_are_open_at_once_keep_what_they_found() -> None:
    bodies, logits = RankingKernels(send=HostCopier()), torch.eye(3)
    proposal = Proposal(torch.tensor([[7, 8, 9]]), None)
    first = LocalLogits(logits, bodies).rank(RankRequest(), proposal)
    second = LocalLogits(logits.flip(0), bodies).rank(RankRequest(num_ranked=1))
    assert second.candidates().best.tolist() == [2, 1, 0]
    found = first.candidates()
    assert found.best.tolist() == [0, 1, 2] and found.proposal.tolist() == [[7], [8], [9]]


def test_what_is_told_is_there_when_it_is_taken() -> None:
    parameters = PassParameters([-1, 0], CPU)
    assert parameters.values.tolist() == [-1, 0]
    parameters.put_numbers([3, 4])
    assert parameters.values.tolist() == [-1, 0], "a pass that reads it may not have begun"
    parameters.take()
    parameters.replayed()
    assert parameters.values.tolist() == [3, 4]
    parameters.send([5, 6])
    assert parameters.values.tolist() == [5, 6]


@dataclass
class Moment:
    """Stands in for an event and records the calls."""

    heard: list[str] = field(default_factory=list)

    def record(self) -> None:
        self.heard.append("recorded")

    def synchronize(self) -> None:
        self.heard.append("waited")


def test_what_a_replay_may_not_have_taken_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, moment = PassParameters([0], CPU), Moment()
    pack = parameters._format.pack_into

    def heard(*written: object) -> None:
        moment.heard.append("written")
        pack(*written)

    monkeypatch.setattr(parameters, "_taken", moment)
    monkeypatch.setattr(parameters, "_format", SimpleNamespace(pack_into=heard))
    parameters.put_numbers([1])
    parameters.replayed()
    parameters.put_numbers([2])
    assert moment.heard == ["waited", "written", "recorded", "waited", "written"]


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 64])
def test_what_is_sent_is_what_the_device_was_told_to_leave_before(num_rows: int) -> None:
    x = torch.randn(num_rows, 2000, dtype=torch.float64, device="cuda")
    x[:, 1:] = busy()[:num_rows, :1].isnan() | True  # after all of that
    send = HostCopier()
    sent = send(x)
    x.zero_()
    other = send(x)
    assert (sent.fetch()[:, 1:] == 1.0).all() and np.count_nonzero(other.fetch()) == 0
    assert (sent.fetch()[:, 1:] == 1.0).all()


@pytest.mark.gpu
def test_captured_passes_take_what_each_was_told_however_late_they_run() -> None:
    parameters, found = (
        PassParameters([0, 0], torch.device("cuda", 0)),
        torch.zeros(40, 2, device="cuda"),
    )
    capture = Capture(parameters.values.device)
    at = torch.zeros(1, dtype=torch.int64, device="cuda")

    def run() -> None:
        parameters.take()
        busy()
        found.index_copy_(0, at, parameters.values[None].float())
        at.add_(1)

    captured = capture(run, num_warmups=1)
    at.zero_()
    for number in range(40):
        parameters.put_numbers([number, -number])
        captured.replay()
        parameters.replayed()
    assert found.tolist() == [[float(n), float(-n)] for n in range(40)]


def busy() -> torch.Tensor:
    """Work that takes a GPU some time, queued at once."""
    large = torch.ones(4096, 4096, device="cuda")
    for _ in range(20):
        large = large @ large
    return large
