"""What many samples say: medians, spread, percentiles, ratios pair by pair. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence


def median(samples: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(samples)


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each variant."""
    return {name: median(values) for name, values in samples.items()}


def percentile(samples: Sequence[float], percent: float) -> float:
    """The sample below which `percent` of 100 lie; 100 is the largest one."""
    ordered = sorted(samples)
    return ordered[int(percent / 100 * (len(ordered) - 1))]


def spread(samples: Sequence[float]) -> float:
    """How far the middle half of the samples lies apart, as a part of their median."""
    if len(samples) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(samples, n=4, method="inclusive")
    return (third - first) / middle


def pair_ratios(samples: Sequence[float], base: Sequence[float]) -> list[float]:
    """Each sample by that of the same round: what changes from round to round cancels out."""
    return [one / other for one, other in zip(samples, base, strict=True)]


def paired_ratio(samples: Sequence[float], base: Sequence[float]) -> float:
    """Median of `pair_ratios`."""
    return median(pair_ratios(samples, base))
