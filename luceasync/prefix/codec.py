"""A node as one safetensors file: its header is written and checked here, its tensors are sealed.

Owns the layout of the file and its checksums. Knows no directory, no tensor library, and not what
a tensor's name means.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeGuard

import xxhash

from luceasync.errors import CorruptNode, ForeignNode

SCHEMA = "luceasync.node.1"
PAGE_BYTES = 4096  # data begins on a multiple, so that it may be read past the page cache
MAX_HEADER_BYTES = 4 << 20
MAX_TOKENS = 1 << 40
LENGTH_BYTES = 8  # a safetensors file begins with its header's length, little-endian

Buffer = bytes | bytearray | memoryview

ITEM_BYTES = {  # the dtypes of safetensors whose items are whole bytes
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
KEY = re.compile(r"[0-9a-f]{8,128}")
CHECKSUM = re.compile(r"[0-9a-f]{32}")
NUMBER = re.compile(r"0|[1-9][0-9]{0,14}")
SEAL = "header_xxh3_128"
FIELDS = frozenset(
    ("schema", "namespace", "key", "parent", "begin", "end", "split", "created", "xxh3_128", SEAL)
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to be written: dtype as safetensors spells it, `checksum` of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    xxh3_128: str

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's bytes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class NodeMetadata:
    """What a node says of itself.

    `key` and `parent` are lower-case hex, `parent` is empty under the root; tokens `[begin, end)`;
    `split`: the first layer of each shard that saved it; `created_s`: seconds since 1970.
    """

    namespace: str
    key: str
    parent: str
    begin: int
    end: int
    split: tuple[int, ...]
    created_s: int


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor and the bytes `[begin, end)` of the file that hold it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header; `slots` in the order of the file and without holes."""

    metadata: NodeMetadata
    slots: tuple[TensorSlot, ...]
    data_begin: int
    file_bytes: int


def checksum(content: Buffer) -> str:
    """xxh3_128 of the bytes, in hex. Threads may run meanwhile."""
    return xxhash.xxh3_128_hexdigest(content)


