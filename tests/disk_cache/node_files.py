"""Small nodes as encoded files, for the tests of the disk tier."""

from __future__ import annotations

import random
from dataclasses import replace

from luceasync.disk_cache.codec import (
    EncodedFile,
    Half,
    SealedTensor,
    checksum,
    encode_file,
    file_order,
)
from luceasync.disk_cache.metadata import NodeMetadata

NAMESPACE = "feed0123"
END_KINDS = frozenset(("conv", "delta"))
KEY = "ab" * 32
METADATA = NodeMetadata(
    namespace=NAMESPACE,
    key=KEY,
    parent="cd" * 32,
    begin=64,
    end=81,
    split=(0, 2),
    created_s=7,
    generated=True,
    turn_end=False,
)
TOKENS = {"tokens": ("I32", (17,))}
SHAPES = TOKENS | {
    "ls0_attn_k.0": ("BF16", (17, 2, 16)),
    "ls0_conv.1": ("F32", (3, 5)),
    "ls1_delta.2": ("F32", (2, 4, 4)),
    "dflash_feature_meta": ("U8", (13,)),
    "empty": ("F16", (0, 4)),
}

END_SHAPES = {name: SHAPES[name] for name in ("ls0_conv.1", "ls1_delta.2")}
ROW_SHAPES = {name: shape for name, shape in SHAPES.items() if name not in END_SHAPES}


def entries_of(contents: dict[str, bytes], shapes: dict = SHAPES) -> list[SealedTensor]:
    """The tensors' entries in the order of a file."""
    entries = [
        SealedTensor(name, *shapes[name], checksum(content)) for name, content in contents.items()
    ]
    return file_order(entries, END_KINDS)


def contents_of(seed: int = 0, shapes: dict = SHAPES) -> dict[str, bytes]:
    """Random bytes for each tensor of `shapes`."""
    source = random.Random(seed)
    return {
        name: source.randbytes(SealedTensor(name, dtype, shape, "").num_bytes)
        for name, (dtype, shape) in shapes.items()
    }


def node(contents: dict[str, bytes], shapes: dict = SHAPES, **metadata: object) -> EncodedFile:
    """What `DiskTier.write` takes."""
    return encode_file(entries_of(contents, shapes), contents, replace(METADATA, **metadata))


def end_of(contents: dict[str, bytes], shapes: dict = SHAPES, **metadata: object) -> EncodedFile:
    """The file of an end."""
    entries = entries_of(contents, shapes)
    return encode_file(entries, contents, replace(METADATA, **metadata), Half.END)


def file_of(contents: dict[str, bytes], shapes: dict = SHAPES, **metadata: object) -> bytes:
    """The whole file of a node."""
    file = node(contents, shapes, **metadata)
    return b"".join((file.header, *file.buffers))
