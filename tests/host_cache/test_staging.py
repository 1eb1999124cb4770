"""Blocks of a lane's rows hold the same numbers, wherever its chunks lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from luceasync.host_cache.copies import HostRows
from luceasync.host_cache.staging import DirectStaging, RowBlock, Staging, blocks_of
from luceasync.kv.cache import LaneCache
from luceasync.kv.pages import PageEvent
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.delta import DeltaSpec
from luceasync.pipeline.platform import open_platform

WIDE, NARROW = (AttentionSpec(2, n, 4, 4, 1e4, gated=False) for n in (2, 1))
KINDS = (WIDE, DeltaSpec(1, 1, 3, 5, 4), NARROW, WIDE)
NUM_CHUNKS, LANE, BLOCK = 7, 1, 160
NUM_TOKENS = NUM_CHUNKS * 64 - 9
NAMES = ("attn_k", "attn_v")


def truth() -> dict[tuple[str, int], Tensor]:
    """All rows of the lane."""
    return {
        (name, layer): torch.randn(
            NUM_TOKENS, kind.num_kv_heads, 4, generator=torch.manual_seed(layer)
        )
        + number
        for number, name in enumerate(NAMES)
        for layer, kind in enumerate(KINDS)
        if isinstance(kind, AttentionSpec)
    }


def lane_with(rows: dict[tuple[str, int], Tensor], here: dict[int, int], device: str) -> LaneCache:
    """A cache with these chunks in these pages; no other page holds a number."""
    cache = LaneCache(
        KINDS,
        num_lanes=2,
        num_pages=NUM_CHUNKS,
        dtype_of=lambda role: torch.float32,
        device=open_platform(device).device,
    )
    for stack in cache.row_stacks:
        stack.fill_(torch.nan)
    for (name, layer), tensor in rows.items():
        for chunk, page in here.items():
            part = tensor[chunk * 64 : (chunk + 1) * 64]
            cache.rows_of(name, layer)[LANE, page * 64 : page * 64 + len(part)] = part
    cache.place([PageEvent(LANE, chunk, page) for chunk, page in sorted(here.items())])
    for chunk, page in here.items():  # a device may blank the page that is written next
        for (name, layer), tensor in rows.items():
            part = tensor[chunk * 64 : (chunk + 1) * 64]
            cache.rows_of(name, layer)[LANE, page * 64 : page * 64 + len(part)] = part
    return cache


class Nodes:
    """Host memory of the lane's rows, cut anywhere; it lacks the tokens `missing`."""

    missing: frozenset[int] = frozenset()

    def __init__(self, rows: dict[tuple[str, int], Tensor], cuts: list[int], pin: bool) -> None:
        ends = [*cuts, NUM_TOKENS]
        self._nodes = []
        for begin, end in zip([0, *cuts], ends, strict=True):
            tensors = {key: tensor[begin:end].clone() for key, tensor in rows.items()}
            if pin:
                tensors = {key: tensor.pin_memory() for key, tensor in tensors.items()}
            self._nodes.append(HostRows(begin, end, 0, tensors, None))

    def held_until(self, begin: int, end: int) -> int:
        return min((token for token in self.missing if begin <= token < end), default=end)

    def rows(self, begin: int, end: int) -> list[HostRows]:
        found = []
        for node in self._nodes:
            first, last = max(begin, node.begin), min(end, node.end)
            if first < last:
                found.append(HostRows(first, last, first - node.begin, node.tensors, None))
        return found


def assert_whole(staging: Staging, blocks: list[RowBlock], rows: dict[tuple[str, int], Tensor]):
    for layer in (3, 0, 2, 0):
        for names in (NAMES, NAMES[:1]):
            found = [
                (begin, tuple(tensor.clone() for tensor in tensors))
                for begin, tensors in staging.rows(blocks, layer, names)
            ]
            assert [begin for begin, _ in found] == [*range(0, NUM_TOKENS, staging.block_tokens)]
            for at, name in enumerate(names):
                whole = torch.cat([tensors[at] for _, tensors in found]).cpu()
                assert torch.equal(whole, rows[name, layer])


