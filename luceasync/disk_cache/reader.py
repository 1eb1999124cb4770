"""Reads and checks a node's files, as far as they are needed. Its calls block.

Owns where the bytes go, and that none is returned unchecked. Knows no deadline, no event loop and
no other node.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

from luceasync.disk_cache.codec import (
    PAGE_BYTES,
    TOKENS,
    EndKinds,
    NodeHeader,
    NodePart,
    TensorSlot,
    decode_header,
    parse_file_name,
    verify,
)
from luceasync.disk_cache.files import FileSystem, read_head
from luceasync.errors import CorruptNode, ForeignNode

PIECE_BYTES = 4 << 20  # read in one call: large beside the call, small beside the cache

Allocate = Callable[[int], memoryview]


@dataclass(frozen=True, slots=True)
class NodeFile:
    """A node as it was written, or its span alone: bytes by tensor name. Those of the span lie in
    one region of memory, those of the end in another, so that either can be freed alone. `parts`:
    which parts are among the tensors; `num_bytes`: how much of the files was read. `end`: the
    header of the end's own file; None if there is none, or it is of no use, as `end_fault` says.
    """

    header: NodeHeader
    tensors: Mapping[str, memoryview]
    parts: frozenset[NodePart]
    num_bytes: int
    end: NodeHeader | None = None
    end_fault: CorruptNode | ForeignNode | None = None

    @property
    def slots(self) -> tuple[TensorSlot, ...]:
        """The slots of all tensors in the files; those of the end's own file last."""
        return self.header.slots + (() if self.end is None else self.end.slots)

    @property
    def tokens(self) -> array[int]:
        """The node's own token ids."""
        return array("i", bytes(self.tensors[TOKENS]))


class ReadCancelled(Exception):
    """The read was abandoned."""


