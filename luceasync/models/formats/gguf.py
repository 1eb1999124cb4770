"""Weights in GGUF files.

Knows how numbers are stored, and undoes the converter's reordering of rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from luceasync.errors import ModelError
from luceasync.gguf.header import TensorType
from luceasync.gguf.layout import AxisSwap
from luceasync.gguf.model import read_model
from luceasync.models.encodings import (
    Encoding,
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

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Do nothing: `read_gguf` has checked every tensor of the spec."""

    def check_unused(self, shapes: Mapping[str, Shape]) -> None:
        """Do nothing: `read_gguf` has checked every tensor of the file."""

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
            yield GgufSource(contents, files)


class GgufSource:
    """A TensorSource, as long as the files are open."""

    def __init__(self, contents: GgufContents, files: dict[Path, WeightFile]) -> None:
        self._contents = contents
        self._files = files

    def encoding(self, name: str) -> Encoding:
        return self._found(name).encoding

    def read(self, name: str, shape: Shape) -> Tensor:
        import torch

        plain = self._plain(self._found(name, shape))
        raw = torch.empty((len(plain.rows), plain.rows.row_bytes), dtype=torch.uint8)
        plain.rows.read(0, len(raw), raw)
        numbers = plain.in_order(raw).reshape(shape)
        check_finite(numbers, plain.label)
        return numbers

    def stored(self, name: str, shape: Shape) -> PlainNumbers | QuantBlocks:
        stored = self._found(name, shape)
        if isinstance(encoding := stored.encoding, QuantEncoding):
            rows, columns = self._rows(stored), stored.orders.columns
            return QuantBlocks(_label(stored), encoding, rows, stored.tensor.type, columns)
        return self._plain(stored)

    def _plain(self, stored: GgufTensor) -> PlainNumbers:
        import torch

        dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        dtype, columns = dtypes[stored.tensor.type.name], stored.orders.columns
        return PlainNumbers(_label(stored), self._rows(stored), dtype, columns)

    def _found(self, name: str, shape: Shape | None = None) -> GgufTensor:
        stored = self._contents.stored.get(name)
        if stored is None:
            raise ModelError(f"{self._contents.model.path}: there is no tensor for {name!r}")
        if shape is not None and stored.shape != shape:
            raise ModelError(f"{stored.path}: {name!r} has shape {stored.shape}, expected {shape}")
        return stored

    def _rows(self, stored: GgufTensor) -> StoredRows:
        """The rows in the order of the spec; nothing is read yet."""
        tensor, order = stored.tensor, stored.orders.rows
        row_bytes = tensor.num_bytes // tensor.shape[0]
        begin, file = tensor.begin + stored.begin * row_bytes, self._files[stored.path]
        rows = StoredRows.of(file, begin, row_bytes, stored.shape[0])
        return rows if order is None else rows.selected(lambda each: _moved(each, order))


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

        for piece in place.transfer.pieces(self.rows.selected(select)):
            blocks = piece.unflatten(1, (-1, self.kind.block_bytes))
            packed = ggml.pack(ggml.ENCODINGS[self.kind.name], blocks)
            packed = with_smaller_supergroups(packed, self.encoding)
            if self.columns is not None:
                packed = with_columns_moved(packed, self.columns.shape)
            yield packed


def _moved(rows: Tensor, order: AxisSwap) -> Tensor:
    """Undo the reordering of rows."""
    import torch

    stored = rows[order.begin :].unflatten(0, order.shape)
    ordered = stored.transpose(order.axis, order.axis + 1).flatten(0, 2)
    return torch.cat([rows[: order.begin], ordered]) if order.begin else ordered
