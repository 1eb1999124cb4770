"""Grouped-query attention to a window of the newest tokens: its state, and its implementations.

The window is state of the end, so a lane's bytes do not grow, and a node's end holds everything
that the next token needs. Does not import torch at its top.
"""

from __future__ import annotations

from dataclasses import dataclass

from luceasync.kv.state import StateTensor
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.attention_sizes import AttentionBody

END_KINDS = WINDOW_K, WINDOW_V = "window_k", "window_v"  # snapshot names of the end state


@dataclass(frozen=True, slots=True)
class SlidingSpec(AttentionSpec):
    """The Mixer of attention in which a token sees itself and the `window` - 1 tokens before it.

    A lane keeps a ring of `window` rows, that of position p at place p % window:

        window 4, lane at 6 tokens:   place     0  1  2  3
                                      position  4  5  2  3
    """

    @property
    def rows(self) -> tuple[StateTensor, ...]:
        return ()

    @property
    def end(self) -> tuple[StateTensor, ...]:
        ring = (self.window, self.num_kv_heads, self.head_dim)
        # A row replaces the one that has just left its window, so another row run in its place sees
        # the same window.
        how = {"has_spare": False, "can_rerun": True}
        return tuple(StateTensor(kind, ring, "kv", **how) for kind in (WINDOW_K, WINDOW_V))

    @property
    def scratch(self) -> tuple[StateTensor, ...]:
        heads = (self.num_kv_heads, self.head_dim)
        return StateTensor(WINDOW_K, heads, "kv"), StateTensor(WINDOW_V, heads, "kv")

    @property
    def recent(self) -> None:
        """None: no part of a window is ever absent."""
        return None

    def torch_body(self) -> AttentionBody:
        from luceasync.models.mixers.sliding_torch import TorchSliding

        return TorchSliding(self)

    def triton_body(self) -> AttentionBody:
        from luceasync.models.mixers.sliding_triton import TritonSliding

        return TritonSliding(self)

    def compiled_body(self) -> AttentionBody:
        from luceasync.models.mixers.attention_compiled import can_attend
        from luceasync.models.mixers.sliding_compiled import CompiledSliding

        return CompiledSliding(self) if can_attend(self) else self.torch_body()