class ReadProgress:
    """How far a read has come. Its reader's thread counts; any other may look, or give it up."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_given_up = False

    def advance(self, num_bytes: int) -> None:
        """Count bytes that have come."""
        self.num_bytes += num_bytes

    def give_up(self) -> None:
        """Have the reader stop soon."""
        self.is_given_up = True


def read_node(
    files: FileSystem,
    path: Path,
    namespace: str,
    *,
    end_kinds: EndKinds,
    with_end: bool,
    allocate: Allocate,
    is_cancelled: Callable[[], bool],
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> NodeFile:
    """The content of one of a node's files, checked; without the node's end, only as much of the
    file as lies before it.

    `allocate(num_bytes)` gives the memory, for the span and for the end; `advance(num_bytes)` is
    told of each piece that has come. Raises CorruptNode,
    ForeignNode, OSError, MemoryError, and ReadCancelled soon after `is_cancelled()`.
    """
    with files.open(path) as raw:
        head, header = _read_header(raw, path, namespace, end_kinds)
        slots = header.held(with_end=with_end)
        ends = (i for i, slot in enumerate(slots) if header.part_of(slot.name) is not NodePart.SPAN)
        parted = next(ends, len(slots))
        tensors: dict[str, memoryview] = {}
        for run in filter(None, (slots[:parted], slots[parted:])):
            base = run[0].begin // PAGE_BYTES * PAGE_BYTES  # tensors are aligned as in the file
            content = allocate(max(1, run[-1].end - base))
            tensors |= _read_run(raw, head, run, base, content, is_cancelled, advance)
    return NodeFile(header, tensors, frozenset(map(header.part_of, tensors)), slots[-1].end)


def with_own_end(node: NodeFile, read: Callable[[], NodeFile]) -> NodeFile:
    """The node with its end from the end's own file, which `read` reads, in place of an end in the
    file of its rows. A fault of that file is no fault of the rows. Raises OSError, MemoryError and
    ReadCancelled.
    """
    try:
        end = read()
        rows_of, end_of = node.header.metadata, end.header.metadata
        if (rows_of.parent, rows_of.begin, rows_of.end) != (
            end_of.parent,
            end_of.begin,
            end_of.end,
        ):
            raise CorruptNode(
                f"the end of [{end_of.begin}, {end_of.end}): expected "
                f"[{rows_of.begin}, {rows_of.end}), and the same parent"
            )
    except FileNotFoundError:
        return node
    except (CorruptNode, ForeignNode) as error:
        return replace(node, end_fault=error)
    return replace(
        node,
        tensors={**node.tensors, **end.tensors},
        parts=node.parts | end.parts,
        num_bytes=node.num_bytes + end.num_bytes,
        end=end.header,
    )


def read_header(files: FileSystem, path: Path, namespace: str, end_kinds: EndKinds) -> NodeHeader:
    """The header, checked, and nothing else of the file. Raises like read_tokens."""
    with files.open(path) as raw:
        return _read_header(raw, path, namespace, end_kinds)[1]


class TokenAllowance:
    """How many token ids may still be read: files may claim any number."""

    def __init__(self, num_tokens: int) -> None:
        self._num_left = num_tokens

    def count(self, num_tokens: int) -> None:
        """Count tokens that are held already."""
        self._num_left -= num_tokens

    def take(self, num_tokens: int) -> None:
        """Count tokens that are read. Raises ForeignNode for too many."""
        if num_tokens > self._num_left:
            raise ForeignNode(f"{num_tokens} tokens: {max(0, self._num_left)} more are allowed")
        self._num_left -= num_tokens


def read_tokens(
    files: FileSystem,
    path: Path,
    namespace: str,
    end_kinds: EndKinds,
    allowance: TokenAllowance | None = None,
) -> tuple[NodeHeader, array[int]]:
    """The header and the token ids, both checked, and nothing else of the file. Raises CorruptNode,
    ForeignNode, OSError.
    """
    with files.open(path) as raw:
        head, header = _read_header(raw, path, namespace, end_kinds)
        slot = header.tokens_slot
        num_bytes = slot.end - slot.begin
        if allowance is not None:
            allowance.take(num_bytes // array("i").itemsize)
        content = bytearray(num_bytes)
        known = head[slot.begin : slot.end]
        content[: len(known)] = known
        num_read = len(known)
        if num_read < num_bytes:
            raw.seek(slot.begin + num_read)
            num_read += _fill(raw, memoryview(content)[num_read:], lambda: False)
    if num_read < num_bytes:
        raise CorruptNode(f"{slot.begin + num_read} bytes: expected {slot.end}")
    verify(slot, content)
    return header, array("i", bytes(content))


def _read_header(
    raw: FileIO, path: Path, namespace: str, end_kinds: EndKinds
) -> tuple[bytes, NodeHeader]:
    """The file's first bytes, and its header."""
    named = parse_file_name(path.name)
    assert named is not None, path
    key, half = named
    head, file_bytes = read_head(raw)
    header = decode_header(
        head, file_bytes, namespace=namespace, key=key, end_kinds=end_kinds, half=half
    )
    return head, header


def _read_run(
    raw: FileIO,
    head: bytes,
    slots: Sequence[TensorSlot],
    base: int,
    content: memoryview,
    is_cancelled: Callable[[], bool],
    advance: Callable[[int], None],
) -> dict[str, memoryview]:
    """Read and check slots that follow each other in the file. `content` begins with byte `base` of
    the file; `head`: the file's first bytes.
    """
    begin, end = slots[0].begin, slots[-1].end
    known = head[begin:end]
    at = begin + len(known)
    content[begin - base : at - base] = known
    raw.seek(at)
    tensors = {}
    for slot in slots:
        if at < slot.end:
            stop = min(max(slot.end, at + PIECE_BYTES), end)
            at += _fill(raw, content[at - base : stop - base], is_cancelled, advance)
        if at < slot.end:
            raise CorruptNode(f"{at} bytes: expected {end}")
        tensors[slot.name] = content[slot.begin - base : slot.end - base]
        verify(slot, tensors[slot.name])  # now, while it is in the processor's cache
    return tensors


def _fill(
    raw: FileIO,
    view: memoryview,
    is_cancelled: Callable[[], bool],
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> int:
    """Fill the view as far as the file goes; the number of bytes read. Raises OSError."""
    filled = 0
    while filled < len(view):
        if is_cancelled():
            raise ReadCancelled
        num_bytes = raw.readinto(view[filled : filled + PIECE_BYTES])
        if not num_bytes:
            break
        filled += num_bytes
        advance(num_bytes)
    return filled
