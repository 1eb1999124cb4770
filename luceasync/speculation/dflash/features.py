"""The ring of features: the target's tap rows of every lane's last tokens, on the draft's device.

Owns the rows and which positions of a lane they belong to. A position's row lies at `position %
capacity`. Knows neither network, nor how a commit was decided, nor where snapshots are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from luceasync.pipeline.platform import Platform

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """A row of features: the residual stream after each of the target's layers `taps`, side by
    side. Raises ValueError for invalid taps or an invalid hidden size.
    """

    taps: tuple[int, ...]
    hidden_size: int

    def __post_init__(self) -> None:
        if not self.taps or min(self.taps) < 0 or len(set(self.taps)) != len(self.taps):
            raise ValueError(f"taps {list(self.taps)}: distinct layers, 0 or more, are expected")
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
    """Raise ValueError unless each lane but padding exists and comes once, and its path takes rows
    that the taps, [num_entries, num_rows], have, to positions of 0 or more.
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


# Writes tap rows into the ring: one kernel on CUDA, its torch twin elsewhere. Both write the same
# bits (for a NaN: a NaN), wait for nothing, and may be captured in a graph. Callers check.
# (taps, lanes, begins, counts, paths, store, capacity_tokens) -> rows, as torch_scatter does
Scatter = Callable[[Sequence[Tensor], Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]


def scatter_on(platform: Platform) -> Scatter:
    """The kernel if the platform has Triton, else torch."""

    def kernel() -> Scatter:
        from luceasync.kernels.feature_ring import gather_features

        return gather_features

    return platform.pick(torch=lambda: torch_scatter, triton=kernel)


def torch_scatter(
    taps: Sequence[Tensor],
    lanes: Tensor,
    begins: Tensor,
    counts: Tensor,
    paths: Tensor,
    store: Tensor,
    capacity_tokens: int,
) -> Tensor:
    """Write row `paths[e, j]` of entry e of every tap to the place of position `begins[e] + j`.

    taps: [entries, rows, hidden] each; lanes int32 [entries] (negative: padding), begins int64
    [entries], counts int32 [entries], paths int32 [entries, max_rows], of which `counts[e]` count;
    store [num_lanes * capacity + 1, taps * hidden]: position p of lane n lies in row n * capacity +
    p % capacity. Of more rows than `capacity_tokens` only the last are written. Returns the rows
    that were written, [entries, max_rows, taps * hidden] of the store's dtype; other rows are
    undefined.
    """
    j = torch.arange(paths.shape[1], device=store.device)
    counts = counts[:, None]
    keep = (lanes[:, None] >= 0) & (j < counts) & (j >= counts - capacity_tokens)
    place = lanes[:, None] * capacity_tokens + (begins[:, None] + j) % capacity_tokens
    # Shapes must not depend on values: rows that are not kept are written too, to the spare row.
    place = torch.where(keep, place, store.shape[0] - 1).flatten()
    row = torch.where(keep, paths, 0).long()
    entry = torch.arange(row.shape[0], device=store.device)[:, None]
    parts = store.unflatten(1, (len(taps), -1)).unbind(1)  # [places, hidden] of each tap
    rows = [tap[entry, row].to(store.dtype) for tap in taps]
    for part, written in zip(parts, rows, strict=True):
        part.index_copy_(0, place, written.flatten(0, 1))
    return torch.cat(rows, -1)


class LaneSpans:
    """Which positions of each lane a ring holds: the last `capacity_tokens` of a range without a
    gap. The process that has the ring keeps one, and so does the process that speaks to it.
    """

    def __init__(self, num_lanes: int, capacity_tokens: int) -> None:
        """Raises ValueError for sizes under 1."""
        if num_lanes < 1 or capacity_tokens < 1:
            raise ValueError(
                f"{num_lanes} lanes of {capacity_tokens} features: at least 1 of each is expected"
            )
        self.num_lanes = num_lanes
        self.capacity_tokens = capacity_tokens
        self._spans = [range(0)] * num_lanes  # written without a gap, overwritten since or not
        self._ends = [0] * num_lanes  # up to which positions may have been written since then

    def valid(self, lane: int) -> range:
        """Positions whose rows the lane holds. Raises ValueError for an unknown lane."""
        self.check_lane(lane)
        span, end = self._spans[lane], self._ends[lane]
        return range(min(max(span.start, end - self.capacity_tokens), span.stop), span.stop)

    def held(self, lane: int, begin: int, end: int) -> range:
        """The positions of `[begin, end)` that the lane holds, which a node of this span can keep.
        Empty unless they reach `end`, since the draft needs a context without a gap.
        """
        valid = self.valid(lane)
        first = max(begin, valid.start)
        return range(first, end) if first < end <= valid.stop else range(end, end)

    def advance(self, lane: int, begin: int, num_tokens: int, end: int = 0) -> None:
        """Note that rows of positions `[begin, begin + num_tokens)` were written, and perhaps more
        up to `end`, which do not count. A `begin` that is not the lane's end starts a new range.
        Raises ValueError.
        """
        self.check_lane(lane)
        if begin < 0 or num_tokens < 0:
            raise ValueError(f"{num_tokens} rows from position {begin}: 0 or more are expected")
        span, end = self._spans[lane], max(end, begin + num_tokens)
        goes_on = span.stop == begin
        self._spans[lane] = range(span.start if goes_on else begin, begin + num_tokens)
        self._ends[lane] = max(end, self._ends[lane]) if goes_on else end

    def reset(self, lane: int) -> None:
        """Forget the lane's rows."""
        self.check_lane(lane)
        self._spans[lane], self._ends[lane] = range(0), 0

    def check_lane(self, lane: int) -> None:
        """Raise ValueError unless the lane exists."""
        if not 0 <= lane < self.num_lanes:
            raise ValueError(f"lane {lane}: 0 to {self.num_lanes - 1} are there")


class FeatureRing:
    """Features of the last `capacity_tokens` positions of each lane, contiguous up to its end.

    `store` [num_lanes * capacity + 1, taps * hidden] is static: its address never changes, so that
    CUDA graphs may use it; the last row is spare. `dtype` is one of FLOATS.
    """

    def __init__(
        self,
        spec: FeatureSpec,
        *,
        num_lanes: int,
        capacity_tokens: int,
        dtype: torch.dtype,
        platform: Platform,
    ) -> None:
        """Raises ValueError for sizes under 1 or a dtype that is not one of FLOATS."""
        self._spans = LaneSpans(num_lanes, capacity_tokens)
        check_dtype("the ring", dtype)
        self.spec = spec
        self.num_lanes = num_lanes
        self.capacity_tokens = capacity_tokens
        num_rows = num_lanes * capacity_tokens + 1
        self.store = torch.zeros((num_rows, spec.width), dtype=dtype, device=platform.device)
        self.platform = platform
        self.device = self.store.device
        self._scatter = scatter_on(platform)

    def __repr__(self) -> str:
        held = ", ".join(f"{lane}: {self.valid(lane)}" for lane in range(self.num_lanes))
        return f"FeatureRing({self.capacity_tokens} rows a lane on {self.device}; {held})"

    @property
    def num_bytes(self) -> int:
        """Bytes of the store."""
        return self.store.numel() * self.store.element_size()

    @property
    def lanes(self) -> Tensor:
        """The rows by lane and place, a view [num_lanes, capacity, taps * hidden]."""
        return self.store[:-1].view(self.num_lanes, self.capacity_tokens, self.spec.width)

    def valid(self, lane: int) -> range:
        return self._spans.valid(lane)

    def held(self, lane: int, begin: int, end: int) -> range:
        return self._spans.held(lane, begin, end)

    def scatter(
        self, taps: Sequence[Tensor], lanes: Tensor, begins: Tensor, counts: Tensor, paths: Tensor
    ) -> Tensor:
        """Write rows of taps, without asking the device: may be captured in a CUDA graph.

        `taps`: for each tap [entries, rows, hidden] of a dtype of FLOATS, contiguous and on the
        ring's device. Entry e is lane `lanes[e]` (negative: padding, skipped); its position
        `begins[e] + j` takes row `paths[e, j]`, for the first `counts[e]` of a path. `lanes` int32
        [entries], `begins` int64 [entries], `counts` int32 [entries], `paths` int32 [entries,
        max_rows]. The caller checks their values with `check_rows`, and notes what was written with
        `advance`. Returns the rows that were written, [entries, max_rows, taps *
        hidden] of the ring's dtype; other rows are undefined. Raises ValueError for wrong shapes,
        dtypes and devices.
        """
        check_taps(self.spec, taps)
        num_entries = taps[0].shape[0]
        check_index("lanes", lanes, self.device, torch.int32, (num_entries,))
        check_index("begins", begins, self.device, torch.int64, (num_entries,))
        check_index("counts", counts, self.device, torch.int32, (num_entries,))
        num_rows = paths.numel() // max(num_entries, 1)
        check_index("paths", paths, self.device, torch.int32, (num_entries, num_rows))
        for number, tap in enumerate(taps):
            if tap.device != self.device or not tap.is_contiguous():
                raise ValueError(
                    f"tap {number} lies on {tap.device} with strides {tap.stride()}; "
                    f"a contiguous tensor on {self.device} is expected"
                )
        return self._scatter(taps, lanes, begins, counts, paths, self.store, self.capacity_tokens)

    def advance(self, lane: int, begin: int, num_tokens: int, end: int = 0) -> None:
        self._spans.advance(lane, begin, num_tokens, end)

    def rows(self, lane: int, begin: int, end: int) -> Tensor:
        """Rows of positions `[begin, end)`, [end - begin, taps * hidden] on the ring's device: a
        view unless they wrap around. Raises ValueError for positions that the lane does not hold.
        """
        pieces = self._pieces(lane, begin, end)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def restore(self, lane: int, begin: int, rows: Tensor) -> None:
        """Write rows of positions from `begin` on, which `rows` of this ring, or of one of another
        capacity, returned: [tokens, taps * hidden] of a dtype of FLOATS, on any device. A `begin`
        that is not the lane's end starts a new range. Raises ValueError.
        """
        self._spans.check_lane(lane)
        check_dtype("rows", rows.dtype)
        if rows.ndim != 2 or rows.shape[1] != self.spec.width:
            raise ValueError(f"rows {tuple(rows.shape)}: [tokens, {self.spec.width}] is expected")
        self.advance(lane, begin, len(rows))
        end = begin + len(rows)
        first = max(begin, end - self.capacity_tokens)
        pieces = self._pieces(lane, first, end)
        for part, piece in zip(
            rows[first - begin :].split([len(p) for p in pieces]), pieces, strict=True
        ):
            piece.copy_(part, non_blocking=True)

    def reset(self, lane: int) -> None:
        """Forget the lane's rows."""
        self._spans.reset(lane)

    def _pieces(self, lane: int, begin: int, end: int) -> list[Tensor]:
        """The rows of held positions `[begin, end)` as one view, or two where they wrap around."""
        valid = self.valid(lane)
        if not valid.start <= begin <= end <= valid.stop:
            raise ValueError(
                f"positions [{begin}, {end}) of lane {lane}: [{valid.start}, {valid.stop}) are held"
            )
        place = begin % self.capacity_tokens
        rest = place + (end - begin) - self.capacity_tokens
        lane_rows = self.lanes[lane]
        if rest <= 0:
            return [lane_rows[place : place + end - begin]]
        return [lane_rows[place:], lane_rows[:rest]]
