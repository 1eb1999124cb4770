"""A GPU's path through a model, quickly on the CPU: captured passes are run again with torch's
bodies, which need the host's entries: these are derived from what the captured pass reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TypeVar

import pytest
from torch import Tensor

from luceasync.models.ops import Ops, TorchOps
from luceasync.models.pass_rows import NO_LANE, AcceptedRows, Entry, Paths, Rows
from luceasync.models.trees import Trees
from luceasync.pipeline import stage
from luceasync.pipeline.cpu_platform import CpuPlatform
from luceasync.pipeline.graph import DecodeStep, TreeStep
from luceasync.pipeline.past_rows import PastRows
from luceasync.pipeline.shard import Shard
from tests.kernels.interpreted import Recapture, Rerun

T = TypeVar("T")


class Platform(CpuPlatform):
    """A platform that captures passes as a GPU's does, but has torch's bodies."""

    @cached_property
    def ops(self) -> Ops:
        return TorchOps()

    def passes(self, *, eager: Callable[[], T], captured: Callable[..., T]) -> T:
        return captured(Recapture())


class HostShard(Shard):
    """Derives the host's entries from the device's tensors. Runs nothing if there is no lane.
    `tapped`: the taps of the last run, which a graph would have written over those of the first.
    """

    tapped: dict[int, Tensor]

    def forward(self, x: Tensor, rows: Rows, past: PastRows | None = None) -> Tensor:
        found = super().forward(x, rows, past) if rows.num_lanes else x
        self.tapped = self.taps
        return found

    def verify(self, x: Tensor, rows: Rows, trees: Trees) -> Tensor:
        if rows.num_lanes:
            x = super().verify(x, rows, trees)
        else:
            self.taps = dict.fromkeys(self._tapped, x)
        self.tapped = self.taps
        return x

    def rows_from(
        self,
        entries: tuple[Entry, ...],
        lanes: Tensor,
        positions: Tensor,
        mark: int | None = None,
    ) -> Rows:
        both = zip(lanes.tolist(), positions[:, 0].tolist(), strict=True)
        if not entries and positions.shape[1] == 1:
            entries = tuple(self._entry(lane, begin, 1) for lane, begin in both)
        elif not entries:
            entries = tuple(self._committed(lane, begin) for lane, begin in both)
        return super().rows_from(entries, lanes, positions, mark)

    def paths_from(
        self,
        kept: tuple[AcceptedRows, ...],
        lanes: Tensor,
        positions: Tensor,
        rows: Tensor,
        counts: Tensor,
    ) -> Paths:
        if not kept:
            each = zip(*(x.tolist() for x in (lanes, positions, counts)), rows, strict=True)
            kept = tuple(
                AcceptedRows(i, lane, at, at, self.cache.places(lane, at, at + n), path[:n].long())
                for i, (lane, at, n, path) in enumerate(each)
                if n and lane != NO_LANE
            )
        return super().paths_from(kept, lanes, positions, rows, counts)


def with_its_taps(replay: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A step's `replay`, after which the shard has the taps of this run."""

    def run(step: DecodeStep | TreeStep, shard: HostShard) -> Tensor:
        found = replay(step, shard)
        shard.taps = shard.tapped
        return found

    return run


@contextmanager
def recaptured() -> Iterator[list[object]]:
    """Make stages loaded inside the context capture their passes; yields the list of replays."""
    replayed: list[object] = []
    replay = Rerun.replay

    def heard(self: Rerun) -> None:
        replayed.append(self)
        replay(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "open_platform", Platform)
        patch.setattr(stage, "Shard", HostShard)
        for step in (DecodeStep, TreeStep):
            patch.setattr(step, "replay", with_its_taps(step.replay))
        patch.setattr(Rerun, "replay", heard)
        yield replayed
