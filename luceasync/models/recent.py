"""Rings of every lane's newest rows, and the attention mass of chunks that they compute.

Owns the rings of one shard and from which position on each is filled. Does not know kinds of
layers.

    ring of 4 rows, lane at 6 tokens:   place     0  1  2  3
                                        position  4  5  2  3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from luceasync.models.mixers.mixer import Mixer, ProbeBody, RecentSpec, State
from luceasync.models.precision import Precision


class RecentRows:
    """Static rings of the layers whose mixers have one: [layers, lanes + 1, newest, ...] of each
    kind, with an extra lane for padding entries. `layers` are views, empty without a ring.
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
        """From which position on the ring is filled without a gap up to the lane's end. It holds
        the newest of these positions."""
        return self._filled[lane]

    def note_run(self, lane: int, begin: int, end: int) -> None:
        """Record that rows of positions `[begin, end)` were run and written to the ring."""
        filled = self._filled[lane]
        goes_on = filled.start <= begin <= filled.stop and len(filled) > 0
        self._filled[lane] = range(filled.start if goes_on else begin, end)

    def reset(self, lane: int) -> None:
        """The lane restarts, or continues from elsewhere."""
        self._filled[lane] = range(0)

    def close(self) -> None:
        """Free the tensors. May be called twice."""
        self.layers.clear()
        self.stacked.clear()


class LayerProbe:
    """A probe of one layer: the newest rows of a lane with `num_tokens` tokens score blocks of rows
    as they stream by.
    """

    def __init__(
        self, kind: RecentSpec, body: ProbeBody, filled: range, num_tokens: int, chunk_tokens: int
    ) -> None:
        """`filled`: the positions that are filled without a gap, see RecentRows.filled."""
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
        """The attention mass of each chunk: float32 [chunks]."""
        assert self._scores is not None, "no block was scored"
        positions = ring_positions(self._shape[1], self._filled.stop, self._scores.device)
        return attention_mass(self._scores, positions >= self._filled.start)


def ring_positions(num_recent: int, num_tokens: int, device: torch.device) -> Tensor:
    """The position at each place of a ring, int64 [newest], for a lane with `num_tokens` tokens;
    negative: none yet."""
    last = num_tokens - 1
    return last - (last - torch.arange(num_recent, device=device)) % num_recent


def attention_mass(scores: Tensor, is_kept: Tensor) -> Tensor:
    """Attention mass of each chunk: the largest share that any of the newest queries gives it,
    summed over heads.

    scores: float32 [heads, newest, chunks], log-sums over all chunks; is_kept: bool [newest].
    Returns float32 [chunks].
    """
    shares = scores.softmax(-1)
    return shares.masked_fill_(~is_kept[:, None], 0.0).amax(1).sum(0)
