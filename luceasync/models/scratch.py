"""Scratch of a verify pass: what its rows leave until a path is committed, in static tensors.

Owns the rows that kinds of layers request. Its size depends on rows and widths, never on a whole
recurrent state. Does not know lanes or positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from luceasync.kv.state import StateTensor
from luceasync.models.mixers.mixer import Mixer, State
from luceasync.models.precision import Precision


@dataclass(frozen=True, slots=True)
class ShapedScratch:
    """Scratch viewed in the shape of one pass, [(layers,) entries, rows, ...]: stacked by mixer,
    and layer by layer.
    """

    stacked: dict[Mixer, State]
    layers: list[State]


class VerifyScratch:
    """Scratch for a verify pass of any shape over layers with these mixers."""

    def __init__(
        self,
        mixers: Sequence[Mixer],
        *,
        num_rows: int,
        precision: Precision,
        device: torch.device,
        with_recent: bool = False,
    ) -> None:
        """`num_rows`: of all entries together. `with_recent`: also keep the rows for the rings of
        newest rows, see luceasync.models.recent.
        """
        self._mixers = tuple(mixers)
        self._rows: dict[Mixer, list[Tensor]] = {
            mixer: [
                torch.zeros(
                    (self._mixers.count(mixer), num_rows, *tensor.shape),
                    dtype=precision.torch_dtype(tensor.role),
                    device=device,
                )
                for tensor in scratch_of(mixer, with_recent=with_recent)
            ]
            for mixer in dict.fromkeys(self._mixers)
        }
        self._shaped: dict[tuple[int, int], ShapedScratch] = {}

    @property
    def num_bytes(self) -> int:
        return sum(rows.nbytes for stack in self._rows.values() for rows in stack)

    def shaped(self, num_entries: int, num_rows: int) -> ShapedScratch:
        """Views for a pass of `num_entries` entries of `num_rows` rows."""
        shape = num_entries, num_rows
        if shape not in self._shaped:
            self._shaped[shape] = self._shape(shape)
        return self._shaped[shape]

    def _shape(self, shape: tuple[int, int]) -> ShapedScratch:
        stacked = {
            mixer: tuple(_view(rows, shape) for rows in stack)
            for mixer, stack in self._rows.items()
        }
        layers: dict[Mixer, Iterator[State]] = {
            mixer: iter(zip(*stack, strict=True)) for mixer, stack in stacked.items()
        }
        return ShapedScratch(stacked, [next(layers[mixer], ()) for mixer in self._mixers])

    def close(self) -> None:
        """Free the tensors. May be called twice."""
        self._shaped.clear()
        self._rows.clear()


def scratch_of(mixer: Mixer, *, with_recent: bool) -> tuple[StateTensor, ...]:
    """What a verified row of a layer leaves."""
    recent = (mixer.recent.scratch,) if with_recent and mixer.recent is not None else ()
    return (*mixer.scratch, *recent)


def _view(rows: Tensor, shape: tuple[int, int]) -> Tensor:
    """[layers, all rows, ...] -> [layers, entries, rows, ...]."""
    num_entries, num_rows = shape
    view: Tensor = rows[:, : num_entries * num_rows].unflatten(1, shape)
    return view
