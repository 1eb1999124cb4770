"""A node's file, read and checked as far as it is wanted. Its calls block.

Owns where the bytes go, and that none is given out unchecked. Knows no deadline, no event loop and
no other file.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from luceasync.errors import CorruptNode
from luceasync.prefix.codec import Header, decode_header, verify
from luceasync.prefix.files import FileSystem, read_head
from luceasync.prefix.layout import TOKENS, Part, part_of
from luceasync.prefix.node import pack_tokens

PIECE_BYTES = 4 << 20  # read in one call: large beside the call, small beside the cache

Allocate = Callable[[int], memoryview]


@dataclass(frozen=True, slots=True)
class NodeFile:
    """A node as it was written, or its span alone: bytes by tensor name, views of one buffer of
    `num_bytes`. `parts`: which of its parts are among the tensors.
    """

    header: Header
    tensors: Mapping[str, memoryview]
    parts: frozenset[Part]
    num_bytes: int

    @property
    def tokens(self) -> array[int]:
        """The node's own token ids."""
        return pack_tokens(bytes(self.tensors[TOKENS]))


class GivenUp(Exception):
    """Nobody waits for the node any more."""


def read_node(
    files: FileSystem,
    path: Path,
    namespace: str,
    *,
    with_end: bool,
    allocate: Allocate,
    is_given_up: Callable[[], bool],
) -> NodeFile:
    """The node in the file, checked; without its end, only as much of the file as lies before it.

    `allocate(num_bytes)` gives the memory. Raises CorruptNode, ForeignNode, OSError, MemoryError,
    and GivenUp soon after `is_given_up()`.
    """
    with files.open(path) as raw:
        head, file_bytes = read_head(raw)
        header = decode_header(head, file_bytes, namespace=namespace, key=path.stem)
        slots = header.held(with_end=with_end)
        num_bytes = max(slot.end for slot in slots)
        content = allocate(num_bytes)
        num_read = min(len(head), num_bytes)
        content[:num_read] = head[:num_read]
        for slot in slots:
            if num_read < slot.end:
                end = min(max(slot.end, num_read + PIECE_BYTES), num_bytes)
                num_read += _fill(raw, content[num_read:end], is_given_up)
            if num_read < slot.end:
                raise CorruptNode(f"{num_read} bytes: expected {num_bytes}")
            verify([slot], content)  # now, while it is in the processor's cache
    tensors = {slot.name: content[slot.begin : slot.end] for slot in slots}
    return NodeFile(header, tensors, frozenset(map(part_of, tensors)), num_bytes)


def read_tokens(files: FileSystem, path: Path, namespace: str) -> tuple[Header, array[int]]:
    """The header and the token ids, both checked, and nothing else of the file. Raises CorruptNode,
    ForeignNode, OSError.
    """
    with files.open(path) as raw:
        head, file_bytes = read_head(raw)
        header = decode_header(head, file_bytes, namespace=namespace, key=path.stem)
        slot = header.tokens_slot
        content = bytearray(slot.end)
        num_read = min(len(head), slot.end)
        content[:num_read] = head[:num_read]
        if num_read < slot.end:
            begin = max(slot.begin, num_read)
            raw.seek(begin)
            num_read = begin + _fill(raw, memoryview(content)[begin:], lambda: False)
    if num_read < slot.end:
        raise CorruptNode(f"{num_read} bytes: expected {slot.end}")
    verify([slot], content)
    return header, pack_tokens(bytes(content[slot.begin : slot.end]))


def _fill(raw: FileIO, view: memoryview, is_given_up: Callable[[], bool]) -> int:
    """Fill the view as far as the file goes; the number of bytes. Raises OSError and GivenUp."""
    filled = 0
    while filled < len(view):
        if is_given_up():
            raise GivenUp
        num_bytes = raw.readinto(view[filled : filled + PIECE_BYTES])
        if not num_bytes:
            break
        filled += num_bytes
    return filled
