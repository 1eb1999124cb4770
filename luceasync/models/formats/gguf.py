"""Weights in GGUF files.

Knows how numbers are stored, and undoes the converter's reordering of rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import TYPE_CHECKING

from luceasync.errors import ModelError
from luceasync.gguf.layout import AxisSwap
from luceasync.gguf.model import read_model
from luceasync.models.encodings import Encoding, Select, Shape, check_finite
from luceasync.models.gguf_model import GgufContents, GgufTensor, read_gguf
from luceasync.models.quant import ggml
from luceasync.models.quant.encoding import QuantEncoding

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.quant.packed import Packed

SLICE_BYTES = 1 << 23  # of a stored tensor that are converted at once


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
        yield GgufSource(contents, {path: _mapped(path) for path in contents.model.paths})


class GgufSource:
    """A TensorSource. A file is unmapped once no tensor refers to it."""

    def __init__(self, contents: GgufContents, files: dict[Path, mmap]) -> None:
        self._contents = contents
        self._files = files

    def encoding(self, name: str) -> Encoding:
        return self._found(name).encoding

    def read(self, name: str, shape: Shape) -> Tensor | QuantBlocks:
        stored = self._found(name)
        if stored.shape != shape:
            raise ModelError(f"{stored.path}: {name!r} has shape {stored.shape}, expected {shape}")
        rows, label = self._rows(stored), f"{stored.path}: {stored.tensor.name!r}"
        if isinstance(encoding := stored.encoding, QuantEncoding):
            return QuantBlocks(label, encoding, rows, stored)
        numbers = _plain(rows, stored)
        check_finite(numbers, label)
        return _in_order(numbers, stored).reshape(shape)

    def _found(self, name: str) -> GgufTensor:
        stored = self._contents.stored.get(name)
        if stored is None:
            raise ModelError(f"{self._contents.model.path}: there is no tensor for {name!r}")
        return stored

    def _rows(self, stored: GgufTensor) -> Tensor:
        """A view of the stored bytes, uint8 [rows, bytes of a row]; nothing is read yet."""
        import torch

        tensor, num_rows = stored.tensor, stored.shape[0]
        row_bytes = tensor.num_bytes // tensor.shape[0]
        raw = torch.frombuffer(
            self._files[stored.path],
            dtype=torch.uint8,
            count=num_rows * row_bytes,
            offset=tensor.begin + stored.begin * row_bytes,
        )
        return raw.view(num_rows, row_bytes)


@dataclass(frozen=True, slots=True)
class QuantBlocks:
    """A quantised tensor as it is stored: a StoredQuantised."""

    label: str
    encoding: QuantEncoding
    rows: Tensor  # uint8 [rows, bytes of a row]
    stored: GgufTensor

    def packed(self, select: Select) -> Iterator[Packed]:
        from luceasync.models.quant.stack import with_columns_moved, with_smaller_supergroups

        orders, kind = self.stored.orders, self.stored.tensor.type
        rows = select(_moved(self.rows, orders.rows) if orders.rows else self.rows)
        step = max(1, SLICE_BYTES // rows.shape[1])
        for begin in range(0, len(rows), step):
            blocks = rows[begin : begin + step].unflatten(1, (-1, kind.block_bytes))
            packed = ggml.pack(ggml.ENCODINGS[kind.name], blocks)
            packed = with_smaller_supergroups(packed, self.encoding)
            if (columns := orders.columns) is not None:
                packed = with_columns_moved(packed, columns.shape)
            yield packed


def _plain(rows: Tensor, stored: GgufTensor) -> Tensor:
    """The stored bytes as numbers."""
    import torch

    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    dtype = dtypes[stored.tensor.type.name]
    if rows.data_ptr() % dtype.itemsize:
        rows = rows.clone()
    numbers = rows.view(dtype)
    return numbers if len(stored.tensor.shape) > 1 else numbers[:, 0]


def _in_order(tensor: Tensor, stored: GgufTensor) -> Tensor:
    orders = stored.orders
    if orders.rows is not None:
        tensor = _moved(tensor, orders.rows)
    if orders.columns is not None:
        tensor = _moved(tensor.t(), orders.columns).t()
    return tensor


def _moved(rows: Tensor, order: AxisSwap) -> Tensor:
    """Undo the reordering of rows."""
    import torch

    stored = rows[order.begin :].unflatten(0, order.shape)
    ordered = stored.transpose(order.axis, order.axis + 1).flatten(0, 2)
    return torch.cat([rows[: order.begin], ordered]) if order.begin else ordered


def _mapped(path: Path) -> mmap:
    """Map the file copy-on-write: torch wants writable memory."""
    try:
        with path.open("rb") as file:
            return mmap(file.fileno(), 0, access=ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
