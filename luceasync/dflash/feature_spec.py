"""What a row of features is, and what may be written into a ring of them. Pure checks, in words.

Knows neither where the rows lie nor who keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """What one row holds: the residual stream after each of the target's layers `taps`, side by
    side. Raises ValueError for taps or a hidden size that cannot be.
    """

    taps: tuple[int, ...]
    hidden_size: int

    def __post_init__(self) -> None:
        if not self.taps or min(self.taps) < 0 or len(set(self.taps)) != len(self.taps):
            raise ValueError(f"taps {list(self.taps)}: different layers, 0 or more, are expected")
        if self.hidden_size < 1:
            raise ValueError(f"hidden size {self.hidden_size}: a positive number is expected")

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return len(self.taps) * self.hidden_size


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise ValueError unless rows can be of `dtype`."""
    if dtype not in FLOATS:
        names = ", ".join(str(known).removeprefix("torch.") for known in FLOATS)
        raise ValueError(f"{name}: {dtype}; one of {names} is expected")


def check_lane(lane: int, num_lanes: int) -> None:
    """Raise ValueError unless `lane` is one of `num_lanes`."""
    if not 0 <= lane < num_lanes:
        raise ValueError(f"lane {lane}: 0 to {num_lanes - 1} are there")


def check_taps(spec: FeatureSpec, taps: Sequence[Tensor]) -> None:
    """Raise ValueError unless there is a tensor [entries, rows, hidden] for each tap, all alike."""
    if len(taps) != len(spec.taps):
        raise ValueError(
            f"{len(taps)} taps came; layers {list(spec.taps)} are expected, a tap each"
        )
    shape = (*taps[0].shape[:2], spec.hidden_size)
    for number, tap in enumerate(taps):
        check_dtype(f"tap {number}", tap.dtype)
        if tap.ndim != 3 or tap.shape != shape or tap.dtype != taps[0].dtype:
            raise ValueError(
                f"tap {number} is {tap.dtype} {tuple(tap.shape)}; "
                f"{taps[0].dtype} {shape} is expected"
            )


def check_index(
    name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Raise ValueError unless the tensor is contiguous, on `device`, and of this dtype and
    shape.
    """
    found = (tensor.dtype, tuple(tensor.shape), tensor.device)
    if found != (dtype, shape, device) or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: {found[0]} {found[1]} on {found[2]}; "
            f"contiguous {dtype} {shape} on {device} is expected"
        )


def check_rows(
    num_lanes: int,
    num_entries: int,
    num_rows: int,
    lanes: Sequence[int],
    begins: Sequence[int],
    paths: Sequence[Sequence[int]],
) -> None:
    """Raise ValueError unless every lane but padding is there and comes once, and its path takes
    rows of the taps, [num_entries, num_rows] of them, to positions of 0 or more.
    """
    if not len(lanes) == len(begins) == len(paths) == num_entries:
        raise ValueError(
            f"{len(lanes)} lanes, {len(begins)} begins and {len(paths)} paths for "
            f"{num_entries} entries of the taps"
        )
    real = [lane for lane in lanes if lane >= 0]
    if len(set(real)) != len(real):
        raise ValueError(f"lanes {list(lanes)}: each may come once")
    for lane, begin, path in zip(lanes, begins, paths, strict=True):
        if lane < 0:
            continue
        check_lane(lane, num_lanes)
        if begin < 0:
            raise ValueError(f"lane {lane} begins at position {begin}: 0 or more is expected")
        if path and not 0 <= min(path) <= max(path) < num_rows:
            raise ValueError(
                f"lane {lane} takes rows {min(path)} to {max(path)} of taps with {num_rows}"
            )
