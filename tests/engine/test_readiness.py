"""What keeps requests out is said, and nothing that comes later unsays it."""

from __future__ import annotations

import pytest

from luceasync.engine.readiness import Readiness


async def test_it_is_ready_when_every_part_is_there():
    readiness = Readiness(("model", "disk"))
    readiness.begin()
    readiness.arrived("model")
    assert (readiness.is_ready, readiness.detail) == (False, "loading the model")
    readiness.arrived("disk")
    assert (readiness.is_ready, readiness.detail) == (True, "ready")
    await readiness.wait()


async def test_a_part_that_is_lost_is_told_at_once_and_for_good():
    readiness = Readiness(("model", "disk"))
    readiness.begin()
    readiness.lost("model", OSError("no weights"))
    with pytest.raises(OSError, match="no weights"):
        await readiness.wait()  # the other one is not there yet
    readiness.arrived("disk")
    assert (readiness.is_ready, readiness.detail) == (False, "no weights")


async def test_what_arrives_after_the_end_opens_nothing():
    readiness = Readiness(("model",))
    readiness.begin()
    readiness.stop("the server is shutting down")
    readiness.arrived("model")
    assert (readiness.is_ready, readiness.detail) == (False, "the server is shutting down")


def test_before_it_has_begun_it_is_loading():
    assert Readiness(("model",)).detail == "loading the model"
