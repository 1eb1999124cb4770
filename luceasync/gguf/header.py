"""The header of one GGUF file: metadata, and where each tensor lies.

Owns the checks that need nothing but the file. Its format: ggml's docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from mmap import ACCESS_READ, mmap
from pathlib import Path

from luceasync.errors import ModelError
from luceasync.gguf.cursor import U32, U64, Cursor
from luceasync.gguf.metadata import Metadata
from luceasync.gguf.place import MAGIC
from luceasync.gguf.tensor_types import SUPPORTED, TENSOR_TYPES, TensorType

VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
LEAST_KEY_BYTES = U64.size + U32.size + 1  # no name, and a value of one byte
LEAST_TENSOR_BYTES = 2 * U64.size + 2 * U32.size + U64.size
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class Tensor:
    """Rows first: a file has its dimensions the other way round. Bytes [begin, begin + num_bytes)
    of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    begin: int

    @property
    def num_bytes(self) -> int:
        return self.type.num_bytes(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of one file."""

    path: Path
    metadata: Metadata
    tensors: dict[str, Tensor]


def read_header(path: Path) -> Header:
    """The header of the file at `path`. Raises ModelError naming it."""
    try:
        with path.open("rb") as file:
            is_empty = not file.read(1)
            view = b"" if is_empty else mmap(file.fileno(), 0, access=ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    try:
        return _parse(path, view)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _parse(path: Path, view: mmap | bytes) -> Header:
    cursor = Cursor(view)
    _check_begin(cursor)
    num_tensors = cursor.count(LEAST_TENSOR_BYTES, "tensors")
    num_keys = cursor.count(LEAST_KEY_BYTES, "keys")
    metadata = Metadata(cursor, num_keys)
    tensors: dict[str, Tensor] = {}
    for i in range(num_tensors):
        tensor = _tensor(cursor, i)
        if tensor.name in tensors:
            raise ModelError(f"the tensor {tensor.name!r} is there twice")
        tensors[tensor.name] = tensor
    alignment = metadata.integer("general.alignment", DEFAULT_ALIGNMENT)
    if alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise ModelError(f"general.alignment = {alignment}: a power of two from 8 on is expected")
    begin = -(-cursor.at // alignment) * alignment
    placed = [Tensor(t.name, t.shape, t.type, begin + t.begin) for t in tensors.values()]
    _check_places(placed, begin, alignment, len(view))
    return Header(path, metadata, {tensor.name: tensor for tensor in placed})


def _check_begin(cursor: Cursor) -> None:
    magic = cursor.view[: len(MAGIC)]
    if magic != MAGIC:
        raise ModelError(f"not a GGUF file: it begins with {magic!r}; {MAGIC!r} is expected")
    cursor.take(len(MAGIC), "its first word")
    version = cursor.number(U32, "its version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in VERSIONS:
            raise ModelError("its byte order is big-endian; little-endian is expected")
        raise ModelError(f"GGUF version {version}; 2 or 3 is expected")


def _tensor(cursor: Cursor, number: int) -> Tensor:
    """One entry of the list; `begin` still counts from where the numbers begin."""
    name = cursor.name(f"the name of tensor {number}")
    num_dimensions = cursor.number(U32, f"the dimensions of {name!r}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise ModelError(f"{name!r} has {num_dimensions} dimensions; 1 to 4 are expected")
    what = f"a dimension of {name!r}"
    shape = tuple(cursor.number(U64, what) for _ in range(num_dimensions))[::-1]
    number_of_type = cursor.number(U32, f"the type of {name!r}")
    begin = cursor.number(U64, f"the place of {name!r}")
    kind = TENSOR_TYPES.get(number_of_type)
    if kind is None:
        raise ModelError(
            f"{name!r} has the unknown type {number_of_type}; supported: {', '.join(SUPPORTED)}"
        )
    if 0 in shape or shape[-1] % kind.block_items:
        raise ModelError(
            f"{name!r} has shape {shape} in {kind.name}; rows of a multiple of "
            f"{kind.block_items} are expected, and at least one"
        )
    return Tensor(name, shape, kind, begin)


def _check_places(tensors: list[Tensor], begin: int, alignment: int, file_bytes: int) -> None:
    """Every tensor lies in the file, aligned, and none in another."""
    for tensor in tensors:
        if (tensor.begin - begin) % alignment:
            raise ModelError(
                f"{tensor.name!r} begins at {tensor.begin - begin}; "
                f"a multiple of {alignment} is expected"
            )
        if tensor.begin + tensor.num_bytes > file_bytes:
            raise ModelError(
                f"cut in its data: {file_bytes} bytes are there, {tensor.name!r} of shape "
                f"{tensor.shape} in {tensor.type.name} ends at {tensor.begin + tensor.num_bytes}"
            )
    for one, other in pairwise(sorted(tensors, key=lambda tensor: tensor.begin)):
        if one.begin + one.num_bytes > other.begin:
            raise ModelError(f"the tensors {one.name!r} and {other.name!r} overlap")
