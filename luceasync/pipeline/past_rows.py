"""What a chunk of a prompt sees before itself, where some of it is not on the device: blocks of
every layer, in order. Knows no mixer: it names the tensors that a kind declares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from luceasync.hoststore.staging import Block, Staging
from luceasync.kv.state import Keeps
from luceasync.pipeline.looks import PassingLook


@dataclass(frozen=True, slots=True)
class PastRows:
    """Of all layers; `passing`: who takes up what comes by."""

    staging: Staging
    blocks: Sequence[Block]
    passing: PassingLook | None

    def of(self, layer: int, kind: Keeps) -> LayerPast:
        """What the model's layer, of this kind, sees."""
        return LayerPast(self, layer, [tensor.name for tensor in kind.rows])


@dataclass(frozen=True, slots=True)
class LayerPast:
    """See luceasync.models.pass_rows.Past."""

    past: PastRows
    layer: int
    names: Sequence[str]

    def blocks(self) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """See Past."""
        return self.past.staging.rows(self.past.blocks, self.layer, self.names)

    def look(self, recent: Tensor, rows: Tensor, begin: int) -> None:
        """See Past."""
        if self.past.passing is not None:
            self.past.passing.look(self.layer, recent, rows, begin)
