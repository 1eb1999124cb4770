"""Lanes with absent chunks: rounds, moves, and the host memory that they hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from luceasync.errors import LaneMemoryExhausted, PageEventsOutOfOrder, StageFailed
from luceasync.host_cache.arena import PlainMemory
from luceasync.host_cache.nodes import Span
from luceasync.pipeline.backend import LayerSplitBackend
from tests import tiny

POOL, CHUNK, NUM_PROMPT = 512, 128, 970  # 54 tokens are left in the last chunk
SIZES = {"max_ctx_tokens": 2048, "chunk_tokens": CHUNK, "pool_tokens": POOL}


def prompt(num_tokens: int = NUM_PROMPT, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny.VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


def prefilled(backend: LayerSplitBackend, lane: int, tokens: list[int]) -> None:
    for begin in range(0, len(tokens), CHUNK):
        end = min(begin + CHUNK, len(tokens))
        backend.prefill(lane, begin, tokens[begin:end], project=end == len(tokens))


def decoded(
    backend: LayerSplitBackend, lanes: list[int], num_tokens: int, begin: int = NUM_PROMPT
) -> Tensor:
    """Logits of greedy steps: [tokens, lanes, vocab]."""
    tokens, found = [5] * len(lanes), []
    for position in range(begin, begin + num_tokens):
        logits = backend.decode(lanes, [position] * len(lanes), tokens).whole().clone()
        found.append(logits)
        tokens = logits.argmax(-1).tolist()
    return torch.stack(found)


def resident(backend: LayerSplitBackend, lane: int) -> list[int]:
    return sorted(backend.lanes._pager._lanes[lane].residency.pages)


@pytest.mark.slow
@pytest.mark.covered(2)
@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize(("num_shards", "lanes"), [(1, [1]), (3, [0, 1, 2, 3])])
def test_rounds_say_what_plain_steps_say(make_backend, tiny_dir: Path, num_shards, lanes, is_tree):
    backends = [
        make_backend(tiny_dir, **SIZES, num_shards=num_shards, verify_rows=rows)
        for rows in ([], [6])
    ]
    for backend in backends:
        for lane in lanes:
            prefilled(backend, lane, prompt(seed=lane))
    plain = decoded(backends[0], lanes, 24)
    best = [[5] * len(lanes), *plain.argmax(-1).tolist()]
    wrong = [[(token + 1) % tiny.VOCAB_SIZE for token in row] for row in best]
    for begin in range(0, 24, 3):
        if is_tree:  # row 2 and row 4 are wrong; the path is 0, 1, 3
            rows = [best[begin], best[begin + 1], wrong[begin + 1], best[begin + 2]]
            rows += [wrong[begin + 2], wrong[begin + 2]]
            parents = torch.tensor([[-1, 0, 0, 1, 1, 2]] * len(lanes), dtype=torch.int32)
            path = [0, 1, 3]
        else:
            rows = [*best[begin : begin + 3], *wrong[begin : begin + 3]]
            parents, path = None, [0, 1, 2]
        given = torch.tensor(rows).T.contiguous()
        ends = [NUM_PROMPT + begin] * len(lanes)
        logits = backends[1].verify(lanes, ends, given, parents).whole()
        assert (logits[:, path] - plain[begin : begin + 3].transpose(0, 1)).abs().max() < 1e-4
        backends[1].commit([path] * len(lanes))
    assert resident(backends[0], lanes[0]) == resident(backends[1], lanes[0])


@pytest.mark.slow
def test_evicted_chunks_come_back_as_they_were(make_backend, tiny_dir: Path):
    """A lane whose chunks are all moved out and in gives what an unmoved lane gives."""
    found = []
    for is_moved in (False, True):
        backend = make_backend(tiny_dir, **SIZES)
        prefilled(backend, 1, prompt())
        decoded(backend, [1], 1)  # chunks move by the prompt's probe
        wanted = resident(backend, 1)
        if is_moved:
            pager, num_chunks = backend.lanes._pager, NUM_PROMPT // 64 + 1
            for favoured in (range(1, num_chunks, 2), range(num_chunks), wanted):
                for _ in range(8):
                    pager.score(1, [float(c in favoured) for c in range(num_chunks)])
                    backend.lanes._lanes[1].probe.is_first = True
                    backend.lanes._move(1, backend.lanes._lanes[1].probe)
                poison(backend, 1)
        assert resident(backend, 1) == wanted
        found.append(decoded(backend, [1], 8, NUM_PROMPT + 1))
    assert found[0].equal(found[1])


def poison(backend: LayerSplitBackend, lane: int) -> None:
    """Fill pages without a chunk with NaN."""
    used = set(backend.lanes._pager.pages(lane))
    for stage in backend._stages:
        for shard in stage._shards:
            for stack in shard.cache.row_stacks:
                for page in set(range(POOL // 64)) - used:
                    stack[:, lane, page * 64 : (page + 1) * 64] = float("nan")


def test_a_node_of_a_lane_that_is_partly_away_holds_all_of_it(make_backend, tiny_dir: Path):
    whole = make_backend(tiny_dir, **{**SIZES, "pool_tokens": None})
    paged = make_backend(tiny_dir, **SIZES)
    spans = {}
    for backend in (whole, paged):
        prefilled(backend, 1, prompt())
        backend.nodes.save(1, b"all", Span(0, NUM_PROMPT, with_state=False))
        spans[backend] = backend.nodes.export(b"all")
    for name, rows in spans[whole].items():
        assert (spans[paged][name] - rows).abs().max() < 1e-4


def test_a_lane_that_finds_no_host_memory_stays_as_it_was(make_backend, tiny_dir: Path):
    backend = make_backend(tiny_dir, **SIZES)
    prefilled(backend, 1, prompt(512))
    before = resident(backend, 1)
    backend.lanes.keep_with(lambda save, num_bytes: False)
    with pytest.raises(LaneMemoryExhausted, match="exhausted") as caught:
        backend.prefill(1, 512, prompt(64), project=False)
    assert caught.value.lane == 1 and resident(backend, 1) == before
    backend.lanes.keep_with(lambda save, num_bytes: save() is not None)
    assert backend.prefill(1, 512, prompt(64), project=True) is not None


def test_memory_of_what_was_held_is_free_when_the_lane_is(make_backend, tiny_dir: Path):
    memory = Counted()
    backend = make_backend(tiny_dir, **SIZES, memory=memory)
    prefilled(backend, 1, prompt())
    assert backend.lanes.own_bytes > 0 and memory.num_held > 0
    backend.lanes.vacate(1)
    assert backend.lanes.own_bytes == 0 and memory.num_held == 0


def test_a_node_takes_the_place_of_what_was_held_for_the_lane_alone(make_backend, tiny_dir: Path):
    memory = Counted()
    paged = make_backend(tiny_dir, **SIZES, memory=memory)
    prefilled(paged, 1, prompt(896))
    num_own = memory.num_held
    paged.nodes.save(1, b"all", span := Span(0, 896, with_state=False))
    num_of_node = memory.num_held - num_own
    paged.lanes.node_saved(1, b"all", span)
    assert num_own and paged.lanes.own_bytes == 0 and memory.num_held == num_of_node
    whole = make_backend(tiny_dir, **{**SIZES, "pool_tokens": None})
    prefilled(whole, 1, prompt(896))
    found = [b.prefill(1, 896, prompt(64), project=True) for b in (whole, paged)]
    assert (found[0] - found[1]).abs().max() < 1e-4


class Counted(PlainMemory):
    """Counts the regions that are referenced."""

    def __init__(self) -> None:
        self._regions: list = []

    def allocate(self, num_bytes: int) -> memoryview:
        import weakref

        import numpy as np

        area = np.frombuffer(super().allocate(num_bytes), np.uint8)
        self._regions.append(weakref.ref(area))
        return area.data

    @property
    def num_held(self) -> int:
        return sum(region() is not None for region in self._regions)


def test_a_group_refuses_changes_out_of_turn(make_backend, tiny_dir: Path):
    backend = make_backend(tiny_dir, **SIZES)
    prefilled(backend, 1, prompt(64))
    with pytest.raises(PageEventsOutOfOrder, match="page events 7 after 1"):
        backend._passes.place(7, [])


@pytest.mark.slow
@pytest.mark.parametrize("has_room", [True, False])
@torch.inference_mode()
def test_a_probe_reads_pages_of_the_newest_chunk_alone(make_backend, tiny_dir: Path, has_room):
    """Rows outside all nodes are saved first, since they may leave while the probe runs; without
    room they are read from their pages.
    """
    backend = make_backend(tiny_dir, **SIZES)
    prefilled(backend, 1, prompt())
    decoded(backend, [1], 40)
    [stage] = backend._stages
    [shard] = stage._shards
    if not has_room:
        backend.lanes.keep_with(lambda save, num_bytes: False)
    backend.lanes._start_probe(1, NUM_PROMPT + 40, is_first=False)
    probe = shard.past._probes._running[1]
    probe.advance()
    newest = (NUM_PROMPT + 40) // 64
    assert (probe._in_pages == {newest}) == has_room
    assert newest in probe._in_pages and probe.attention_mass().of_chunks.sum() > 0


def test_a_lane_is_left_though_a_group_is_gone(make_backend, tiny_dir: Path, monkeypatch):
    backend = make_backend(tiny_dir, **SIZES)
    prefilled(backend, 1, prompt())

    def gone(lane: int) -> None:
        raise StageFailed(1, "it is gone")

    monkeypatch.setattr(backend.lanes._passes, "reset", gone)
    with pytest.raises(StageFailed):
        backend.reset(1)
    backend.lanes.vacate(1)
    monkeypatch.undo()
    backend.reset(1)  # as for all lanes when a stage was restarted
    assert resident(backend, 1) == []
