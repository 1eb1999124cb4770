"""The header of one GGUF file: its metadata, and the position of each tensor.

Owns the checks that need only the file. The format is that of ggml's docs/gguf.md, versions 2 and
3. A header may make any claim: reads stay within the file, and nothing is allocated for entries
before they are found to exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from struct import Struct, unpack_from

from luceasync.errors import ModelError
from luceasync.gguf.paths import MAGIC, FileIdentity, identity_of

U32, U64 = Struct("<I"), Struct("<Q")
# Scalar types of metadata by their number in a file.
SCALARS = {
    0: Struct("<B"),
    1: Struct("<b"),
    2: Struct("<H"),
    3: Struct("<h"),
    4: U32,
    5: Struct("<i"),
    6: Struct("<f"),
    7: Struct("<?"),
    10: U64,
    11: Struct("<q"),
    12: Struct("<d"),
}
STRING, ARRAY = 8, 9
NAME_BYTES = 1 << 10  # of a key or a tensor's name; real ones have less than a hundred
MAX_STRINGS = (
    1 << 23
)  # in all arrays together: the largest vocabularies have half a million, with merges


class Cursor:
    """A position in the bytes of a file. All methods raise ModelError at the end of the bytes."""

    def __init__(self, view: mmap | bytes) -> None:
        self.view = view
        self.at = 0
        self._strings_left = MAX_STRINGS

    def take(self, num_bytes: int, what: str) -> int:
        """Skip `num_bytes`; return where they begin. `what` names them in an error."""
        begin, left = self.at, len(self.view) - self.at
        if num_bytes > left:
            raise ModelError(f"truncated header: {what} needs {num_bytes} bytes, {left} are left")
        self.at += num_bytes
        return begin

    def number(self, code: Struct, what: str) -> int:
        """Read an integer."""
        value: int = code.unpack_from(self.view, self.take(code.size, what))[0]
        return value

    def count(self, least_bytes: int, what: str) -> int:
        """Read the number of entries that follow, each of at least `least_bytes`."""
        value = self.number(U64, f"the number of {what}")
        left = len(self.view) - self.at
        if value * least_bytes > left:
            raise ModelError(
                f"truncated header: {value} {what} need at least {value * least_bytes} bytes, "
                f"{left} are left"
            )
        return value

    def name(self, what: str) -> str:
        """Read a short printable string."""
        length = self.number(U64, what)
        if length > NAME_BYTES:
            raise ModelError(f"{what} has {length} bytes; the limit is {NAME_BYTES}")
        begin = self.take(length, what)
        name = text_of(self.view[begin : begin + length], what)
        if not name.isprintable():
            raise ModelError(f"{what} is {name!r}; expected printable characters")
        return name

    def skip_strings(self, num_strings: int, what: str) -> None:
        """Skip `num_strings` strings."""
        self._strings_left -= num_strings
        if self._strings_left < 0:
            raise ModelError(
                f"{what} has {num_strings} strings; the limit is {MAX_STRINGS} in all arrays"
            )
        view, at, unpack, last = self.view, self.at, U64.unpack_from, len(self.view) - U64.size
        for _ in range(num_strings):
            if at > last:
                break
            at += U64.size + unpack(view, at)[0]
        else:
            if at <= len(view):
                self.at = at
                return
        left = len(view) - self.at
        raise ModelError(
            f"truncated header: {num_strings} strings of {what} need more than {left} bytes"
        )


def text_of(content: bytes, what: str) -> str:
    """Decode UTF-8. Raises ModelError."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{what} is not UTF-8 text: {error}") from None


# Scalar types of metadata that can be read as an integer, and those that are reals.
INTEGERS = {0, 1, 2, 3, 4, 5, 10, 11}
REALS = {6, 12}
WORD_CHARS = 80
WORDS = {STRING: "a string", ARRAY: "an array", 7: "a bool", 6: "a float", 12: "a double"}


@dataclass(frozen=True, slots=True)
class MetadataValue:
    """The position of a value: a scalar of type `kind`, or an array of `num_items` of them."""

    kind: int
    begin: int
    num_items: int | None


