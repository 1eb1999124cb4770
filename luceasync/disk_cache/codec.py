"""A node's safetensors files: their names, layout, headers and checksums.

Writes and checks headers. Knows no directory, no tensor library, and not what a tensor's name means
beyond the part to which it belongs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeGuard

import xxhash

from luceasync.cyext.names import parse_name
from luceasync.disk_cache import metadata as node_metadata
from luceasync.disk_cache.metadata import KEY, NodeMetadata
from luceasync.errors import CorruptNode, ForeignNode

TOKENS = "tokens"
TOKEN_DTYPE = "I32"

# The kinds of a layer's tensors that belong to a node's end; the model's layers say which.
EndKinds = frozenset[str]

ITEM_BYTES = {  # the dtypes of safetensors whose items are whole bytes
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


class NodePart(StrEnum):
    """What a tensor is needed for. All parts but the span belong to the node's end, and can be left
    out where another node follows.
    """

    SPAN = "span"  # the tokens and what each of them left behind
    STATE = "state"
    LOGITS = "logits"
    FEATURES = "features"
    LEDGER = "ledger"  # which chunks were on the devices, and what they were worth


class Half(StrEnum):
    """A node is two files: that of the rows is written once, that of the end comes and goes.

    The file of the rows may hold the end too: it did before ends had files of their own.
    """

    ROWS = "rows"  # the tokens, and what each of them left behind: rows, features
    END = "end"  # what is true at the last token alone


# What the file of an end holds.
END_PARTS = frozenset((NodePart.STATE, NodePart.LOGITS, NodePart.LEDGER))


@dataclass(frozen=True, slots=True)
class SealedTensor:
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
class TensorSlot:
    """A tensor and the bytes `[begin, end)` of the file that hold it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    xxh3_128: str


SUFFIXES = {Half.ROWS: ".safetensors", Half.END: ".end"}
# A key, the host and process that write the file, and a random number. Without the host: a file
# of an earlier version, whose servers shared no directory between hosts.
TEMPORARY = re.compile(
    r"\.[0-9a-f]+\.(?:(?P<host>[0-9a-f]{16})\.)?(?P<process>[0-9]{1,9})\.[0-9a-f]+\.tmp"
)
NAMESPACE = re.compile(r"[0-9A-Za-z_-]{1,128}")


def file_name(key: str, half: Half) -> str:
    """The name of the file of this half of the node."""
    return f"{key}{SUFFIXES[half]}"


def parse_file_name(name: str) -> tuple[str, Half] | None:
    """Key and half of a node's file; None for a name that is not ours."""
    for half, suffix in SUFFIXES.items():
        key = name.removesuffix(suffix)
        if key != name and KEY.fullmatch(key):
            return key, half
    return None


def part_of(name: str, end_kinds: EndKinds) -> NodePart:
    """The part to which a tensor belongs, by its name; the span if the name says nothing else."""
    if name == "snap_prefill_logits":
        return NodePart.LOGITS
    if name == "kvflash_ledger":
        return NodePart.LEDGER
    if name.startswith("dflash_feature_"):
        return NodePart.FEATURES
    try:
        _, kind, _ = parse_name(name)
    except ValueError:  # not a layer's tensor
        return NodePart.SPAN
    return NodePart.STATE if kind in end_kinds else NodePart.SPAN


def file_order(entries: Iterable[SealedTensor], end_kinds: EndKinds) -> list[SealedTensor]:
    """The entries in the order of a file: the tokens, the rest of the span, and the end.

    safetensors allows no holes. Within the span and within the end, tensors are sorted by the
    power of two that divides their size, at most 64, descending: where the sizes of the span are
    multiples of 64, each tensor is aligned to its items, however many tokens there are.
    """

    def place(entry: SealedTensor) -> tuple[bool, bool, int]:
        is_end = part_of(entry.name, end_kinds) is not NodePart.SPAN
        return is_end, entry.name != TOKENS, -math.gcd(entry.num_bytes, 64)

    return sorted(entries, key=place)


SCHEMA = "luceasync.node.2"
END_SCHEMA = "luceasync.end.1"
PAGE_BYTES = 4096  # what follows the tokens begins on a multiple, for direct reads
LINE_BYTES = 64
MAX_HEADER_BYTES = 4 << 20
MAX_FILE_BYTES = 16 << 30  # more than memory has room for; a sparse file claims anything
LENGTH_BYTES = 8  # a safetensors file begins with its header's length, little-endian

Buffer = bytes | bytearray | memoryview

CHECKSUM = re.compile(r"[0-9a-f]{32}")
SEAL = "header_xxh3_128"
FIELDS = node_metadata.FIELDS | {"schema", "xxh3_128", SEAL}


