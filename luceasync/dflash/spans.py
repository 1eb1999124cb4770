"""Which positions of each lane a ring of features holds. Pure: no rows, no torch.

The process that has the ring keeps one, and so does one that speaks to it.
"""

from __future__ import annotations


class LaneSpans:
    """Of each lane positions without a gap, of which the last `capacity_tokens` count."""

    def __init__(self, num_lanes: int, capacity_tokens: int) -> None:
        """Raises ValueError for sizes under 1."""
        if num_lanes < 1 or capacity_tokens < 1:
            raise ValueError(
                f"{num_lanes} lanes of {capacity_tokens} features: at least 1 of each is expected"
            )
        self.num_lanes = num_lanes
        self.capacity_tokens = capacity_tokens
        self._spans = [range(0)] * num_lanes  # written without a gap, also what is overwritten now

    def valid(self, lane: int) -> range:
        """Positions whose rows the lane holds. Raises ValueError for a lane that is not there."""
        self.check_lane(lane)
        span = self._spans[lane]
        return range(max(span.start, span.stop - self.capacity_tokens), span.stop)

    def held(self, lane: int, begin: int, end: int) -> range:
        """The positions of `[begin, end)` that the lane holds: what a node of this span can
        carry. Empty unless they reach `end`, since the draft needs a context without a gap.
        """
        valid = self.valid(lane)
        first = max(begin, valid.start)
        return range(first, end) if first < end <= valid.stop else range(end, end)

    def advance(self, lane: int, begin: int, num_tokens: int) -> None:
        """Take note that rows of positions `[begin, begin + num_tokens)` were written.

        A `begin` that is not the lane's end starts its range anew. Raises ValueError.
        """
        self.check_lane(lane)
        if begin < 0 or num_tokens < 0:
            raise ValueError(f"{num_tokens} rows from position {begin}: 0 or more are expected")
        span = self._spans[lane]
        self._spans[lane] = range(span.start if span.stop == begin else begin, begin + num_tokens)

    def reset(self, lane: int) -> None:
        """Forget the lane's rows."""
        self.check_lane(lane)
        self._spans[lane] = range(0)

    def check_lane(self, lane: int) -> None:
        """Raise ValueError unless the lane is there."""
        if not 0 <= lane < self.num_lanes:
            raise ValueError(f"lane {lane}: 0 to {self.num_lanes - 1} are there")
