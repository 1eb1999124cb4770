"""How a file stores a tensor's numbers, and how they become a weight on a device.

Owns the protocols between formats and devices, the rows of a file and their transfer to a device,
and the encoding of plain numbers. Does not import torch at its top.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from luceasync.errors import ModelError
from luceasync.models.precision import Precision
from luceasync.models.weights import EmbeddingTable, ExpertWeights, Weight
from luceasync.process_memory import want_large_pages

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from luceasync.models.ops import Ops

Shape = tuple[int, ...]


class FloatMatrix(tuple[int, ...]):
    """The shape of a matrix that is float32 on a device, whatever the model's dtype."""


Select = Callable[["Tensor"], "Tensor"]  # selects rows of a stored matrix or of its scales


def is_finite(numbers: Tensor) -> Tensor:
    """Whether all numbers are finite: bool [], on their device."""
    import torch

    # NaN if any number is NaN; needs no memory beside the tensor.
    least, most = torch.aminmax(numbers)
    return least.isfinite() & most.isfinite()


def check_finite(numbers: Tensor, label: str) -> None:
    """Raise ModelError for a stored tensor with a number that is not finite. `label`: its file and
    name.
    """
    if not bool(is_finite(numbers)):
        raise ModelError(f"{label} has a number that is not finite")


class Findings:
    """What devices find about tensors, read all at once: waiting for each result would leave a GPU
    idle between one tensor and the next."""

    def __init__(self) -> None:
        self._found: list[tuple[Tensor, str]] = []

    def expect(self, is_fine: Tensor, fault: str) -> None:
        """Add a check: bool [] on any device, and the message if it is False."""
        self._found.append((is_fine, fault))

    def raise_fault(self) -> None:
        """Raise ModelError for the first failed check. Waits for the devices."""
        import torch

        found, self._found = self._found, []
        if found and not bool((fine := torch.stack([flag for flag, _ in found])).all()):
            raise ModelError(found[fine.tolist().index(False)][1])


# --- rows of a file -------------------------------------------------------------------------------

PIECE_BYTES = 8 << 20  # of rows that are read at once
RUN_BYTES = 1 << 16  # the overhead of a read, expressed in bytes
# How much the system is asked to read ahead of each read: the disk keeps reading while a layer is
# rearranged.
AHEAD_BYTES = 256 << 20


