"""The first chunks of a lane as bytes: any split takes them up, and nothing that is damaged."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from luceasync.cyext.flatten import checksums
from luceasync.errors import SnapshotMismatch, Unsupported
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.blob import PREFIX, deserialize, serialize
from tests import tiny
from tests.pipeline.test_paged_lanes import SIZES, prefilled, prompt, resident

NUM_TOKENS = 970


@pytest.fixture
def qwen3_dir(tmp_path: Path) -> Path:
    return tiny.save(tiny.build("qwen3"), tmp_path)


@pytest.fixture
def paged(make_backend, qwen3_dir: Path) -> LayerSplitBackend:
    backend = make_backend(qwen3_dir, **SIZES)
    prefilled(backend, 1, prompt())
    return backend


@pytest.mark.parametrize(("num_shards", "pool"), [(1, 512), (3, 512), (2, None)])
def test_a_lane_of_another_split_goes_on_from_it(make_backend, qwen3_dir, paged, num_shards, pool):
    blob = serialize(paged.lanes, 1, NUM_TOKENS)
    other = make_backend(qwen3_dir, **{**SIZES, "pool_tokens": pool}, num_shards=num_shards)
    assert deserialize(other.lanes, 2, blob, 2048) == 960
    warm = other.prefill(2, 960, prompt()[960:], project=True)
    whole = make_backend(qwen3_dir, **{**SIZES, "pool_tokens": None})
    prefilled(whole, 2, prompt()[:960])
    assert (whole.prefill(2, 960, prompt()[960:], project=True) - warm).abs().max() < 1e-4


def test_whole_chunks_alone_are_written(paged: LayerSplitBackend):
    row_bytes = paged.nodes.sizes.token_bytes
    for max_chunks, expected in ((None, 15), (4, 4), (99, 15)):
        blob = serialize(paged.lanes, 1, NUM_TOKENS, max_chunks)
        _, header_bytes, size, _ = PREFIX.unpack_from(blob)
        assert size == expected * 64 * row_bytes
        assert len(blob) == PREFIX.size + header_bytes + size
    with pytest.raises(ValueError, match="none is whole"):
        serialize(paged.lanes, 1, 63)


def test_the_ledger_goes_with_it(make_backend, qwen3_dir: Path, paged: LayerSplitBackend):
    worth = [float(chunk in (3, 6)) for chunk in range(16)]
    paged.lanes.ledger(1, NUM_TOKENS)  # what the prompt's own look found is there before
    paged.lanes._pager.value(1, worth)
    other = make_backend(qwen3_dir, **SIZES)
    deserialize(other.lanes, 0, serialize(paged.lanes, 1, NUM_TOKENS), 2048)
    assert {0, 3, 6, 11, 12, 13, 14} <= set(resident(other, 0))


def other_header(blob: bytes, **fields: object) -> bytes:
    """The blob with another header, whose checksum is right."""
    magic, header_bytes, size, _ = PREFIX.unpack_from(blob)
    begin = PREFIX.size
    header = msgspec.json.decode(blob[begin : begin + header_bytes])
    for path, value in fields.items():
        *way, last = path.split("__")
        at = header
        for step in way:
            at = at[int(step) if step.isdigit() else step]
        at[int(last) if last.isdigit() else last] = value
    head = msgspec.json.encode(header)
    prefix = PREFIX.pack(magic, len(head), size, checksums([head])[0].encode())
    return prefix + head + blob[begin + header_bytes :]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": 3}, "version 3, expected 2"),
        ({"chunk_tokens": 128}, "chunk_tokens 128, expected 64"),
        ({"num_chunks": 14}, "a ledger of 15, 14 chunks"),
        ({"num_chunks": 0}, "0 chunks"),
        ({"num_chunks": 2**40}, "chunks, for lanes of 2048 tokens"),
        ({"ledger": []}, "a ledger of 0"),
        ({"tensors__0__layer": 77}, "unexpected"),
        ({"tensors__0__kind": "attn_q"}, "unexpected"),
        ({"tensors__0__dtype": "bfloat16"}, "bfloat16"),
        ({"tensors__1__dtype": "float16"}, "float16"),
        ({"tensors__0__shape": [960, 1, 32]}, "960, 1, 32"),
        ({"tensors__0__xxh3_128": "0" * 32}, "a wrong checksum"),
        ({"tensors": []}, "missing"),
        ({"extra": 1}, "the header"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_a_header_that_says_something_else_is_refused(paged: LayerSplitBackend, fields, words):
    blob = other_header(serialize(paged.lanes, 1, NUM_TOKENS), **fields)
    before = resident(paged, 1)
    with pytest.raises(SnapshotMismatch, match=words):
        deserialize(paged.lanes, 1, blob, 2048)
    assert resident(paged, 1) == before


def test_no_damaged_byte_is_taken_up(paged: LayerSplitBackend):
    blob, rng = bytearray(serialize(paged.lanes, 1, NUM_TOKENS, 2)), random.Random(5)
    before = resident(paged, 1)
    for _ in range(1000):
        place, flip = rng.randrange(len(blob)), rng.randrange(1, 256)
        blob[place] ^= flip
        with pytest.raises(SnapshotMismatch):
            deserialize(paged.lanes, 1, bytes(blob), 2048)
        blob[place] ^= flip
    for end in (0, 3, PREFIX.size, len(blob) - 1):
        with pytest.raises(SnapshotMismatch):
            deserialize(paged.lanes, 1, bytes(blob[:end]), 2048)
    with pytest.raises(SnapshotMismatch):
        deserialize(paged.lanes, 1, bytes(blob) + b"x", 2048)
    assert resident(paged, 1) == before
    assert deserialize(paged.lanes, 1, bytes(blob), 2048) == 128


def test_a_recurrent_state_goes_with_it_where_it_is_of_that_place(make_backend, tmp_path: Path):
    hybrid = tiny.save(tiny.build("qwen3_5"), tmp_path)
    backend, other = make_backend(hybrid, **SIZES), make_backend(hybrid, **SIZES, num_shards=2)
    prefilled(backend, 1, prompt()[:960])
    blob = serialize(backend.lanes, 1, 960)
    assert deserialize(other.lanes, 0, blob, 2048) == 960
    warm = other.prefill(0, 960, prompt()[960:], project=True)
    assert (backend.prefill(1, 960, prompt()[960:], project=True) - warm).abs().max() < 1e-4
    with pytest.raises(Unsupported, match="the recurrent state after them"):
        serialize(backend.lanes, 1, NUM_TOKENS)
    with pytest.raises(SnapshotMismatch, match="missing"):
        deserialize(other.lanes, 0, other_header(blob, tensors=[]), 2048)