@dataclass(frozen=True, slots=True)
class NodeHeader:
    """A checked header; `slots` in the order of the file and without holes."""

    metadata: NodeMetadata
    slots: tuple[TensorSlot, ...]
    data_begin: int
    file_bytes: int
    end_kinds: EndKinds

    def part_of(self, name: str) -> NodePart:
        """The part to which the tensor of that name belongs."""
        return part_of(name, self.end_kinds)

    @property
    def parts(self) -> frozenset[NodePart]:
        """The parts that the file holds."""
        return frozenset(self.part_of(slot.name) for slot in self.slots)

    @property
    def end_bytes(self) -> int:
        """Size of the tensors that belong to the node's end alone."""
        return sum(s.end - s.begin for s in self.slots if self.part_of(s.name) is not NodePart.SPAN)

    @property
    def tokens_slot(self) -> TensorSlot:
        """The slot of the tokens."""
        return next(slot for slot in self.slots if slot.name == TOKENS)

    def held(self, *, with_end: bool) -> tuple[TensorSlot, ...]:
        """The slots of the whole node, or of its span alone."""
        if with_end:
            return self.slots
        return tuple(slot for slot in self.slots if self.part_of(slot.name) is NodePart.SPAN)


@dataclass(frozen=True, slots=True)
class EncodedFile:
    """Half a node as the bytes of its file: the header, then the tensors in the header's order.
    They must not change before the file is written.
    """

    metadata: NodeMetadata
    half: Half
    header: bytes
    buffers: tuple[Buffer, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(memoryview(buffer).nbytes for buffer in self.buffers)


def checksum(content: Buffer) -> str:
    """xxh3_128 of the bytes, in hex. Releases the GIL."""
    return xxhash.xxh3_128_hexdigest(content)


def metadata_strings(
    entries: Sequence[SealedTensor], metadata: NodeMetadata, half: Half = Half.ROWS
) -> dict[str, str]:
    """The safetensors metadata of a file; the last entry seals the others and the table."""
    strings = {
        "schema": _schema(half),
        **node_metadata.to_strings(metadata),
        "xxh3_128": json.dumps({entry.name: entry.xxh3_128 for entry in entries}),
    }
    table = {entry.name: [entry.dtype, list(entry.shape)] for entry in entries}
    return {**strings, SEAL: _seal(strings, table)}


def encode_header(
    entries: Sequence[SealedTensor], metadata: NodeMetadata, half: Half = Half.ROWS
) -> bytes:
    """The bytes before the tensors, which follow in this order without holes.

    In a file of rows, what follows the tokens begins on a page; a file of an end begins on a cache
    line, since a page is much beside a small state. Raises ValueError if a tensor would not be
    aligned to its items: never in `file_order`, with a span of multiples of 64 bytes beside the
    tokens.
    """
    table: dict[str, object] = {"__metadata__": metadata_strings(entries, metadata, half)}
    lead_bytes = entries[0].num_bytes if entries[0].name == TOKENS else 0
    begin = 0
    for entry in entries:
        if (begin - lead_bytes) % ITEM_BYTES[entry.dtype]:
            raise ValueError(
                f"{entry.name}: {entry.dtype} would begin {begin - lead_bytes} bytes after a page"
            )
        end = begin + entry.num_bytes
        table[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (begin, end),
        }
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    unit = PAGE_BYTES if half is Half.ROWS else LINE_BYTES
    text += b" " * (-(LENGTH_BYTES + len(text) + lead_bytes) % unit)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def encode_file(
    entries: Sequence[SealedTensor],
    contents: Mapping[str, Buffer],
    metadata: NodeMetadata,
    half: Half = Half.ROWS,
) -> EncodedFile:
    """The file of the entries, in their order, whose bytes are `contents`, contiguous. Raises
    CorruptNode where they disagree, or where a reader would refuse the tokens; see encode_header.
    """
    buffers = tuple(contents[entry.name] for entry in entries)
    for entry, buffer in zip(entries, buffers, strict=True):
        found = memoryview(buffer).nbytes
        if found != entry.num_bytes:
            raise CorruptNode(
                f"{entry.name}: {found} bytes, {entry.dtype} {entry.shape} has {entry.num_bytes}"
            )
    _expect_tokens(entries, metadata, half)
    return EncodedFile(metadata, half, encode_header(entries, metadata, half), buffers)


def header_bytes_at_most(num_tensors: int) -> int:
    """An upper bound of what `encode_header` gives for so many tensors, within a page."""
    return PAGE_BYTES + 1024 + 256 * num_tensors


def header_extent(first_bytes: Buffer, file_bytes: int) -> int:
    """Where the data of the file begins, from its first 8 bytes. Raises CorruptNode."""
    if file_bytes < LENGTH_BYTES or len(first_bytes) < LENGTH_BYTES:
        raise CorruptNode(f"{file_bytes} bytes: expected a header of at least {LENGTH_BYTES}")
    if file_bytes > MAX_FILE_BYTES:
        raise CorruptNode(f"{file_bytes} bytes: a node has {MAX_FILE_BYTES} at most")
    extent = LENGTH_BYTES + int.from_bytes(first_bytes[:LENGTH_BYTES], "little")
    if extent > min(file_bytes, MAX_HEADER_BYTES):
        raise CorruptNode(
            f"header of {extent} bytes: the file has {file_bytes}, {MAX_HEADER_BYTES} are allowed"
        )
    return extent


def decode_header(
    first_bytes: Buffer,
    file_bytes: int,
    *,
    namespace: str,
    key: str,
    end_kinds: EndKinds,
    half: Half = Half.ROWS,
) -> NodeHeader:
    """The header of a file of `file_bytes` bytes, all of it checked.

    `first_bytes`: at least the first `header_extent` bytes; `key` and `half`: from the file's name.
    Raises CorruptNode if it is damaged or another node's, ForeignNode if it is whole but of another
    schema or namespace, or not a node.
    """
    extent = header_extent(first_bytes, file_bytes)
    if len(first_bytes) < extent:
        raise CorruptNode(f"header of {extent} bytes: found {len(first_bytes)}")
    table = _parse_object(bytes(first_bytes[LENGTH_BYTES:extent]), "header")
    strings = _checked_strings(table.pop("__metadata__", {}), table, _schema(half))
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
    metadata = node_metadata.from_strings(strings)
    _expect_tokens(slots, metadata, half)
    return NodeHeader(metadata, tuple(slots), extent, file_bytes, end_kinds)


def verify(slot: TensorSlot, content: Buffer) -> None:
    """Raise CorruptNode unless `content`, the bytes of the tensor, has its checksum."""
    if checksum(content) != slot.xxh3_128:
        raise CorruptNode(f"{slot.name}: expected checksum {slot.xxh3_128}")


def _schema(half: Half) -> str:
    return SCHEMA if half is Half.ROWS else END_SCHEMA


def _parse_object(text: bytes, what: str) -> dict[str, object]:
    """A JSON object in which no name comes twice, at any depth."""

    def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise CorruptNode(f"{what}: a name occurs twice")
        return found

    try:
        value = json.loads(text.decode(), object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise CorruptNode(f"{what}: expected JSON ({error})") from None
    if not isinstance(value, dict):
        raise CorruptNode(f"{what}: expected a JSON object")
    return value


def _checked_strings(strings: object, table: dict[str, object], expected: str) -> dict[str, str]:
    """The metadata, of the expected schema and unchanged since it was sealed."""
    if not isinstance(strings, dict) or not all(isinstance(s, str) for s in strings.values()):
        raise CorruptNode("metadata: expected strings")
    schema = strings.get("schema")
    if SEAL not in strings:
        if schema == expected or not all(_is_row(row) for row in table.values()):
            raise CorruptNode(f"metadata: expected {SEAL}, and tensors beside it")
        raise ForeignNode(f"schema {schema}: expected {expected}")
    columns = {name: _column(row) for name, row in table.items()}
    if _seal({name: s for name, s in strings.items() if name != SEAL}, columns) != strings[SEAL]:
        raise CorruptNode(f"{SEAL}: does not match the header")
    if schema != expected:
        raise ForeignNode(f"schema {schema}: expected {expected}")
    if strings.keys() != FIELDS:
        odd = ", ".join(sorted(strings.keys() ^ FIELDS)[:4])
        raise CorruptNode(f"metadata: missing or unexpected: {odd}")
    return strings


def _seal(strings: dict[str, str], table: Mapping[str, object]) -> str:
    """Checksum of the header's meaning: it does not depend on a writer's order and padding."""
    return checksum(json.dumps([strings, table], sort_keys=True, separators=(",", ":")).encode())


def _column(row: object) -> list[object]:
    """What the seal covers of a tensor; that of an invalid row was never sealed."""
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


def _expect_tokens(
    slots: Iterable[TensorSlot | SealedTensor], metadata: NodeMetadata, half: Half
) -> None:
    num_tokens = metadata.end - metadata.begin
    found = [(slot.dtype, slot.shape) for slot in slots if slot.name == TOKENS]
    if half is Half.END:
        if found:
            raise CorruptNode(f"{TOKENS}: expected only in the file of the rows")
        return
    if found != [(TOKEN_DTYPE, (num_tokens,))]:
        raise CorruptNode(f"{TOKENS}: expected {TOKEN_DTYPE} [{num_tokens}]")
