"""Plans of several stages for engines that ask for one: the same suites run over a longer chain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest


def even_stages(num_shards: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Shards `[begin, end)` of each stage, as evenly as it goes; never a stage without any."""
    num_stages = min(num_stages, num_shards)
    ends = [num_shards * (i + 1) // num_stages for i in range(num_stages)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


@contextmanager
def in_stages(num_stages: int) -> Iterator[None]:
    """Every plan that is made meanwhile has that many stages, on at least as many logical CPU
    devices; what names other devices keeps them.
    """
    from luceasync.pipeline import plan, report

    named = report.named_devices

    def enough(device: str | None, devices: Sequence[str]) -> tuple[str, ...]:
        names = named(device, devices)
        if all(name.startswith("cpu") for name in names) and len(names) < num_stages:
            return tuple(f"cpu:{i}" for i in range(num_stages))
        return names

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "named_devices", enough)
        patch.setattr(plan, "stages_of", lambda shards: even_stages(len(shards), num_stages))
        yield
