"""Plans of several groups for engines that ask for one: the same suites run over a longer chain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest


def even_groups(num_shards: int, num_groups: int) -> tuple[tuple[int, int], ...]:
    """Shards `[begin, end)` of each group, as evenly as it goes; never a group without any."""
    num_groups = min(num_groups, num_shards)
    ends = [num_shards * (i + 1) // num_groups for i in range(num_groups)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


@contextmanager
def in_groups(num_groups: int) -> Iterator[None]:
    """Every plan that is made meanwhile has that many groups, on at least as many logical CPU
    devices; what names other devices keeps them.
    """
    from luceasync.pipeline import plan, report

    named = report.named_devices

    def enough(device: str | None, devices: Sequence[str]) -> tuple[str, ...]:
        names = named(device, devices)
        if all(name.startswith("cpu") for name in names) and len(names) < num_groups:
            return tuple(f"cpu:{i}" for i in range(num_groups))
        return names

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "named_devices", enough)
        patch.setattr(plan, "group_shards", lambda shards: even_groups(len(shards), num_groups))
        yield
