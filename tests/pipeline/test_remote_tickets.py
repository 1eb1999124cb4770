"""Copies that another process makes are waited for only where they are needed."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from luceasync.errors import StageFailed
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.remote.nodes import RemoteTicket
from tests.later import later
from tests.pipeline.late_backend import LATE_S, held
from tests.pipeline.test_remote import Opened
from tests.processes import placed
from tests.test_stages import NUM_PROMPT, SPAN, life

pytestmark = [pytest.mark.any_family, pytest.mark.usefixtures("forked_backends")]

DEADLINE_S = 30.0
LATE = "tests.pipeline.late_backend"


def ticket(memory: object = None) -> RemoteTicket:
    return RemoteTicket(lambda words: StageFailed(1, words), memory)


def test_a_ticket_tells_once_and_lets_its_memory_go() -> None:
    memory, heard = set[int](), []
    is_held = weakref.ref(memory)
    one = ticket(memory)
    del memory
    one.when_done(lambda: heard.append("before"))
    assert not one.is_done and not heard and is_held() is not None
    one.complete(True)
    one.when_done(lambda: heard.append("after"))
    assert one.is_done and heard == ["before", "after"] and is_held() is None
    one.wait()


def test_waiting_for_a_process_that_has_ended_raises() -> None:
    one = ticket()
    with (
        later(0.05, one.complete, False),
        pytest.raises(StageFailed, match="copies had not arrived"),
    ):
        one.wait()
    assert one.is_done


@pytest.fixture(params=["shared", "stream"])
def both(
    request: pytest.FixtureRequest, tiny_dir: Path, tmp_path: Path
) -> Iterator[tuple[LayerSplitBackend, LayerSplitBackend]]:
    """One process, and one around another whose copies are late."""
    opened = []
    for name, module in (("one", "luceasync.backend"), ("between", LATE)):
        (tmp_path / name).mkdir()
        placement = placed(tmp_path / name, name, request.param, module)
        opened.append(Opened(tiny_dir, placement, False))
    yield opened[0].backend, opened[1].backend
    for each in opened:
        each.close()


def prompt(backend: LayerSplitBackend, lane: int, seed: int = 1) -> None:
    tokens = torch.randint(3, 512, (NUM_PROMPT,), generator=torch.Generator().manual_seed(seed))
    backend.reset(lane)
    backend.prefill(lane, 0, tokens.tolist(), project=False)


def steps(backend: LayerSplitBackend, lane: int) -> torch.Tensor:
    at = range(NUM_PROMPT, NUM_PROMPT + 3)
    seen = [backend.decode([lane], [here], [7]).whole()[0].clone() for here in at]
    return torch.stack(seen)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_passes_go_on_beside_copies_and_bits_are_those_of_one_process(both) -> None:
    here, there = both
    for backend in both:
        prompt(backend, 0)
    here.nodes.save(0, "n", SPAN)
    heard = threading.Event()
    with held():
        saved = there.nodes.save(0, "n", SPAN)
        saved.when_done(heard.set)
        assert torch.equal(steps(there, 0), steps(here, 0))  # the lane goes on at once
        assert not saved.is_done and not heard.is_set()
    assert heard.wait(DEADLINE_S) and saved.is_done
    assert same(there.nodes.export("n"), here.nodes.export("n"))
    for backend in both:
        backend.reset(2)
    with held():
        restored = there.nodes.restore(2, ["n"], SPAN.end)
        assert not restored.is_done
    restored.wait()
    here.nodes.restore(2, ["n"], SPAN.end)
    assert torch.equal(steps(there, 2), steps(here, 2))


@pytest.mark.slow
def test_an_export_waits_and_what_is_dropped_harms_nobody(both) -> None:
    here, there = both
    for backend in both:
        prompt(backend, 0)
        prompt(backend, 1, seed=2)
        for _ in range(3):  # their copies come when others may have their places
            backend.nodes.save(0, "dropped", SPAN)
            backend.nodes.drop("dropped")
        backend.nodes.save(1, "kept", SPAN)
    assert same(there.nodes.export("kept"), here.nodes.export("kept"))
    time.sleep(2 * LATE_S)
    assert same(there.nodes.export("kept"), here.nodes.export("kept"))


@pytest.mark.slow
def test_a_node_whose_copies_had_not_come_is_lost_with_the_process(both) -> None:
    _, there = both
    life(there)  # saves "n"
    there.nodes.export("n")
    prompt(there, 0)
    [stage] = [stage for stage in there._stages if stage.num_shards[1]]
    with held():
        late = there.nodes.save(0, "late", SPAN)
        os.kill(stage._connection._started.child.pid, signal.SIGKILL)
        with pytest.raises(StageFailed):
            late.wait()
    with pytest.raises(StageFailed):
        prompt(there, 1)
    lost: list[Any] = []
    assert there.restart_failed(lost.extend)
    assert "late" in lost
