"""The Encoding of quantised weights. Does not import torch at its top."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from luceasync.models.encodings import Shape, WeightPlacement
from luceasync.models.precision import Precision
from luceasync.models.quant.layout import QuantLayout

if TYPE_CHECKING:
    from luceasync.models.quant.stack import QuantStack


@dataclass(frozen=True, slots=True)
class QuantEncoding(QuantLayout):
    """A quantised layout as an Encoding: its sizes, and where its tensors are read."""

    def num_bytes(self, shape: Shape, precision: Precision) -> int:
        return sum(part.num_bytes(shape[0]) for part in self.components(shape[1]))

    def type_name(self, shape: Shape, precision: Precision) -> str:
        return self.name

    def stack(self, shape: Shape, place: WeightPlacement) -> QuantStack:
        from luceasync.models.quant.stack import QuantStack

        return QuantStack(self, shape, place)