def file_order(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """The entries in an order in which each is aligned as well as its size allows.

    safetensors allows no holes. Where sizes fall by the power of two that divides them, at most
    64, each begins at a multiple of its own.
    """
    return sorted(entries, key=lambda entry: -math.gcd(entry.num_bytes, 64))


def metadata_strings(entries: Sequence[TensorEntry], metadata: NodeMetadata) -> dict[str, str]:
    """The safetensors metadata of a node; the last of them seals the others and the table."""
    strings = {
        "schema": SCHEMA,
        "namespace": metadata.namespace,
        "key": metadata.key,
        "parent": metadata.parent,
        "begin": str(metadata.begin),
        "end": str(metadata.end),
        "split": ",".join(map(str, metadata.split)),
        "created": str(metadata.created_s),
        "xxh3_128": json.dumps({entry.name: entry.xxh3_128 for entry in entries}),
    }
    table = {entry.name: [entry.dtype, list(entry.shape)] for entry in entries}
    return {**strings, SEAL: _seal(strings, table)}


def encode_header(entries: Sequence[TensorEntry], metadata: NodeMetadata) -> bytes:
    """The bytes before the tensors, which follow in this order without holes.

    Raises ValueError where a tensor would not be aligned to its items; `file_order` never does.
    """
    table: dict[str, object] = {"__metadata__": metadata_strings(entries, metadata)}
    begin = 0
    for entry in entries:
        if begin % ITEM_BYTES[entry.dtype]:
            raise ValueError(f"{entry.name}: {entry.dtype} would begin at byte {begin} of the data")
        end = begin + entry.num_bytes
        table[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (begin, end),
        }
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % PAGE_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_extent(first_bytes: Buffer, file_bytes: int) -> int:
    """Where the data of the file begins, from its first 8 bytes. Raises CorruptNode."""
    if file_bytes < LENGTH_BYTES or len(first_bytes) < LENGTH_BYTES:
        raise CorruptNode(f"{file_bytes} bytes: expected a header of at least {LENGTH_BYTES}")
    extent = LENGTH_BYTES + int.from_bytes(first_bytes[:LENGTH_BYTES], "little")
    if extent > min(file_bytes, MAX_HEADER_BYTES):
        raise CorruptNode(
            f"header of {extent} bytes: the file has {file_bytes}, {MAX_HEADER_BYTES} are allowed"
        )
    return extent


def decode_header(first_bytes: Buffer, file_bytes: int, *, namespace: str, key: str) -> Header:
    """The header of a file of `file_bytes` bytes, all of it checked.

    `first_bytes`: at least the first `header_extent` bytes; `key`: what the file is named after.
    Raises CorruptNode where it is damaged or another node's, ForeignNode where it is whole but of
    another schema or namespace, or no node at all.
    """
    extent = header_extent(first_bytes, file_bytes)
    if len(first_bytes) < extent:
        raise CorruptNode(f"header of {extent} bytes: found {len(first_bytes)}")
    table = _parse_object(bytes(first_bytes[LENGTH_BYTES:extent]), "header")
    strings = _checked_strings(table.pop("__metadata__", {}), table)
    if strings["namespace"] != namespace:
        raise ForeignNode(f"namespace {strings['namespace']}: expected {namespace}")
    if strings["key"] != key:
        raise CorruptNode(f"node {strings['key'][:128]} in the file of node {key}")
    checksums = _parse_object(strings["xxh3_128"].encode(errors="surrogatepass"), "checksums")
    if checksums.keys() != table.keys():
        raise CorruptNode("checksums and tensors have different names")
    slots = [_slot(name, table[name], checksums[name], extent) for name in table]
    slots.sort(key=lambda slot: (slot.begin, slot.end))
    _expect_no_holes(slots, extent, file_bytes)
    return Header(_metadata(strings), tuple(slots), extent, file_bytes)


def verify(header: Header, content: memoryview) -> None:
    """Raise CorruptNode unless every tensor in the whole file's content has its checksum."""
    for slot in header.slots:
        if checksum(content[slot.begin : slot.end]) != slot.xxh3_128:
            raise CorruptNode(f"{slot.name}: expected checksum {slot.xxh3_128}")


def _parse_object(text: bytes, what: str) -> dict[str, object]:
    """A JSON object in which no name comes twice, at any depth."""

    def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise CorruptNode(f"{what}: a name is there twice")
        return found

    try:
        value = json.loads(text.decode(), object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise CorruptNode(f"{what}: expected JSON ({error})") from None
    if not isinstance(value, dict):
        raise CorruptNode(f"{what}: expected a JSON object")
    return value


def _checked_strings(strings: object, table: dict[str, object]) -> dict[str, str]:
    """The metadata of a node of our schema, unchanged since it was sealed."""
    if not isinstance(strings, dict) or not all(isinstance(s, str) for s in strings.values()):
        raise CorruptNode("metadata: expected strings")
    schema = strings.get("schema")
    if SEAL not in strings:
        if schema == SCHEMA or not all(_is_row(row) for row in table.values()):
            raise CorruptNode(f"metadata: expected {SEAL}, and tensors beside it")
        raise ForeignNode(f"schema {schema}: expected {SCHEMA}")
    columns = {name: _column(row) for name, row in table.items()}
    if _seal({name: s for name, s in strings.items() if name != SEAL}, columns) != strings[SEAL]:
        raise CorruptNode(f"{SEAL}: expected that of the header, which is another")
    if schema != SCHEMA:
        raise ForeignNode(f"schema {schema}: expected {SCHEMA}")
    if strings.keys() != FIELDS:
        odd = ", ".join(sorted(strings.keys() ^ FIELDS)[:4])
        raise CorruptNode(f"metadata: missing or unexpected: {odd}")
    return strings


def _seal(strings: dict[str, str], table: dict[str, object]) -> str:
    """Checksum of the header's meaning: it outlives another writer's order and padding."""
    return checksum(json.dumps([strings, table], sort_keys=True, separators=(",", ":")).encode())


def _column(row: object) -> list[object]:
    """What the seal covers of a tensor; nothing was ever sealed with that of a row that is none."""
    if not _is_row(row) or not _are_counts(row["shape"]):
        return []
    return [str(row.get("dtype")), row["shape"]]


def _slot(name: str, row: object, digest: object, data_begin: int) -> TensorSlot:
    if not _is_row(row):
        raise CorruptNode(f"{name}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CorruptNode(f"{name}: dtype {dtype!r}, expected one of {', '.join(ITEM_BYTES)}")
    if not _are_counts(shape) or len(shape) > 8:
        raise CorruptNode(f"{name}: expected a shape of at most 8 counts")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise CorruptNode(f"{name}: expected data_offsets [begin, end]")
    if not isinstance(digest, str) or not CHECKSUM.fullmatch(digest):
        raise CorruptNode(f"{name}: expected a checksum of 32 hex digits")
    begin, end = offsets
    num_bytes = ITEM_BYTES[dtype] * math.prod(shape)
    if end - begin != num_bytes:
        raise CorruptNode(f"{name}: {end - begin} bytes, {dtype} {shape} has {num_bytes}")
    return TensorSlot(name, dtype, tuple(shape), data_begin + begin, data_begin + end, digest)


def _is_row(row: object) -> TypeGuard[dict[str, object]]:
    return isinstance(row, dict) and row.keys() == {"dtype", "shape", "data_offsets"}


def _are_counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 63 for value in values
    )


def _expect_no_holes(slots: list[TensorSlot], data_begin: int, file_bytes: int) -> None:
    ends = [data_begin, *(slot.end for slot in slots)]
    begins = [*(slot.begin for slot in slots), file_bytes]
    for end, begin in zip(ends, begins, strict=True):
        if end != begin:
            raise CorruptNode(f"a tensor ends at byte {end}, the next or the file's end is {begin}")


def _metadata(strings: dict[str, str]) -> NodeMetadata:
    begin, end = _number(strings, "begin"), _number(strings, "end")
    if not begin < end <= MAX_TOKENS:
        raise CorruptNode(f"tokens [{begin}, {end}): expected begin < end <= {MAX_TOKENS}")
    parent = strings["parent"]
    if bool(parent) != (begin > 0) or (parent and not KEY.fullmatch(parent)):
        raise CorruptNode(f"parent {parent[:128]!r} of a node at token {begin}")
    split = strings["split"].split(",")
    if not all(NUMBER.fullmatch(number) for number in split):
        raise CorruptNode(f"split {strings['split'][:128]!r}: expected the shards' first layers")
    layers = tuple(map(int, split))
    if layers[0] != 0 or any(a >= b for a, b in pairwise(layers)):
        raise CorruptNode(f"split {layers}: expected 0, then strictly rising layers")
    created_s = _number(strings, "created")
    return NodeMetadata(strings["namespace"], strings["key"], parent, begin, end, layers, created_s)


def _number(strings: dict[str, str], field: str) -> int:
    if not NUMBER.fullmatch(strings[field]):
        raise CorruptNode(f"{field} {strings[field][:128]!r}: expected a number")
    return int(strings[field])
