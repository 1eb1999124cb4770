"""What a verify pass leaves behind until a path of it is committed, in static tensors.

Owns the rows' keys and values, inputs of convolutions and updates of delta states; its size knows
rows and widths, never a whole delta state. Knows no lanes and no positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from luceasync.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Keys and values of every row: [(layers,) entries, rows, kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class DeltaScratch:
    """What a path needs to become state, [(layers,) entries, rows, ...]: inputs of the convolution
    [channels], and in float32 keys [key_heads, key_dim], updates u [value_heads, value_dim] and
    the log decay since the committed end [value_heads].
    """

    inputs: Tensor
    keys: Tensor
    updates: Tensor
    totals: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.inputs, self.keys, self.updates, self.totals


Scratch = AttentionScratch | DeltaScratch


@dataclass(frozen=True, slots=True)
class ShapedScratch:
    """The scratch of one shape of pass: of each kind of layer that is here, all together, and layer
    by layer.
    """

    stacked: dict[str, Scratch]
    layers: list[Scratch]


class VerifyScratch:
    """Room for the rows of one verify pass at `layers`, whatever its shape is."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: range,
        *,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_rows`: of all entries together."""
        self._kinds = [spec.layer_types[layer] for layer in layers]
        num_attention, num_delta = self._kinds.count("attention"), self._kinds.count("delta")
        head, delta = (spec.attention.num_kv_heads, spec.attention.head_dim), spec.delta
        inputs, small = [(0,)], [(0,)] * 3  # of models without such layers
        if delta is not None:
            inputs = [(delta.conv_channels,)]
            heads = delta.num_value_heads
            small = [(delta.num_key_heads, delta.key_dim), (heads, delta.value_dim), (heads,)]
        self._attention = _rows(num_attention, num_rows, [head, head], dtype, device)
        self._delta = _rows(num_delta, num_rows, inputs, dtype, device)
        self._delta += _rows(num_delta, num_rows, small, torch.float32, device)
        self._shaped: dict[tuple[int, int], ShapedScratch] = {}

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in [*self._attention, *self._delta])

    def shaped(self, num_entries: int, num_rows: int) -> ShapedScratch:
        """Views for a pass of so many entries of so many rows each."""
        shape = num_entries, num_rows
        if shape not in self._shaped:
            self._shaped[shape] = self._shape(shape)
        return self._shaped[shape]

    def _shape(self, shape: tuple[int, int]) -> ShapedScratch:
        attention = [_view(t, shape) for t in self._attention]
        delta = [_view(t, shape) for t in self._delta]
        layers: dict[str, Iterator[Scratch]] = {
            "attention": (AttentionScratch(*of) for of in zip(*attention, strict=True)),
            "delta": (DeltaScratch(*of) for of in zip(*delta, strict=True)),
        }
        stacked = {"attention": AttentionScratch(*attention), "delta": DeltaScratch(*delta)}
        return ShapedScratch(
            {kind: scratch for kind, scratch in stacked.items() if kind in self._kinds},
            [next(layers[kind]) for kind in self._kinds],
        )

    def close(self) -> None:
        """Let the tensors go. May be called twice."""
        self._shaped.clear()
        self._attention.clear()
        self._delta.clear()


def _rows(
    num_layers: int,
    num_rows: int,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    return [torch.zeros((num_layers, num_rows, *s), dtype=dtype, device=device) for s in shapes]


def _view(rows: Tensor, shape: tuple[int, int]) -> Tensor:
    """[layers, all rows, ...] -> [layers, entries, rows, ...]."""
    num_entries, num_rows = shape
    return rows[:, : num_entries * num_rows].unflatten(1, shape)