class WeightFile:
    """An open file of weights. It is read rather than mapped: if the file is truncated meanwhile,
    that is an error, whereas a mapping would end the process."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError."""
        self.path = path
        self._ahead = 0  # the system has been asked to read up to here
        try:
            self._raw = path.open("rb", buffering=0)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error}") from None

    def read_into(self, view: memoryview, begin: int) -> None:
        """Fill `view` with the bytes from `begin` on. May be called from any thread. Raises
        ModelError."""
        while view:
            try:
                count = os.preadv(self._raw.fileno(), [view], begin)
            except (OSError, ValueError) as error:
                raise ModelError(f"{self.path}: cannot be read: {error}") from None
            if not count:
                raise ModelError(f"{self.path}: cannot be read: it ends at byte {begin}")
            view, begin = view[count:], begin + count
            self._read_ahead(begin)

    def _read_ahead(self, begin: int) -> None:
        """Ask the system to read what follows `begin`, in large parts."""
        advise = getattr(os, "posix_fadvise", None)
        known = self._ahead - begin
        if not 0 <= known <= AHEAD_BYTES:  # another part of the file
            known = 0
        if advise is None or known > AHEAD_BYTES // 2:
            return
        with suppress(OSError):  # only advice, which some file systems ignore
            advise(self._raw.fileno(), begin + known, AHEAD_BYTES - known, os.POSIX_FADV_WILLNEED)
        self._ahead = begin + AHEAD_BYTES

    def close(self) -> None:
        """Close it. May be called twice."""
        self._raw.close()


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of `row_bytes` bytes, which a file holds from `begin` on. `order`: int64, the numbers of
    the rows to read.
    """

    file: WeightFile
    begin: int
    row_bytes: int
    order: Tensor

    @classmethod
    def of(cls, file: WeightFile, begin: int, row_bytes: int, num_rows: int) -> Self:
        """All of `num_rows` rows, in stored order."""
        import torch

        return cls(file, begin, row_bytes, torch.arange(num_rows))

    def __len__(self) -> int:
        return len(self.order)

    def selected(self, select: Select) -> Self:
        """Those of the rows that `select` picks."""
        return replace(self, order=select(self.order[:, None])[:, 0])

    def read(self, begin: int, end: int, out: Tensor) -> None:
        """Read rows [begin, end) of the order to `out`, uint8 [end - begin, row_bytes] on the host.
        Scattered rows are read together with what lies between them, if that is less work. Raises
        ModelError."""
        import numpy as np

        order, into = self.order.numpy()[begin:end], out.numpy()
        first, last = int(order.min()), int(order.max())
        breaks = np.flatnonzero(np.diff(order) != 1) + 1
        between_bytes = (last + 1 - first) * self.row_bytes
        if out.nbytes + len(breaks) * RUN_BYTES > 2 * between_bytes:
            between = np.empty((last + 1 - first, self.row_bytes), np.uint8)
            self._read_run(first, memoryview(between.data))
            np.take(between, order - first, axis=0, out=into, mode="clip")
            return
        edges = [0, *breaks.tolist(), len(order)]
        for run_begin, run_end in itertools.pairwise(edges):
            self._read_run(int(order[run_begin]), memoryview(into[run_begin:run_end].data))

    def _read_run(self, first: int, view: memoryview) -> None:
        self.file.read_into(view.cast("B"), self.begin + first * self.row_bytes)


class RowTransfer(Protocol):
    """Transfers stored rows to a device. `is_on_host`: compiled loops of this process can read the
    memory of its pieces."""

    is_on_host: bool

    def pieces(self, rows: StoredRows) -> Iterator[Tensor]:
        """The rows piece by piece: uint8 [n, row_bytes] on the device, each valid until the next
        one is requested. Raises ModelError."""
        ...

    def prepare(self, room: Tensor) -> None:
        """Prepare the memory of the device that pieces will be copied to, before the first copy."""
        ...

    def close(self) -> None:
        """Free its memory and threads, once no reads are running. May be called twice."""
        ...


class HostTransfer:
    """The RowTransfer of devices whose memory is the host's. A thread reads one piece ahead of its
    caller: the disk and the memory are busy while the caller unpacks the previous piece."""

    is_on_host = True

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        import torch

        self._buffers = [torch.empty(piece_bytes, dtype=torch.uint8) for _ in range(3)]
        self._reader = ThreadPoolExecutor(1, "read-weights")
        self._num_pieces = 0  # number of pieces so far: buffers are used in turn

    def pieces(self, rows: StoredRows) -> Iterator[Tensor]:
        step = max(1, self._buffers[0].nbytes // rows.row_bytes)
        begins = deque(range(0, len(rows), step))
        pending: deque[Future[Tensor]] = deque()
        try:
            while begins or pending:
                while begins and len(pending) < len(self._buffers) - 1:
                    begin = begins.popleft()
                    buffer = self._buffers[self._num_pieces % len(self._buffers)]
                    self._num_pieces += 1
                    end = min(begin + step, len(rows))
                    pending.append(self._reader.submit(self._read, rows, begin, end, buffer))
                yield pending.popleft().result()
        finally:
            for reading in pending:
                reading.exception()  # waits, because its buffer is reused

    def prepare(self, room: Tensor) -> None:
        want_large_pages(room.data_ptr(), room.nbytes)

    def close(self) -> None:
        self._reader.shutdown()
        self._buffers.clear()

    def _read(self, rows: StoredRows, begin: int, end: int, buffer: Tensor) -> Tensor:
        import torch

        num_bytes = (end - begin) * rows.row_bytes
        if num_bytes > buffer.nbytes:  # one row that is larger than a piece
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
        piece = buffer[:num_bytes].view(end - begin, rows.row_bytes)
        rows.read(begin, end, piece)
        return piece


class Stack(Protocol):
    """A matrix that is being read part by part into its final place."""

    def fill(self, begin: int, stored: Any, select: Select) -> int:
        """Write the rows that `select` picks of `stored`, which a format has read, from row `begin`
        on. Returns the number of bytes read."""
        ...

    def weight(self) -> Weight:
        """The whole matrix, packed. Nothing may be filled afterwards."""
        ...

    def table(self) -> EmbeddingTable:
        """The whole matrix with plain rows."""
        ...

    def experts(self, num_experts: int, num_parts: int) -> ExpertWeights:
        """The matrix as the matrices of experts, part by part: see Ops.experts."""
        ...


class Encoding(Protocol):
    """How a file stores the numbers of one tensor. Tensors of equal encoding may share a Stack."""

    def num_bytes(self, shape: Shape, precision: Precision) -> int:
        """Bytes that a tensor of this shape takes on a device."""
        ...

    def type_name(self, shape: Shape, precision: Precision) -> str:
        """The name of its number type on a device."""
        ...

    def stack(self, shape: Shape, place: WeightPlacement) -> Stack:
        """An empty matrix of this shape."""
        ...


@dataclass(frozen=True, slots=True)
class WeightPlacement:
    """The device that weights go to and the transfer to it, the dtype of plain weights, and the
    operations that use them. `findings`: about what was read; the owner checks them at the end."""

    ops: Ops
    device: torch.device
    dtype: torch.dtype
    transfer: RowTransfer = field(default_factory=HostTransfer)
    findings: Findings = field(default_factory=Findings)


class StoredNumbers(Protocol):
    """A matrix of plain numbers whose place in the files a format knows."""

    @property
    def label(self) -> str:
        """Its file and its name there, for errors."""
        ...

    def numbers(self, select: Select, place: WeightPlacement) -> Iterator[Tensor]:
        """The rows that `select` picks, in their stored dtype on the place's device, piece by
        piece; each is valid until the next one is requested. Raises ModelError."""
        ...


@dataclass(frozen=True, slots=True)
class NumbersInFile:
    """StoredNumbers of `dtype` and `row_shape`, in rows of a file."""

    label: str
    rows: StoredRows
    dtype: torch.dtype
    row_shape: Shape

    def numbers(self, select: Select, place: WeightPlacement) -> Iterator[Tensor]:
        for piece in place.transfer.pieces(self.rows.selected(select)):
            yield piece.view(self.dtype).view(len(piece), *self.row_shape)


@dataclass(frozen=True, slots=True)
class NumbersInMemory:
    """StoredNumbers that are already in memory."""

    label: str
    tensor: Tensor

    def numbers(self, select: Select, place: WeightPlacement) -> Iterator[Tensor]:
        yield select(self.tensor)


@dataclass(frozen=True, slots=True)
class DenseEncoding:
    """Plain numbers. On a device matrices have the model's dtype, other tensors are float32, and so
    is a FloatMatrix.
    """

    def num_bytes(self, shape: Shape, precision: Precision) -> int:
        return prod(shape) * (precision.weight_bytes if _has_models_dtype(shape) else 4)

    def type_name(self, shape: Shape, precision: Precision) -> str:
        return precision.weights if _has_models_dtype(shape) else "fp32"

    def stack(self, shape: Shape, place: WeightPlacement) -> Stack:
        return _DenseStack(shape, place)


def _has_models_dtype(shape: Shape) -> bool:
    return len(shape) == 2 and not isinstance(shape, FloatMatrix)


class _DenseStack:
    """Filled piece by piece, so that little memory is needed beside it at any time."""

    def __init__(self, shape: Shape, place: WeightPlacement) -> None:
        import torch

        self._place = place
        self._rows = torch.empty(shape, dtype=place.dtype, device=place.device)

    def fill(self, begin: int, stored: StoredNumbers, select: Select) -> int:
        num_bytes, fault = 0, f"{stored.label} has a number that is not finite"
        for rows in stored.numbers(select, self._place):
            self._place.findings.expect(is_finite(rows), fault)
            self._rows[begin : begin + len(rows)].copy_(rows)
            begin, num_bytes = begin + len(rows), num_bytes + rows.nbytes
        return num_bytes

    def weight(self) -> Weight:
        return self._place.ops.pack(self._rows)

    def table(self) -> EmbeddingTable:
        return self._place.ops.table(self._rows)

    def experts(self, num_experts: int, num_parts: int) -> ExpertWeights:
        return self._place.ops.experts(self._rows, num_experts, num_parts)
