"""What keeps requests out is said, and nothing that comes later unsays it."""

from __future__ import annotations

import pytest

from luceasync.engine.engine import Availability


async def test_it_is_ready_when_every_part_is_there():
    availability = Availability(("model", "disk"))
    availability.begin()
    availability.arrived("model")
    assert (availability.is_ready, availability.detail) == (False, "loading the model")
    availability.arrived("disk")
    assert (availability.is_ready, availability.detail) == (True, "ready")
    await availability.wait()


async def test_a_lost_part_raises_at_once_and_for_good():
    availability = Availability(("model", "disk"))
    availability.begin()
    availability.lost("model", OSError("no weights"))
    with pytest.raises(OSError, match="no weights"):
        await availability.wait()  # the other one is not there yet
    availability.arrived("disk")
    assert (availability.is_ready, availability.detail) == (False, "no weights")


async def test_what_arrives_after_the_end_opens_nothing():
    availability = Availability(("model",))
    availability.begin()
    availability.stop("the server is shutting down")
    availability.arrived("model")
    assert (availability.is_ready, availability.detail) == (False, "the server is shutting down")


def test_before_it_has_begun_it_is_loading():
    assert Availability(("model",)).detail == "loading the model"


async def test_what_is_interrupted_says_why_until_it_goes_on():
    availability = Availability(("model",))
    availability.begin()
    availability.arrived("model")
    availability.interrupt("the engine failed", back_in_s=4)
    assert (availability.is_ready, availability.is_interrupted) == (False, True)
    assert (availability.detail, availability.retry_after_s) == ("the engine failed", 4)
    availability.resume()
    assert (availability.is_ready, availability.detail) == (True, "ready")
    availability.stop("the server is shutting down")
    availability.interrupt("the engine failed", back_in_s=4)
    assert availability.detail == "the server is shutting down"


async def test_when_to_come_back_passes_as_time_does():
    now_s = [50.0]
    availability = Availability(("model",), clock=lambda: now_s[0])
    availability.begin()
    assert availability.retry_after_s == 1
    now_s[0] += 8.0
    assert availability.retry_after_s == 8  # it may take as long again
    now_s[0] += 1e6
    assert availability.retry_after_s == 60
    availability.arrived("model")
    assert availability.retry_after_s == 1
    availability.interrupt("the engine failed", back_in_s=9)
    now_s[0] += 5.5
    assert availability.retry_after_s == 4
    now_s[0] += 100.0
    assert availability.retry_after_s == 1
    availability.resume()
    assert availability.retry_after_s == 1
