"""The ring of features: the target's tap rows of every lane's last tokens, on the draft's device.

Owns the rows and which positions of a lane they belong to. A position's row lies at `position %
capacity`. Knows neither network, nor how a commit was decided, nor where snapshots are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from luceasync.dflash.feature_spec import (
    FeatureSpec,
    check_dtype,
    check_index,
    check_taps,
)
from luceasync.dflash.scatter import scatter_on
from luceasync.dflash.spans import LaneSpans
from luceasync.pipeline.platform import Platform


class FeatureRing:
    """Features of the last `capacity_tokens` positions of each lane, contiguous up to its end.

    `store` [num_lanes * capacity + 1, taps * hidden] is static: its address never changes, so that
    CUDA graphs may hold it; the last row belongs to nobody. `dtype` is one of FLOATS.
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
        """Raises ValueError for sizes under 1 or a dtype that no row can have."""
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
        """See LaneSpans."""
        return self._spans.valid(lane)

    def held(self, lane: int, begin: int, end: int) -> range:
        """See LaneSpans."""
        return self._spans.held(lane, begin, end)

    def scatter(
        self, taps: Sequence[Tensor], lanes: Tensor, begins: Tensor, counts: Tensor, paths: Tensor
    ) -> Tensor:
        """Write rows of taps, without asking the device: may be captured in a CUDA graph.

        `taps`: for each tap [entries, rows, hidden] of a dtype of FLOATS, contiguous and on the
        ring's device. Entry e is lane `lanes[e]` (negative: padding, skipped); its position
        `begins[e] + j` takes row `paths[e, j]`, for the first `counts[e]` of a path. `lanes` int32
        [entries], `begins` int64 [entries], `counts` int32 [entries], `paths` int32 [entries,
        max_rows]. The caller answers for their values, see `check_rows`, and says afterwards what
        was written with `advance`. Returns the rows that were written, [entries, max_rows, taps *
        hidden] of the ring's dtype; the others are anything. Raises ValueError for shapes, dtypes
        and devices that do not fit.
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

    def advance(self, lane: int, begin: int, num_tokens: int) -> None:
        """See LaneSpans."""
        self._spans.advance(lane, begin, num_tokens)

    def rows(self, lane: int, begin: int, end: int) -> Tensor:
        """Rows of positions `[begin, end)`, [end - begin, taps * hidden] on the ring's device: a
        view unless they wrap around. Raises ValueError for positions that are not held.
        """
        pieces = self._pieces(lane, begin, end)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def restore(self, lane: int, begin: int, rows: Tensor) -> None:
        """Write rows of positions from `begin` on, as `rows` gave them, of this ring or one of
        another capacity. `rows`: [tokens, taps * hidden] of a dtype of FLOATS, on any device.
        A `begin` that is not the lane's end starts its range anew. Raises ValueError.
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
