"""Random quantised matrices, for benchmarks without a model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from luceasync.models.encodings import Select, Shape
from luceasync.models.quant.layout import Component, QuantLayout
from luceasync.models.quant.packed import DTYPES, Packed, empty

SLICE_ROWS = 4096
MEAN_SMALL = 32  # of s and m, which range from 16 to 48


@dataclass(frozen=True, slots=True)
class RandomModule:
    """A StoredQuantised of random numbers of about columns ** -0.5, so that activations keep their
    size.
    """

    label: str
    layout: QuantLayout
    shape: Shape
    generator: torch.Generator

    def packed(self, select: Select, place: object = None) -> Iterator[Packed]:
        """Random rows, as many as `select` picks."""
        num_rows, num_columns = self.shape
        num_rows = len(select(torch.empty(num_rows, 1)))
        for begin in range(0, num_rows, SLICE_ROWS):
            rows = min(SLICE_ROWS, num_rows - begin)
            parts = self.layout.components(num_columns)
            yield Packed(self.layout, **{part.name: self._numbers(part, rows) for part in parts})

    def _numbers(self, part: Component, num_rows: int) -> Tensor:
        shape, device = (num_rows, *part.shape), self.generator.device
        if part.name in ("codes", "planes"):
            high = 0x70 if part.kind == "e4m3" else 256  # no NaN
            made = torch.randint(0, high, shape, generator=self.generator, device=device)
            return made.to(torch.uint8).view(DTYPES[part.kind])
        if part.name.startswith("small"):
            low, high = MEAN_SMALL // 2, MEAN_SMALL * 3 // 2 + 1
            made = torch.randint(low, high, shape, generator=self.generator, device=device)
            return made.to(DTYPES[part.kind])
        scale, mean = self._scale()
        if part.kind == "e8m0":
            exponent = 128 + round(torch.tensor(scale).log2().item())
            return torch.full(shape, exponent, dtype=torch.uint8, device=device)
        value = scale * mean if part.name == "minimums" else scale
        return torch.full(shape, value, dtype=DTYPES[part.kind], device=device)

    def _scale(self) -> tuple[float, float]:
        """D, and the mean of a code."""
        layout = self.layout
        if layout.table:
            codes = torch.tensor(layout.table, dtype=torch.float32)
        elif layout.codes == "e4m3":
            codes = torch.arange(0x70, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        elif layout.codes == "int8":
            codes = torch.arange(-128, 128).float()
        else:
            codes = torch.arange(1 << layout.bits).float() - layout.zero
        spread = codes.square().mean().sqrt() if layout.minimum == "none" else codes.std()
        small = MEAN_SMALL if layout.small else 1.0
        scale = self.shape[1] ** -0.5 / (float(spread) * small)
        return (1 / scale if layout.divides else scale), float(codes.mean())


def random_packed(layout: QuantLayout, shape: Shape, generator: torch.Generator) -> Packed:
    """A whole random matrix, on the generator's device."""
    room = empty(layout, shape[0], shape[1], generator.device)
    begin = 0
    for part in RandomModule(layout.name, layout, shape, generator).packed(lambda rows: rows):
        end = begin + part.shape[0]
        for name, tensor in room.rows(begin, end).tensors.items():
            tensor.copy_(part.tensors[name])
        begin = end
    return room