class Metadata:
    """The keys and values of a header, decoded on access. Raises ModelError, which names the key,
    if it is missing or has another type.
    """

    def __init__(self, cursor: Cursor, num_keys: int) -> None:
        """Read `num_keys` keys and skip their values. Raises ModelError."""
        self._view = cursor.view
        self._values: dict[str, MetadataValue] = {}
        for i in range(num_keys):
            key = cursor.name(f"key {i}")
            if key in self._values:
                raise ModelError(f"the key {key!r} appears twice")
            self._values[key] = _value(cursor, key)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def keys(self) -> list[str]:
        """All keys, in file order."""
        return list(self._values)

    def text(self, key: str) -> str:
        """A string value."""
        value = self._found(key)
        if value.num_items is not None or value.kind != STRING:
            raise ModelError(f"{key} is {_words(value)}; expected a string")
        [content] = self._strings(value.begin, 1)
        return text_of(content, key)

    def word(self, key: str) -> str:
        """A string value that is short enough for an error message."""
        word = self.text(key)
        if len(word) > WORD_CHARS:
            raise ModelError(f"{key} has {len(word)} characters; expected at most {WORD_CHARS}")
        return word

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer value, 0 or more."""
        if default is not None and key not in self:
            return default
        number = self._scalar(key, INTEGERS, "an integer")
        if number < 0:
            raise ModelError(f"{key} = {number:g}: expected 0 or more")
        return int(number)

    def real(self, key: str, default: float | None = None) -> float:
        """An integer or real value, as a float."""
        if default is not None and key not in self:
            return default
        return float(self._scalar(key, REALS | INTEGERS, "a number"))

    def flag(self, key: str, default: bool) -> bool:
        """A boolean value."""
        return bool(self._scalar(key, {7}, "a bool")) if key in self else default

    def is_array(self, key: str) -> bool:
        """Whether the value is an array."""
        return self._found(key).num_items is not None

    def integers(self, key: str) -> tuple[int, ...]:
        """The integers of an array."""
        value = self._found(key)
        if value.num_items is None or value.kind not in INTEGERS | {7}:
            raise ModelError(f"{key} is {_words(value)}; expected an array of integers")
        code = SCALARS[value.kind].format
        return unpack_from(f"<{value.num_items}{code[1:]}", self._view, value.begin)

    def reals(self, key: str) -> tuple[float, ...]:
        """The reals of an array."""
        value = self._found(key)
        if value.num_items is None or value.kind not in REALS:
            raise ModelError(f"{key} is {_words(value)}; expected an array of reals")
        code = SCALARS[value.kind].format
        return unpack_from(f"<{value.num_items}{code[1:]}", self._view, value.begin)

    def strings(self, key: str) -> list[str]:
        """The strings of an array."""
        return [text_of(content, f"an entry of {key}") for content in self._entries(key)]

    def strings_at(self, key: str, indices: Sequence[int]) -> list[str | None]:
        """Entries of an array of strings; None for an index beyond its end."""
        entries = self._entries(key)
        return [
            text_of(entries[i], f"an entry of {key}") if i < len(entries) else None for i in indices
        ]

    def _entries(self, key: str) -> list[bytes]:
        value = self._found(key)
        if value.num_items is None or value.kind != STRING:
            raise ModelError(f"{key} is {_words(value)}; expected an array of strings")
        return self._strings(value.begin, value.num_items)

    def _found(self, key: str) -> MetadataValue:
        value = self._values.get(key)
        if value is None:
            raise ModelError(f"the key {key!r} is missing")
        return value

    def _scalar(self, key: str, kinds: set[int], expected: str) -> float:
        value = self._found(key)
        if value.num_items is not None or value.kind not in kinds:
            raise ModelError(f"{key} is {_words(value)}; expected {expected}")
        number: float = SCALARS[value.kind].unpack_from(self._view, value.begin)[0]
        return number

    def _strings(self, begin: int, num_strings: int) -> list[bytes]:
        found, view, unpack = [], self._view, U64.unpack_from
        for _ in range(num_strings):
            end = begin + U64.size + unpack(view, begin)[0]
            found.append(view[begin + U64.size : end])
            begin = end
        return found


def _value(cursor: Cursor, key: str) -> MetadataValue:
    """Skip one value and return its position."""
    kind = cursor.number(U32, f"the type of {key}")
    if kind != ARRAY:
        begin = cursor.at
        if kind == STRING:
            cursor.take(cursor.number(U64, key), key)
        else:
            cursor.take(_size(kind, key), key)
        return MetadataValue(kind, begin, None)
    kind = cursor.number(U32, f"the type of {key}")
    if kind == STRING:
        num_items = cursor.count(U64.size, f"strings of {key}")
        begin = cursor.at
        cursor.skip_strings(num_items, key)
        return MetadataValue(kind, begin, num_items)
    size = _size(kind, key)
    num_items = cursor.count(size, f"entries of {key}")
    return MetadataValue(kind, cursor.take(num_items * size, key), num_items)


def _size(kind: int, key: str) -> int:
    code = SCALARS.get(kind)
    if code is None:
        what = "an array of arrays" if kind == ARRAY else f"of the unknown type {kind}"
        raise ModelError(f"{key} is {what}; expected a number, a bool, a string or an array")
    return code.size


def _words(value: MetadataValue) -> str:
    kind = WORDS.get(value.kind, "an integer")
    return kind if value.num_items is None else f"an array, each entry {kind}"


def agreed(
    metadata: Metadata, key: str, num_layers: int, fits: Callable[[int], bool] = bool
) -> int | None:
    """An integer that a file gives once or per layer. If per layer, the only value that
    `fits` accepts; None if there is none. Raises ModelError if there are several.
    """
    if not metadata.is_array(key):
        return metadata.integer(key)
    numbers = metadata.integers(key)
    if len(numbers) < num_layers:
        raise ModelError(
            f"{key} has {len(numbers)} entries; expected one for each of {num_layers} layers"
        )
    found = {number for number in numbers[:num_layers] if fits(number)}
    if len(found) > 1:
        raise ModelError(f"{key} = {sorted(found)}: expected the same in all layers")
    return found.pop() if found else None


@dataclass(frozen=True, slots=True)
class TensorType:
    """A ggml type: a tensor's row consists of blocks of `block_items` numbers in `block_bytes`
    bytes.
    """

    name: str
    block_items: int
    block_bytes: int

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """The size of a tensor whose rows consist of whole blocks."""
        return prod(shape) // self.block_items * self.block_bytes


def _types(*rows: tuple[int, str, int, int]) -> dict[int, TensorType]:
    return {number: TensorType(*row) for number, *row in rows}  # type: ignore[arg-type]


# By their number in a header: enum ggml_type in ggml.h.
TENSOR_TYPES = _types(
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 40),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
)

# The types that a model's weights may have.
SUPPORTED: tuple[str, ...] = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
SUPPORTED += ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")


VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
LEAST_KEY_BYTES = U64.size + U32.size + 1  # an empty name, and a value of one byte
LEAST_TENSOR_BYTES = 2 * U64.size + 2 * U32.size + U64.size
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor at bytes [begin, begin + num_bytes) of the file. Unlike in the file, the rows come
    first in `shape`.
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
    """The header of one file, and the `identity` that the file had when it was read."""

    path: Path
    identity: FileIdentity | None
    metadata: Metadata
    tensors: dict[str, TensorHeader]


def read_header(path: Path) -> Header:
    """Read the header of the file at `path`. Raises ModelError, which names the file."""
    identity = identity_of(path)
    try:
        with path.open("rb") as file:
            is_empty = not file.read(1)
            view = b"" if is_empty else mmap(file.fileno(), 0, access=ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    try:
        return _parse(path, identity, view)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _parse(path: Path, identity: FileIdentity | None, view: mmap | bytes) -> Header:
    cursor = Cursor(view)
    _check_begin(cursor)
    num_tensors = cursor.count(LEAST_TENSOR_BYTES, "tensors")
    num_keys = cursor.count(LEAST_KEY_BYTES, "keys")
    metadata = Metadata(cursor, num_keys)
    tensors: dict[str, TensorHeader] = {}
    for i in range(num_tensors):
        tensor = _tensor(cursor, i)
        if tensor.name in tensors:
            raise ModelError(f"the tensor {tensor.name!r} appears twice")
        tensors[tensor.name] = tensor
    alignment = metadata.integer("general.alignment", DEFAULT_ALIGNMENT)
    if alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise ModelError(f"general.alignment = {alignment}: expected a power of two, at least 8")
    begin = -(-cursor.at // alignment) * alignment
    placed = [TensorHeader(t.name, t.shape, t.type, begin + t.begin) for t in tensors.values()]
    _check_places(placed, begin, alignment, len(view))
    return Header(path, identity, metadata, {tensor.name: tensor for tensor in placed})


def _check_begin(cursor: Cursor) -> None:
    magic = cursor.view[: len(MAGIC)]
    if magic != MAGIC:
        raise ModelError(f"not a GGUF file: it begins with {magic!r}; expected {MAGIC!r}")
    cursor.take(len(MAGIC), "its first word")
    version = cursor.number(U32, "its version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in VERSIONS:
            raise ModelError("its byte order is big-endian; expected little-endian")
        raise ModelError(f"GGUF version {version}; expected 2 or 3")


def _tensor(cursor: Cursor, number: int) -> TensorHeader:
    """Read one entry; its `begin` is still relative to the start of the data."""
    name = cursor.name(f"the name of tensor {number}")
    num_dimensions = cursor.number(U32, f"the dimensions of {name!r}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise ModelError(f"{name!r} has {num_dimensions} dimensions; expected 1 to 4")
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
            f"{name!r} has shape {shape} in {kind.name}; expected at least one row, and rows of a "
            f"multiple of {kind.block_items}"
        )
    return TensorHeader(name, shape, kind, begin)


def _check_places(tensors: list[TensorHeader], begin: int, alignment: int, file_bytes: int) -> None:
    """Check that all tensors are within the file, aligned and without overlaps."""
    for tensor in tensors:
        if (tensor.begin - begin) % alignment:
            raise ModelError(
                f"{tensor.name!r} begins at {tensor.begin - begin}; "
                f"expected a multiple of {alignment}"
            )
        if tensor.begin + tensor.num_bytes > file_bytes:
            raise ModelError(
                f"truncated data: the file has {file_bytes} bytes, {tensor.name!r} of shape "
                f"{tensor.shape} in {tensor.type.name} ends at {tensor.begin + tensor.num_bytes}"
            )
    for one, other in pairwise(sorted(tensors, key=lambda tensor: tensor.begin)):
        if one.begin + one.num_bytes > other.begin:
            raise ModelError(f"the tensors {one.name!r} and {other.name!r} overlap")
