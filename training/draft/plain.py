"""Unquantised weights from any stored format: training needs matrices that can be multiplied in
both directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from luceasync.models.encodings import (
    DenseEncoding,
    Encoding,
    NumbersInMemory,
    Shape,
    WeightPlacement,
)
from luceasync.models.layer_reader import whole
from luceasync.models.loader import TensorSource


class PlainSource:
    """A TensorSource with the unpacked matrices of another one."""

    def __init__(self, source: TensorSource, place: WeightPlacement) -> None:
        self._source = source
        self._place = place

    def encoding(self, name: str) -> Encoding:
        return DenseEncoding()

    def read(self, name: str, shape: Shape) -> torch.Tensor:
        return self._source.read(name, shape)

    def stored(self, name: str, shape: Shape) -> Any:
        encoding = self._source.encoding(name)
        if isinstance(encoding, DenseEncoding):
            return self._source.stored(name, shape)
        stack = encoding.stack(shape, self._place)
        stack.fill(0, self._source.stored(name, shape), whole)
        rows = torch.arange(shape[0], device=self._place.device)
        return NumbersInMemory(name, stack.table().lookup(rows))

    def stored_together(self, names: Sequence[str], shape: Shape) -> Iterator[tuple[int, Any]]:
        return ((1, self.stored(name, shape)) for name in names)
