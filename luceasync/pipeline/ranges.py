"""Devices by name, and the range of layers that each gets. Pure: no torch.

Knows weights for splitting, and neither what devices offer nor what layers need.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

from luceasync.errors import PlacementError
from luceasync.pipeline.offer import BACKENDS


def named_devices(device: str | None, devices: Sequence[str]) -> tuple[str, ...]:
    """What `--target-device` or `--target-devices` names, in full; nothing if neither is given.

    Raises PlacementError.
    """
    if device is None:
        return check_devices(devices)
    if devices:
        raise PlacementError(
            f"--target-device {device}: not allowed together with --target-devices "
            f"{','.join(devices)}; give one of the two"
        )
    return check_devices([device])


def check_devices(names: Sequence[str], flag: str = "--target-devices") -> tuple[str, ...]:
    """The device names in full ("cuda" -> "cuda:0"). Raises PlacementError, which names `flag`."""
    full = []
    for name in names:
        match = re.fullmatch(r"([a-z]+)(?::(\d{1,3}))?", name)
        if match is None or match[1] not in BACKENDS:
            raise PlacementError(
                f"{flag} {','.join(names)}: {name!r} is not a device; "
                f"expected BACKEND or BACKEND:INDEX with a backend of {', '.join(BACKENDS)}"
            )
        full.append(f"{match[1]}:{int(match[2] or 0)}")
    for name in full:
        if full.count(name) > 1:
            raise PlacementError(f"{flag} {','.join(names)}: {name} is named twice")
    return tuple(full)


def check_weights(weights: Sequence[float], num_devices: int) -> None:
    """Raises PlacementError unless there is one positive finite weight a device."""
    text = ",".join(f"{w:g}" for w in weights)
    if len(weights) != num_devices:
        raise PlacementError(
            f"--target-layer-split {text}: {len(weights)} weights for {num_devices} devices; "
            "one a device is expected"
        )
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise PlacementError(
                f"--target-layer-split {text}: {weight:g} is not allowed; "
                "every weight must be positive and finite"
            )


def split_layers(num_layers: int, weights: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """Half-open layer ranges by rounding the cumulative weights, at least one layer each.

    Raises PlacementError if there are more shards than layers.
    """
    num_shards = len(weights)
    if num_shards > num_layers:
        raise PlacementError(
            f"--target-devices names {num_shards} devices, but the model has {num_layers} layers; "
            "at most one device a layer"
        )
    largest = max(weights)
    weights = [weight / largest for weight in weights]  # sums of huge ones would overflow
    total, running, cuts = math.fsum(weights), 0.0, [0]
    for i, weight in enumerate(weights):
        running += weight
        cut = round(num_layers * running / total)
        # Leave a layer for each shard before and after this cut.
        cuts.append(min(max(cut, cuts[-1] + 1), num_layers - (num_shards - 1 - i)))
    return tuple(itertools.pairwise(cuts))
