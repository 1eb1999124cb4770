"""How copies are cut and awaited; what needs a GPU is in tests/pipeline/test_nodes_gpu.py."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from luceasync.host_cache import copy_stream
from luceasync.host_cache.arena import PIECE_BYTES
from luceasync.host_cache.copy_stream import (
    CopyJob,
    CopyWaiter,
    DoneTicket,
    batches,
    joined,
    pieces,
    wait_for,
)
from tests.host_cache.late import LateTicket


@given(st.integers(1, 4 * PIECE_BYTES), st.integers(0, 3 * PIECE_BYTES))
def test_pieces_cover_the_range_and_cross_no_border(address: int, num_bytes: int):
    found = list(pieces(address, num_bytes))
    assert [begin for begin, _ in found] == [0, *[end for _, end in found]][: len(found)]
    assert (found[-1][1] if found else 0) == num_bytes
    for begin, end in found:
        assert (address + begin) // PIECE_BYTES == (address + end - 1) // PIECE_BYTES


def test_a_range_is_cut_at_borders_only():
    assert list(pieces(PIECE_BYTES, PIECE_BYTES)) == [(0, PIECE_BYTES)]
    assert list(pieces(PIECE_BYTES - 3, 10)) == [(0, 3), (3, 10)]


@given(st.lists(st.integers(0, 2 * PIECE_BYTES), max_size=6))
def test_batches_are_the_same_bytes_in_small_amounts(sizes: list[int]):
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    pairs = [(part, part) for part in memory.split(sizes)]
    found = list(batches(pairs))
    assert all(sum(source.numel() for _, source in batch) <= PIECE_BYTES for batch in found)
    at = memory.data_ptr()
    for target, source in (pair for batch in found for pair in batch):
        assert target.data_ptr() == source.data_ptr() == at
        at += source.numel()
    assert at == memory.data_ptr() + sum(sizes)


def test_small_copies_share_a_batch():
    small = torch.empty(64, dtype=torch.uint8)
    assert [len(batch) for batch in batches([(small, small)] * 100)] == [100]


def test_a_wait_for_a_device_ends_when_it_is_over():
    answers = itertools.chain([False, False], itertools.repeat(True))
    wait_for(lambda: next(answers), "copies")
    assert next(answers) is True


def test_a_device_that_never_ends_is_a_timeout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copy_stream, "COPY_TIMEOUT_S", 0.01)
    with pytest.raises(TimeoutError, match=r"^the last copies: not over within 0\.01 s$"):
        wait_for(lambda: False, "the last copies")


def test_copies_that_are_never_queued_are_a_timeout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copy_stream, "COPY_TIMEOUT_S", 0.01)
    with pytest.raises(TimeoutError, match=r"not begun and queued within 0\.01 s"):
        CopyJob(1, [], [], lambda number: None).synchronize()


DEADLINE_S = 10.0


class Copies:
    """Over when a test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_over = threading.Event()
        self._error = error

    def sleep(self) -> None:
        assert self.is_over.wait(DEADLINE_S)
        if self._error is not None:
            raise self._error


def test_each_callback_runs_after_its_copies_even_if_they_fail():
    arrivals, told = CopyWaiter("test"), []
    copies = [Copies(), Copies(OSError("the device is gone")), Copies()]
    for i, one in enumerate(copies):
        arrivals.tell(one, lambda i=i: told.append(i))
    assert told == []
    for one in copies:
        one.is_over.set()
    arrivals.close()
    assert told == [0, 1, 2]


def test_callbacks_run_in_another_thread():
    arrivals, threads, copies = CopyWaiter("test"), [], Copies()
    arrivals.tell(copies, lambda: threads.append(threading.current_thread().name))
    copies.is_over.set()
    arrivals.close()
    arrivals.close()
    assert threads == ["test"]


def test_a_done_ticket_calls_back_at_once():
    told: list[int] = []
    ticket = DoneTicket()
    ticket.when_done(lambda: told.append(1))
    ticket.wait()
    assert ticket.is_done and told == [1]


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_joined_tickets_call_back_once_when_the_last_has_arrived(order):
    tickets, told = [LateTicket() for _ in range(3)], []
    both = joined([*tickets, DoneTicket()])
    both.when_done(lambda: told.append(1))
    for i in order:
        assert not both.is_done and not told
        tickets[i].arrive()
    assert both.is_done and told == [1]


def test_an_error_of_one_ticket_is_raised_by_the_joined_one():
    good, bad = LateTicket(), LateTicket()
    both = joined([good, bad])
    good.arrive()
    bad.arrive(OSError("the device is gone"))
    assert both.is_done
    with pytest.raises(OSError, match="the device is gone"):
        both.wait()


def test_no_tickets_joined_are_done():
    assert joined([]).is_done
