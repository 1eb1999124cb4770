"""Who waits for copies hears of them once, when all have arrived."""

from __future__ import annotations

import itertools

import pytest

from luceasync.host_cache.copy_stream import DoneTicket, joined
from tests.host_cache.late import LateTicket


def test_what_has_arrived_is_told_at_once():
    told: list[int] = []
    ticket = DoneTicket()
    ticket.when_done(lambda: told.append(1))
    ticket.wait()
    assert ticket.is_done and told == [1]


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_several_are_told_once_when_the_last_has_arrived(order):
    tickets, told = [LateTicket() for _ in range(3)], []
    both = joined([*tickets, DoneTicket()])
    both.when_done(lambda: told.append(1))
    for i in order:
        assert not both.is_done and not told
        tickets[i].arrive()
    assert both.is_done and told == [1]


def test_an_error_of_one_is_raised_where_somebody_waits_for_all():
    good, bad = LateTicket(), LateTicket()
    both = joined([good, bad])
    good.arrive()
    bad.arrive(OSError("the device is gone"))
    assert both.is_done
    with pytest.raises(OSError, match="the device is gone"):
        both.wait()


def test_of_nothing_nobody_has_to_wait():
    assert joined([]).is_done
