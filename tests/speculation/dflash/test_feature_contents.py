"""Features between nodes and the ring: those of the prefix that is taken up, and no others."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from luceasync.errors import SnapshotMismatch
from luceasync.host_cache.arena import SLAB_BYTES, Arena, HostMemory, PlainMemory
from luceasync.host_cache.nodes import Span
from luceasync.pipeline.cpu_platform import CpuPlatform
from luceasync.pipeline.devices import host_memory
from luceasync.pipeline.platform import Platform, open_platform
from luceasync.speculation.dflash.feature_contents import (
    DATA,
    META,
    DraftFeatures,
    FeatureRows,
    LocalFeatures,
    decode,
    encode,
)
from luceasync.speculation.dflash.features import FeatureRing, FeatureSpec

SPEC = FeatureSpec((1,), 1)
CAPACITY = 8


class Heard:
    """A fake speculator, and contents that are lists of positions."""

    spec, capacity_tokens, row_bytes = SPEC, CAPACITY, 4
    is_lost = False

    def __init__(self) -> None:
        self.restored_rows: list[float] | None = None
        self.with_features = False
        self.num_dropped = 0

    def restored(self, lane: int, end: int, *, with_features: bool) -> None:
        self.with_features = with_features

    def adopt(self, rows: Tensor) -> list[float]:
        return rows[:, 0].tolist()

    def is_there(self, content: list[float]) -> bool:
        return not self.is_lost

    def export(self, content: list[float]) -> Tensor | None:
        return None if self.is_lost else torch.tensor(content)[:, None]

    def restore(self, lane: int, begin: int, parts) -> None:
        self.restored_rows = [p for part in parts for p in part.content[part.begin : part.end]]
        assert self.restored_rows[0] == begin

    def drop(self, content: list[float]) -> None:
        self.num_dropped += 1


def part(begin: int, end: int, held: int) -> tuple[Span, dict[str, Tensor]]:
    """A node of tokens `[begin, end)` with the features, their positions, from `held` on."""
    rows = torch.arange(held, end, dtype=torch.float32)[:, None]
    return Span(begin, end, with_state=False), encode(SPEC, FeatureRows(held, rows))


@pytest.mark.parametrize(
    ("parts", "num_tokens", "expected"),
    [
        ([part(0, 6, 0)], 6, range(6)),
        ([part(0, 3, 0), part(3, 6, 3)], 6, range(6)),
        ([part(0, 3, 2), part(3, 6, 3)], 6, range(2, 6)),
        ([part(0, 3, 0), part(3, 6, 5)], 6, range(5, 6)),  # not over the gap
        ([part(0, 3, 0), part(3, 6, 3)], 5, range(5)),  # of the last node a part
        ([part(0, 16, 14)], 8, None),  # of a part that has none
        ([part(0, 6, 4), (Span(6, 9, with_state=False), {})], 9, None),
        ([], 0, None),
    ],
)
def test_features_are_those_right_before_the_end(parts, num_tokens, expected):
    heard = Heard()
    features = DraftFeatures(heard, heard)
    for node, (span, tensors) in enumerate(parts):
        features.adopt(node, span, tensors)
    features.restore(0, range(len(parts)), num_tokens)
    assert heard.with_features == (expected is not None)
    assert heard.restored_rows == (None if expected is None else list(expected))


def test_features_of_another_drafter_are_left_out():
    other = encode(FeatureSpec((2,), 1), FeatureRows(0, torch.zeros(6, 1)))
    features = DraftFeatures(Heard(), Heard())
    features.adopt(b"n", Span(0, 6, with_state=False), other)
    assert features.export(b"n") == {}


def test_what_the_drafter_has_lost_is_not_to_be_had():
    heard = Heard()
    features = DraftFeatures(heard, heard)
    span, tensors = part(0, 6, 0)
    features.adopt(b"n", span, tensors)
    assert features.export(b"n").keys() == tensors.keys()
    heard.is_lost = True
    features.restore(0, [b"n"], 6)
    assert not heard.with_features
    assert features.export(b"n") == {}


def test_features_that_are_replaced_or_dropped_go_once():
    heard = Heard()
    features = DraftFeatures(heard, heard)
    for _ in range(2):
        features.adopt(b"n", *part(0, 6, 0))
    assert heard.num_dropped == 1
    features.drop(b"n")
    features.drop(b"n")
    assert heard.num_dropped == 2


def exported(platform: Platform, memory: HostMemory) -> Tensor:
    """Features of 1 MiB, from a ring on `platform` that has wrapped around."""
    spec = FeatureSpec((1,), 1024)
    ring = FeatureRing(
        spec, num_lanes=2, capacity_tokens=256, dtype=torch.float32, platform=platform
    )
    rows = torch.arange(300.0)[:, None].expand(-1, 1024)
    ring.restore(1, 0, rows)
    features = DraftFeatures(LocalFeatures(SimpleNamespace(ring=ring), memory), Heard())
    features.save(1, b"n", Span(0, 300, with_state=False))
    found = decode(spec, features.export(b"n"), begin=0, end=300)
    assert found is not None and torch.equal(found.rows, rows[44:])
    return found.rows


def test_a_node_gets_what_the_ring_still_holds():
    exported(CpuPlatform(), PlainMemory())


@pytest.mark.gpu
def test_features_go_to_memory_that_was_pinned_in_two_parts():
    arena = host_memory(["cuda:0"], 2 * SLAB_BYTES)
    assert isinstance(arena, Arena) and arena.wait(60)
    held = arena.allocate(SLAB_BYTES - 2**19)
    rows = exported(open_platform("cuda:0"), arena)
    assert rows.data_ptr() < np.frombuffer(held, np.uint8).ctypes.data + SLAB_BYTES
    arena.close()


NODE_SPEC = FeatureSpec(taps=(1, 4), hidden_size=3)
ROWS = torch.arange(24.0).view(4, 6)


def tensors(**change: torch.Tensor) -> dict[str, torch.Tensor]:
    return encode(NODE_SPEC, FeatureRows(6, ROWS)) | change


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_was_encoded_is_decoded(dtype) -> None:
    found = decode(NODE_SPEC, encode(NODE_SPEC, FeatureRows(6, ROWS.to(dtype))), begin=2, end=10)
    assert found.begin == 6
    assert torch.equal(found.rows, ROWS.to(dtype))


def test_the_form_in_the_file() -> None:
    assert tensors()["dflash_feature_meta"].tolist() == [1, 6, 10, 3, 1, 4]
    assert tensors()["dflash_feature_meta"].dtype == torch.int64
    assert tensors()["dflash_feature_data"] is ROWS


def test_a_node_may_have_none() -> None:
    assert decode(NODE_SPEC, {"tokens": torch.zeros(4)}, begin=6, end=10) is None


def meta(*fields: int) -> torch.Tensor:
    return torch.tensor(fields)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({META: meta(2, 6, 10, 3, 1, 4)}, "schema 2, expected 1"),
        ({META: meta(1, 6, 10, 3, 1, 5)}, r"layers \[1, 5\] of 3.* reads layers \[1, 4\] of 3"),
        ({META: meta(1, 6, 10, 3, 4, 1)}, r"layers \[4, 1\]"),
        ({META: meta(1, 6, 10, 2, 1, 4)}, "of 2 numbers"),
        ({META: meta(1, 5, 10, 3, 1, 4)}, r"node of \[6, 10\)"),
        ({META: meta(1, 6, 9, 3, 1, 4)}, r"features of positions \[6, 9\)"),
        ({META: meta(1, 10, 10, 3, 1, 4)}, r"\[10, 10\)"),
        ({META: meta(1, 7, 10, 3, 1, 4)}, r"float32 \(4, 6\), expected a float tensor \(3, 6\)"),
        ({META: meta(1, 6, 10, 3)}, r"int64 \(4,\)"),
        ({META: torch.zeros(6)}, r"float32 \(6,\)"),
        ({META: torch.zeros(1, 6, dtype=torch.int64)}, r"int64 \(1, 6\)"),
        ({DATA: ROWS.long()}, "int64"),
        ({DATA: ROWS[:, :5]}, r"\(4, 5\)"),
    ],
)
def test_others_are_refused_in_words(change, words) -> None:
    with pytest.raises(SnapshotMismatch, match=words):
        decode(NODE_SPEC, tensors(**change), begin=6, end=10)


@pytest.mark.parametrize("name", [META, DATA])
def test_the_two_tensors_go_together(name) -> None:
    with pytest.raises(SnapshotMismatch, match=f"{name} came alone"):
        decode(NODE_SPEC, {name: tensors()[name]}, begin=6, end=10)


@pytest.mark.parametrize("rows", [ROWS[:0], ROWS[:, :5], ROWS.long(), ROWS[0]])
def test_rows_that_are_not_of_the_spec_are_not_encoded(rows) -> None:
    with pytest.raises(ValueError, match="is expected"):
        encode(NODE_SPEC, FeatureRows(0, rows))
