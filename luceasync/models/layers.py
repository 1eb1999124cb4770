"""A decoder layer: what mixes tokens, then a feed-forward network. Knows no kind of either."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from luceasync.models.feed_forward.feed_forward import FeedForwardLayer
from luceasync.models.mixers.mixer import MixerLayer, State
from luceasync.models.pass_rows import Rows
from luceasync.models.trees import Trees


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; it holds its weights, the state that it reads and writes is handed in."""

    mixer: MixerLayer
    feed_forward: FeedForwardLayer

    def forward(self, x: Tensor, state: State, rows: Rows) -> Tensor:
        """x: [entries, rows, hidden], the residual stream; `state` moves on in place."""
        return self.feed_forward.forward(self.mixer.forward(x, state, rows))

    def verify(self, x: Tensor, state: State, rows: Rows, trees: Trees, scratch: State) -> Tensor:
        """As `forward`, for rows that form trees; see MixerLayer.verify."""
        return self.feed_forward.forward(self.mixer.verify(x, state, rows, trees, scratch))

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return self.mixer.num_bytes + self.feed_forward.num_bytes