@settings(max_examples=40)
@given(
    st.permutations(range(NUM_CHUNKS)),
    st.sets(st.integers(0, NUM_CHUNKS - 1)),
    st.lists(st.integers(1, NUM_TOKENS - 1), unique=True, max_size=4).map(sorted),
    st.sampled_from([0, 64, 128, BLOCK]),
)
def test_blocks_are_whole_wherever_their_rows_lie(order, gone, cuts, short_tokens):
    rows = truth()
    here = {chunk: page for chunk, page in enumerate(order) if chunk not in gone}
    cache = lane_with(rows, here, "cpu:0")
    nodes = Nodes(rows, cuts, pin=False)
    blocks = blocks_of(cache, LANE, NUM_TOKENS, BLOCK, short_tokens, nodes)
    assert_whole(DirectStaging(cache, BLOCK), blocks, rows)


@pytest.mark.parametrize(
    ("short_tokens", "missing", "from_pages"),
    [
        (0, (), [(1, 3), (4, 5)]),
        (64, (), [(1, 3)]),
        (64, (4 * 64,), [(1, 3), (4, 5)]),  # not written there yet, or never
        (128, (2 * 64,), [(2, 3)]),  # from there on
        (128, (), []),
    ],
)
def test_short_pieces_that_host_memory_has_too_are_read_from_there(
    short_tokens, missing, from_pages
):
    rows = truth()
    cache = lane_with(rows, {1: 0, 2: 1, 4: 2}, "cpu:0")
    nodes = Nodes(rows, [], pin=False)
    nodes.missing = frozenset(missing)
    [block] = blocks_of(cache, LANE, NUM_TOKENS, NUM_TOKENS, short_tokens, nodes)
    found = [(s.at // 64, (s.at + s.num_rows) // 64) for s in block.sections if s.host is None]
    assert found == from_pages
    assert len(block.sections) == 2 * len(from_pages) + 1, "the rest is in as few pieces as can be"
    assert_whole(DirectStaging(cache, NUM_TOKENS), [block], rows)


def test_rows_in_one_piece_are_read_where_they_are():
    rows = truth()
    cache = lane_with(rows, {0: 0, 1: 1, 2: 2, 6: 3}, "cpu:0")
    nodes = Nodes(rows, [], pin=False)
    blocks = blocks_of(cache, LANE, NUM_TOKENS, 64, 0, nodes)
    found = [keys.data_ptr() for _, (keys,) in DirectStaging(cache, 64).rows(blocks, 0, NAMES[:1])]
    own = cache.rows_of("attn_k", 0)[LANE]
    host = nodes.rows(0, NUM_TOKENS)[0].tensors["attn_k", 0]
    assert found[:3] == [own[64 * page].data_ptr() for page in range(3)]
    assert found[3:6] == [host[64 * chunk].data_ptr() for chunk in (3, 4, 5)]
    assert found[6] == own[64 * 3].data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("is_held_up", [False, True])
def test_a_gpu_has_the_same_blocks(is_held_up: bool):
    """Places are written again and again, while another stream reads too; copies may be late."""
    from luceasync.host_cache.staging import StreamStaging

    rows = truth()
    cache = lane_with(rows, {0: 3, 4: 0, 5: 6}, "cuda:0")
    nodes = Nodes(rows, [100, 129, 300], pin=True)
    blocks = blocks_of(cache, LANE, NUM_TOKENS, BLOCK, 0, nodes)
    staging = StreamStaging(cache, BLOCK)
    for place in (next(staging._places) for _ in range(2)):
        place.bytes.fill_(255)  # NaN, whatever it is read as
    torch.cuda.synchronize()  # the staging does not know of this write
    if is_held_up:
        with torch.cuda.stream(staging._stream):
            torch.cuda._sleep(200_000_000)
    assert_whole(staging, blocks, rows)
    with open_platform("cuda:0").side_stream():
        assert_whole(staging, blocks, rows)
    staging.close()
