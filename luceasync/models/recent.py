"""The newest rows of every lane, in rings, and what they say of chunks when they look at them.

Owns the rings of one shard, and from which position on each is filled. Knows no kind of layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from luceasync.models.mixers.mixer import Mixer, ProbeBody, RecentSpec, State
from luceasync.models.precision import Precision


class RecentRows:
    """Static rings of layers with these mixers: [layers, lanes + 1, newest, ...] of each kind that
    has one, with an extra lane for padding entries. `layers` are views, empty where there is none.
    """

    def __init__(
        self, mixers: Sequence[Mixer], *, num_lanes: int, precision: Precision, device: torch.device
    ) -> None:
        self.stacked: dict[Mixer, State] = {}
        for mixer in dict.fromkeys(mixers):
            self.stacked[mixer] = ()
            if (recent := mixer.recent) is not None:
                shape = (mixers.count(mixer), num_lanes + 1, *recent.ring.shape)
                dtype = precision.torch_dtype(recent.ring.role)
                self.stacked[mixer] = (torch.zeros(shape, dtype=dtype, device=device),)
        views: dict[Mixer, Iterator[State]] = {
            mixer: zip(*stack, strict=True) for mixer, stack in self.stacked.items() if stack
        }
        self.layers: list[State] = [
            next(views[mixer]) if mixer in views else () for mixer in mixers
        ]
        self._filled = [range(0)] * num_lanes

    @property
    def num_bytes(self) -> int:
        return sum(ring.nbytes for stack in self.stacked.values() for ring in stack)

    def filled(self, lane: int) -> range:
        """Positions of the lane's rows that were run one after the other: the newest are here."""
        return self._filled[lane]

    def ran(self, lane: int, begin: int, end: int) -> None:
        """Rows of positions `[begin, end)` were run and kept."""
        filled = self._filled[lane]
        goes_on = filled.start <= begin <= filled.stop and len(filled) > 0
        self._filled[lane] = range(filled.start if goes_on else begin, end)

    def reset(self, lane: int) -> None:
        """The lane begins anew, or goes on from elsewhere."""
        self._filled[lane] = range(0)

    def close(self) -> None:
        """Let the tensors go. May be called twice."""
        self.layers.clear()
        self.stacked.clear()


class LayerProbe:
    """One layer's newest rows of a lane that stands after `num_tokens` look at rows as they come
    by.
    """

    def __init__(
        self, kind: RecentSpec, body: ProbeBody, filled: range, num_tokens: int, chunk_tokens: int
    ) -> None:
        """`filled`: positions of the rows in the ring, of which the newest are there."""
        self._body = body
        self._filled = filled
        self._chunk_tokens = chunk_tokens
        self._shape = (kind.num_heads, kind.ring.shape[0], -(-num_tokens // chunk_tokens))
        self._scores: Tensor | None = None  # float32 [heads, newest, chunks]

    def probe(self, recent: Tensor, rows: Tensor, begin: int) -> None:
        if self._scores is None:
            self._scores = torch.full(self._shape, -torch.inf, device=rows.device)
        end = self._filled.stop
        self._body.probe(recent, rows, begin, end, self._chunk_tokens, self._scores)

    def mass(self) -> Tensor:
        """What each chunk weighs; float32 [chunks]. See `masses`."""
        assert self._scores is not None, "nothing has come by"
        positions = ring_positions(self._shape[1], self._filled.stop, self._scores.device)
        return attention_mass(self._scores, positions >= self._filled.start)


def ring_positions(num_recent: int, num_tokens: int, device: torch.device) -> Tensor:
    """The position that each place of a ring holds, int64 [newest], of a lane that stands after
    `num_tokens`; negative: none yet.
    """
    last = num_tokens - 1
    return last - (last - torch.arange(num_recent, device=device)) % num_recent


def attention_mass(scores: Tensor, is_kept: Tensor) -> Tensor:
    """What each chunk weighs: its share of what a query sees, the most that any of the newest gives
    it, summed over heads.

    scores: float32 [heads, newest, chunks] of all chunks; is_kept: bool [newest]. Returns float32
    [chunks].
    """
    shares = scores.softmax(-1)
    return shares.masked_fill_(~is_kept[:, None], 0.0).amax(1).sum(0)
