"""Weights in GGUF files.

Knows how numbers are stored, and undoes the converter's reordering of rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from luceasync.errors import ModelError
from luceasync.gguf.header import TensorType
from luceasync.gguf.layout import AxisSwap
from luceasync.gguf.model import read_model
from luceasync.models.encodings import (
    Encoding,
    RowTransfer,
    Select,
    Shape,
    StoredRows,
    WeightFile,
    WeightPlacement,
    check_finite,
)
from luceasync.models.gguf_model import GgufContents, GgufTensor, read_gguf
from luceasync.models.quant import ggml
from luceasync.models.quant.encoding import QuantEncoding

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from luceasync.models.quant.packed import Packed


class GgufWeights:
    """The StoredWeights of a GGUF file."""

    def __init__(self, contents: GgufContents) -> None:
        self._contents = contents

    @property
    def paths(self) -> list[Path]:
        return list(self._contents.model.paths)

    def encoding(self, name: str) -> Encoding:
        return self._contents.stored[name].encoding

    def holds(self, name: str) -> bool:
        return name in self._contents.stored

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """No-op: `read_gguf` has checked every tensor of the spec."""

    def check_unused(self, shapes: Mapping[str, Shape]) -> None:
        """No-op: `read_gguf` has checked every tensor of the file."""

    def is_tied(self, head: str, embedding: str) -> bool:
        return head not in self._contents.stored

    @contextmanager
    def open(self) -> Iterator[GgufSource]:
        contents = self._contents
        if contents.model.has_changed():
            contents = read_gguf(read_model(contents.model.path))
        with ExitStack() as closing:
            files = {path: WeightFile(path) for path in contents.model.paths}
            for file in files.values():
                closing.callback(file.close)
            yield GgufSource(contents.model.path, contents.stored, files)


class GgufSource:
    """A TensorSource, as long as the files are open."""

    def __init__(
        self, path: Path, stored: Mapping[str, GgufTensor], files: Mapping[Path, WeightFile]
    ) -> None:
        """`path`: of the first part; `stored`: its tensors by the names of the spec."""
        self._path = path
        self._stored = stored
        self._files = files

    def encoding(self, name: str) -> Encoding:
        return self._found(name).encoding

    def read(self, name: str, shape: Shape) -> Tensor:
        import torch

        found = self._found(name, shape)
        plain = _plain(found, self._rows([found]))
        raw = torch.empty((len(plain.rows), plain.rows.row_bytes), dtype=torch.uint8)
        plain.rows.read(0, len(raw), raw)
        numbers = plain.in_order(raw).reshape(shape)
        check_finite(numbers, plain.label)
        return numbers

    def stored(self, name: str, shape: Shape) -> PlainNumbers | QuantBlocks:
        return self._together([self._found(name, shape)])

    def stored_together(
        self, names: Sequence[str], shape: Shape
    ) -> Iterator[tuple[int, PlainNumbers | QuantBlocks]]:
        found = (self._found(name, shape) for name in names)
        for _, alike in groupby(found, lambda each: (each.path, each.tensor.name)):
            parts = list(alike)
            yield len(parts), self._together(parts)

    def _together(self, parts: Sequence[GgufTensor]) -> PlainNumbers | QuantBlocks:
        """Rows of one tensor, one part after the other."""
        stored, rows = parts[0], self._rows(parts)
        if isinstance(encoding := stored.encoding, QuantEncoding):
            kind, columns = stored.tensor.type, stored.orders.columns
            return QuantBlocks(_label(stored), encoding, rows, kind, columns)
        return _plain(stored, rows)

    def _found(self, name: str, shape: Shape | None = None) -> GgufTensor:
        stored = self._stored.get(name)
        if stored is None:
            raise ModelError(f"{self._path}: there is no tensor for {name!r}")
        if shape is not None and stored.shape != shape:
            raise ModelError(f"{stored.path}: {name!r} has shape {stored.shape}, expected {shape}")
        return stored

    def _rows(self, parts: Sequence[GgufTensor]) -> StoredRows:
        """The rows of parts of a tensor, in the order of the spec; nothing is read yet."""
        import torch

        stored, order = parts[0], parts[0].orders.rows
        tensor, num_rows = stored.tensor, stored.shape[0]
        row_bytes = tensor.num_bytes * prod(stored.shape[1:]) // prod(tensor.shape)
        begins = torch.tensor([part.begin for part in parts])
        numbers = (begins[:, None] + torch.arange(num_rows)).flatten()
        rows = StoredRows(self._files[stored.path], tensor.begin, row_bytes, numbers)
        return rows if order is None else rows.selected(lambda each: _moved(each, order))


def _plain(stored: GgufTensor, rows: StoredRows) -> PlainNumbers:
    import torch

    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return PlainNumbers(
        _label(stored), rows, dtypes[stored.tensor.type.name], stored.orders.columns
    )


def _label(stored: GgufTensor) -> str:
    return f"{stored.path}: {stored.tensor.name!r}"


@dataclass(frozen=True, slots=True)
class PlainNumbers:
    """Plain numbers as they are stored: a StoredNumbers. `columns`: their reordering."""

    label: str
    rows: StoredRows
    dtype: torch.dtype
    columns: AxisSwap | None

    def numbers(self, select: Select, place: WeightPlacement) -> Iterator[Tensor]:
        return map(self.in_order, place.transfer.pieces(self.rows.selected(select)))

    def in_order(self, piece: Tensor) -> Tensor:
        """The numbers of uint8 [n, bytes of a row], in the order of the spec."""
        numbers = piece.view(self.dtype)
        return numbers if self.columns is None else _moved(numbers.t(), self.columns).t()


@dataclass(frozen=True, slots=True)
class QuantBlocks:
    """A quantised matrix as it is stored: a StoredQuantised. `columns`: their reordering."""

    label: str
    encoding: QuantEncoding
    rows: StoredRows
    kind: TensorType
    columns: AxisSwap | None

    def packed(self, select: Select, place: WeightPlacement) -> Iterator[Packed]:
        from luceasync.models.quant.stack import with_columns_moved, with_smaller_supergroups

        for packed in self._as_stored(select, place.transfer):
            if packed.layout.bits != self.encoding.bits:
                packed = ggml.in_bytes(packed, self.encoding)
            packed = with_smaller_supergroups(packed, self.encoding)
            if self.columns is not None:
                packed = with_columns_moved(packed, self.columns.shape)
            yield packed

    def _as_stored(self, select: Select, transfer: RowTransfer) -> Iterator[Packed]:
        """The rows of bytes as tensors, on their device; each is valid until the next one."""
        from luceasync.models.quant.packed import empty

        encoding, room = ggml.ENCODINGS[self.kind.name], None
        by_compiled_loops = transfer.is_on_host and ggml.can_unpack(encoding)
        for piece in transfer.pieces(self.rows.selected(select)):
            blocks = piece.unflatten(1, (-1, self.kind.block_bytes))
            if not by_compiled_loops:
                yield ggml.pack(encoding, blocks)
                continue
            if room is None:  # no later piece is larger than the first
                num_columns = blocks.shape[1] * self.kind.block_items
                room = empty(encoding, len(piece), num_columns, piece.device)
            yield ggml.unpack(encoding, blocks, room)


def _moved(rows: Tensor, order: AxisSwap) -> Tensor:
    """Undo the reordering of rows."""
    import torch

    stored = rows[order.begin :].unflatten(0, order.shape)
    ordered = stored.transpose(order.axis, order.axis + 1).flatten(0, 2)
    return torch.cat([rows[: order.begin], ordered]) if order.begin else ordered
