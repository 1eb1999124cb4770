"""Requests are let in until the end begins, and told to stop when it is due."""

from __future__ import annotations

import pytest

from luceasync.errors import Unavailable
from luceasync.server.drain import Drain


async def test_running_requests_are_counted_on_every_way_out():
    drain = Drain()
    with drain.admit(), drain.admit():
        assert repr(drain) == "Drain(num_running=2, closing=False)"
    with pytest.raises(ZeroDivisionError), drain.admit():
        raise ZeroDivisionError
    assert drain.num_running == 0


async def test_nothing_is_admitted_once_it_is_closing():
    drain = Drain()
    drain.begin()
    with pytest.raises(Unavailable, match="shutting down"), drain.admit():
        raise AssertionError("must not be reached")


async def test_waiting_ends_with_the_last_request_or_at_the_deadline():
    drain = Drain()
    assert await drain.wait_idle(timeout_s=60)
    with drain.admit():
        assert not await drain.wait_idle(timeout_s=0)
    assert await drain.wait_idle(timeout_s=60)


async def test_expiry_is_raised_where_it_is_awaited():
    drain = Drain()
    drain.expire()
    with pytest.raises(Unavailable):
        await drain.expired()
