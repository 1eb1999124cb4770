"""Looks that nobody asks for any more stay until what they have queued is over."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import torch

from luceasync.models.precision import Precision
from luceasync.models.recent import RecentRows
from luceasync.pipeline.looks import Looks


class Moment:
    """An Event that is over when it is told to be."""

    is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


class LatePlatform:
    """A device that has done nothing yet."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.moments: list[Moment] = []

    def beside(self) -> nullcontext[None]:
        return nullcontext()

    def record_event(self) -> Moment:
        self.moments.append(Moment())
        return self.moments[-1]


def begun(platform: LatePlatform) -> tuple[Looks, weakref.ref]:
    """A look of lane 1 that is under way, and a thread to what it writes to."""
    recent = RecentRows([], num_lanes=2, precision=Precision.of("fp32"), device=platform.device)
    looks = Looks([], 0, recent, platform, None, None)  # type: ignore[arg-type]
    looks.begin(1, 640, lambda num_tokens: [])
    return looks, weakref.ref(looks._found[1])


def test_a_look_of_a_lane_that_is_reset_stays_until_it_is_over():
    platform = LatePlatform()
    looks, found = begun(platform)
    looks.reset(1)
    looks.go_on()
    gc.collect()
    assert found() is not None
    platform.moments[0].is_over = True
    looks.go_on()
    gc.collect()
    assert found() is None


def test_an_end_waits_for_looks():
    platform = LatePlatform()
    looks, found = begun(platform)
    looks.close()
    gc.collect()
    assert [moment.is_over for moment in platform.moments] == [True]
    assert found() is None
