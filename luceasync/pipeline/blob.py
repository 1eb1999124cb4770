"""The first chunks of a lane as one piece of bytes: keys and values in logical order, the recurrent
state of exactly their end where the family has one, and the ledger, whatever of it is on devices.

Magic, 4 bytes; lengths of the header and of the rest, little-endian; the header's xxh3_128; the
header as JSON; the tensors, one after the other. All is checked before anything is touched.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import msgspec
import numpy as np
import torch
from torch import Tensor

from luceasync.cyext.flatten import checksums
from luceasync.errors import SnapshotMismatch, Unsupported
from luceasync.host_cache.nodes import Span
from luceasync.kv.cache import Shape, total_bytes
from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.nodes import NodeKey
from luceasync.pipeline.paging import Ledger, Paging

MAGIC, VERSION = b"KVF2", 2
PREFIX = struct.Struct("<4sIQ32s")  # magic, header bytes, bytes behind it, the header's checksum
MAX_HEADER_BYTES = 64 << 20
NODE = NodeKey(b"blob")  # its name while it is made or taken up


class TensorHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layer's keys or values, [tokens, heads, head_dim], or a state of the end; `layer` is the
    model's own number.
    """

    kind: str
    layer: int
    dtype: str
    shape: tuple[int, ...]
    xxh3_128: str


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`ledger`: of each chunk whether it was on the devices, and its worth; null: not known."""

    version: int
    chunk_tokens: int
    num_chunks: int
    tensors: tuple[TensorHeader, ...]
    ledger: tuple[tuple[bool, float | None], ...]


@torch.inference_mode()
def serialize(lanes: Paging, lane: int, num_tokens: int, max_chunks: int | None = None) -> bytes:
    """The first whole chunks of the lane's `num_tokens` tokens, as far as full attention has made
    them; at most `max_chunks`. Raises MemoryError, ValueError where there is none, and Unsupported
    where they end before the lane does and the family has a recurrent state: of that place there
    is none.
    """
    num_chunks = lanes.exact_end(lane, num_tokens) // CHUNK_TOKENS
    num_chunks = num_chunks if max_chunks is None else min(num_chunks, max_chunks)
    if num_chunks <= 0:
        raise ValueError(f"{num_tokens} tokens, at most {max_chunks} chunks: none is whole")
    end = num_chunks * CHUNK_TOKENS
    has_state = bool(lanes.nodes.sizes.state_bytes)
    if has_state and end != num_tokens:
        raise Unsupported(
            f"a blob of {end} tokens needs the recurrent state after them, and the lane has that "
            f"after its {num_tokens}"
        )
    lanes.nodes.save(lane, NODE, Span(0, end, has_state))
    tensors = _by_layer(lanes.nodes.export(NODE))
    lanes.nodes.drop(NODE)
    parts = [_bytes_of(tensor) for tensor in tensors.values()]
    described = zip(tensors.items(), checksums(parts), strict=True)
    known = lanes.ledger(lane, end) or [(True, float("nan"))] * num_chunks
    header = Header(
        version=VERSION,
        chunk_tokens=CHUNK_TOKENS,
        num_chunks=num_chunks,
        tensors=tuple(
            TensorHeader(kind, layer, _word(tensor.dtype), tuple(tensor.shape), checksum)
            for ((kind, layer), tensor), checksum in described
        ),
        ledger=tuple((here, None if worth != worth else worth) for here, worth in known),
    )
    head = msgspec.json.encode(header)
    size = sum(part.nbytes for part in parts)
    prefix = PREFIX.pack(MAGIC, len(head), size, checksums([head])[0].encode())
    return b"".join([prefix, head, *[part.tobytes() for part in parts]])


@torch.inference_mode()
def deserialize(lanes: Paging, lane: int, blob: bytes, max_ctx_tokens: int) -> int:
    """Make the lane stand after the blob's tokens; how many these are. Raises SnapshotMismatch and
    MemoryError; nothing has changed then.
    """
    header, body = _parts_of(blob)
    end = header.num_chunks * CHUNK_TOKENS
    if not 0 < end <= max_ctx_tokens:
        raise SnapshotMismatch(f"{header.num_chunks} chunks, for lanes of {max_ctx_tokens} tokens")
    if len(header.ledger) != header.num_chunks:
        raise SnapshotMismatch(f"a ledger of {len(header.ledger)}, {header.num_chunks} chunks")
    span = Span(0, end, bool(lanes.nodes.sizes.state_bytes))
    shapes = lanes.nodes.shapes(span)
    tensors = _tensors_of(header, body, shapes)
    lanes.nodes.adopt(NODE, span, tensors)
    ledger: Ledger = [(here, float("nan") if w is None else w) for here, w in header.ledger]
    lanes.expect(lane, ledger)
    lanes.nodes.restore(lane, [NODE], end).wait()
    lanes.kept(lane, NODE, span)
    lanes.nodes.drop(NODE)
    return end


def _parts_of(blob: bytes) -> tuple[Header, memoryview]:
    """The header, which is as it was written, and what is behind it, of the length that it says."""
    if len(blob) < PREFIX.size:
        raise SnapshotMismatch(f"{len(blob)} bytes are no blob")
    magic, header_bytes, size, checksum = PREFIX.unpack_from(blob)
    if magic != MAGIC:
        raise SnapshotMismatch(f"it begins with {magic!r}, expected {MAGIC!r}")
    expected = PREFIX.size + header_bytes + size
    if header_bytes > MAX_HEADER_BYTES or len(blob) != expected:
        raise SnapshotMismatch(f"{len(blob)} bytes, expected {expected}")
    head = blob[PREFIX.size : PREFIX.size + header_bytes]
    if checksums([head])[0].encode() != checksum:
        raise SnapshotMismatch("the header is not as it was written")
    try:
        header = msgspec.json.decode(head, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotMismatch(f"the header: {error}") from None
    for name, found, wanted in (
        ("version", header.version, VERSION),
        ("chunk_tokens", header.chunk_tokens, CHUNK_TOKENS),
    ):
        if found != wanted:
            raise SnapshotMismatch(f"{name} {found}, expected {wanted}")
    return header, memoryview(blob)[PREFIX.size + header_bytes :]


def _tensors_of(header: Header, body: memoryview, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Tensors of exactly these shapes, in memory of their own."""
    expected = {_key(name): (name, shape) for name, shape in shapes.items()}
    found = {(t.kind, t.layer): t for t in header.tensors}
    if found.keys() != expected.keys() or len(found) != len(header.tensors):
        odd = sorted(found.keys() ^ expected.keys())
        raise SnapshotMismatch(f"missing, unexpected or doubled tensors: {odd[:4]}")
    for key, tensor in found.items():
        shape, dtype = expected[key][1]
        if (tensor.shape, tensor.dtype) != (shape, _word(dtype)):
            told = f"{tensor.dtype} {tensor.shape}, expected {_word(dtype)} {shape}"
            raise SnapshotMismatch(f"{tensor.kind} of layer {tensor.layer}: {told}")
    sizes = [total_bytes([expected[t.kind, t.layer][1]]) for t in header.tensors]
    if sum(sizes) != len(body):
        raise SnapshotMismatch(f"{len(body)} bytes of tensors, expected {sum(sizes)}")
    tensors, begin = {}, 0
    for tensor, size in zip(header.tensors, sizes, strict=True):
        part = np.frombuffer(body[begin : begin + size], np.uint8)
        if checksums([part])[0] != tensor.xxh3_128:
            raise SnapshotMismatch(f"{tensor.kind} of layer {tensor.layer}: a wrong checksum")
        name, (shape, dtype) = expected[tensor.kind, tensor.layer]
        tensors[name] = torch.from_numpy(part.copy()).view(dtype).view(shape)
        begin += size
    return tensors


def _by_layer(tensors: Mapping[str, Tensor]) -> dict[tuple[str, int], Tensor]:
    return {_key(name): tensor for name, tensor in tensors.items()}


def _key(name: str) -> tuple[str, int]:
    """Kind and layer: the split that a lane has is no part of it."""
    kind, _, layer = name.partition("_")[2].rpartition(".")
    return kind, int(layer)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()
