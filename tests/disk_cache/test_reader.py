"""Only as much of a file is read as is needed, and nothing is returned unchecked."""

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

from luceasync.disk_cache.codec import ITEM_BYTES, NodePart
from luceasync.disk_cache.files import HEAD_BYTES, FileSystem, allocate
from luceasync.disk_cache.reader import Allocate, NodeFile, ReadCancelled, read_node, read_tokens
from luceasync.errors import CorruptNode
from luceasync.prefix_tree.node import pack_tokens
from tests.disk_cache.faulty_files import FaultyFiles
from tests.disk_cache.node_files import END_KINDS, NAMESPACE, SHAPES, TOKENS, contents_of, file_of

SPAN = {"tokens", "ls0_attn_k.0", "empty"}
BIG_END = TOKENS | {"ls0_delta.0": ("F32", (3, 1 << 20))}
LONG = {"tokens": ("I32", (HEAD_BYTES,)), "ls0_attn_k.0": ("BF16", (HEAD_BYTES, 32))}


def never() -> bool:
    return False


def read(
    path: Path,
    *,
    with_end: bool,
    files: FileSystem | None = None,
    allocate: Allocate = allocate,
) -> NodeFile:
    return read_node(
        files or FileSystem(),
        path,
        NAMESPACE,
        end_kinds=END_KINDS,
        with_end=with_end,
        allocate=allocate,
        is_cancelled=never,
    )


@pytest.mark.parametrize("with_end", [True, False])
def test_a_node_says_what_was_read_of_it(path: Path, tier: object, with_end: bool) -> None:
    contents = contents_of()
    path.write_bytes(file_of(contents))
    found = read(path, with_end=with_end)
    names = SHAPES.keys() if with_end else SPAN
    assert {name: bytes(v) for name, v in found.tensors.items()} == {n: contents[n] for n in names}
    assert found.parts == ({"span", "state", "features"} if with_end else {NodePart.SPAN})
    assert found.tokens == pack_tokens(contents["tokens"])
    assert (found.num_bytes == path.stat().st_size) == with_end


def test_without_the_end_its_bytes_are_not_read(path: Path, tier: object) -> None:
    path.write_bytes(file_of(contents_of(0, BIG_END), BIG_END))
    read_sizes: list[int] = []
    files = FaultyFiles(lambda: read_sizes.append(1), before="readinto")
    assert read(path, with_end=False, files=files).num_bytes < HEAD_BYTES
    assert read_sizes == []  # it came with the header
    assert read(path, with_end=True, files=files).num_bytes > 9 << 20
    assert len(read_sizes) > 1


@pytest.mark.slow
def test_memory_of_the_end_goes_with_the_end(path: Path, tier: object) -> None:
    path.write_bytes(file_of(contents_of(0, BIG_END), BIG_END))
    held: list[weakref.ref] = []

    def allocate_watched(num_bytes: int) -> memoryview:
        region = np.empty(num_bytes, np.uint8)
        held.append(weakref.ref(region))
        return memoryview(region)

    found = read(path, with_end=True, allocate=allocate_watched)
    tensors = dict(found.tensors)
    del found, tensors["ls0_delta.0"]
    gc.collect()
    assert [region() is None for region in held] == [False, True]


def test_tensors_are_aligned_to_their_items(path: Path, tier: object) -> None:
    shapes = TOKENS | {"ls0_conv.1": ("BF16", (2,)), "dflash_feature_meta": ("I64", (5,))}
    path.write_bytes(file_of(contents_of(0, shapes), shapes))
    found = read(path, with_end=True)
    for slot in found.header.slots:
        address = np.frombuffer(found.tensors[slot.name], np.uint8).ctypes.data
        assert slot.name == "tokens" or address % ITEM_BYTES[slot.dtype] == 0


def test_tokens_are_read_alone_wherever_the_header_ends(path: Path, tier: object) -> None:
    for shapes in (SHAPES, LONG):
        contents = contents_of(0, shapes)
        num_tokens = shapes["tokens"][1][0]
        path.write_bytes(file_of(contents, shapes, end=64 + num_tokens))
        header, tokens = read_tokens(FileSystem(), path, NAMESPACE, END_KINDS)
        assert tokens == pack_tokens(contents["tokens"])
        assert header.metadata.end == 64 + num_tokens


@pytest.mark.parametrize("shapes", [SHAPES, LONG], ids=["short", "long"])
def test_damaged_tokens_are_seen_when_read_alone(path: Path, tier, shapes) -> None:
    num_tokens = shapes["tokens"][1][0]
    content = bytearray(file_of(contents_of(0, shapes), shapes, end=64 + num_tokens))
    path.write_bytes(content)
    slot = read_tokens(FileSystem(), path, NAMESPACE, END_KINDS)[0].tokens_slot
    content[slot.end - 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptNode, match="tokens: expected checksum"):
        read_tokens(FileSystem(), path, NAMESPACE, END_KINDS)


def test_a_read_ends_soon_after_it_was_cancelled(path: Path, tier: object) -> None:
    path.write_bytes(file_of(contents_of(0, BIG_END), BIG_END))
    files = FaultyFiles(lambda: pytest.fail("went on"), before="readinto")
    with pytest.raises(ReadCancelled):
        read_node(
            files,
            path,
            NAMESPACE,
            end_kinds=END_KINDS,
            with_end=True,
            allocate=allocate,
            is_cancelled=lambda: True,
        )
