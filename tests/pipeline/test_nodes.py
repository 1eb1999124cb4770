"""Saved state is restored to any lane of any split, and continues with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from luceasync.errors import SnapshotMismatch
from luceasync.host_cache.arena import PlainMemory
from luceasync.host_cache.nodes import Span
from luceasync.pipeline.backend import LayerSplitBackend
from tests import tiny

NUM_PROMPT = 150
SHUFFLED = [5, 2, 7, 0, 3, 6, 1, 4]
CHAIN = {"a": Span(0, 64, False), "b": Span(64, 100, True), "c": Span(100, NUM_PROMPT, True)}


@pytest.fixture(scope="module")
def deep_dir(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.build(family, 8), tmp_path_factory.mktemp(f"nodes_{family}"))


class LittleMemory:
    """Room for a number of regions."""

    def __init__(self, num_regions: int) -> None:
        self._left = num_regions

    def allocate(self, num_bytes: int) -> memoryview:
        if not self._left:
            raise MemoryError("no room")
        self._left -= 1
        return PlainMemory().allocate(num_bytes)

    def close(self) -> None:
        """Nothing to free."""


def prompt() -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, tiny.VOCAB_SIZE, (NUM_PROMPT,), generator=generator).tolist()


def prefill_and_save(backend: LayerSplitBackend, lane: int) -> None:
    """Run the prompt and save it as a chain of nodes, each when the lane is at its
    end.
    """
    backend.reset(lane)
    for node, span in CHAIN.items():
        backend.prefill(lane, span.begin, prompt()[span.begin : span.end], project=False)
        backend.nodes.save(lane, node, span)


def decode(backend: LayerSplitBackend, lane: int, begin: int) -> Tensor:
    steps = [backend.decode([lane], [begin + i], [i + 7]).whole()[0].clone() for i in range(12)]
    return torch.stack(steps)


@pytest.mark.slow
def test_a_restored_lane_goes_on_with_the_same_bits(deep_dir: Path, make_backend):
    backend = make_backend(deep_dir, page_order=SHUFFLED)
    prefill_and_save(backend, 0)
    expected = decode(backend, 0, NUM_PROMPT)
    backend.nodes.restore(2, list(CHAIN), NUM_PROMPT)
    assert torch.equal(decode(backend, 2, NUM_PROMPT), expected)


def test_a_prefix_of_the_chain_is_enough_to_go_on_from(deep_dir: Path, make_backend):
    backend = make_backend(deep_dir)
    prefill_and_save(backend, 0)
    whole = decode(backend, 0, NUM_PROMPT)
    backend.nodes.restore(1, ["a", "b"], 100)
    backend.prefill(1, 100, prompt()[100:], project=False)
    assert torch.equal(decode(backend, 1, NUM_PROMPT), whole)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "restored"), [(1, 2), (1, 3), (3, 1), (2, 5), (5, 3)])
def test_a_node_of_one_split_is_taken_up_under_another(
    deep_dir: Path, make_backend, saved: int, restored: int
):
    source = make_backend(deep_dir, num_shards=saved)
    target = make_backend(deep_dir, num_shards=restored, page_order=SHUFFLED)
    prefill_and_save(source, 0)
    for node, span in CHAIN.items():
        target.nodes.adopt(node, span, source.nodes.export(node))
    target.nodes.restore(3, list(CHAIN), NUM_PROMPT)
    assert torch.equal(decode(target, 3, NUM_PROMPT), decode(source, 0, NUM_PROMPT))


def test_a_saved_node_is_a_copy(deep_dir: Path, make_backend):
    backend = make_backend(deep_dir)
    prefill_and_save(backend, 0)
    before = {name: t.clone() for name, t in backend.nodes.export("c").items()}
    backend.reset(0)
    backend.prefill(0, 0, prompt()[::-1], project=False)
    assert all(torch.equal(t, before[name]) for name, t in backend.nodes.export("c").items())


def test_adopting_copies_nothing(deep_dir: Path, make_backend):
    source, target = make_backend(deep_dir), make_backend(deep_dir, num_shards=3)
    prefill_and_save(source, 0)
    given = source.nodes.export("c")
    target.nodes.adopt("c", CHAIN["c"], given)
    taken = {t.data_ptr() for t in target.nodes.export("c").values()}
    assert taken == {t.data_ptr() for t in given.values()}


def _missing(tensors: dict[str, Tensor]) -> None:
    del tensors[max(tensors)]


def _renamed(tensors: dict[str, Tensor]) -> None:
    tensors["ls0_attn_k.99"] = tensors.pop(max(tensors))


def _misnamed(tensors: dict[str, Tensor]) -> None:
    tensors["ls00_attn_k.1"] = tensors.pop(max(tensors))


def _short(tensors: dict[str, Tensor]) -> None:
    name = max(tensors)
    tensors[name] = tensors[name][:-1]


def _cast(tensors: dict[str, Tensor]) -> None:
    name = max(tensors)
    tensors[name] = tensors[name].half()


@pytest.mark.slow
@pytest.mark.parametrize("damage", [_missing, _renamed, _misnamed, _short, _cast])
def test_adopt_takes_all_or_nothing(deep_dir: Path, make_backend, damage):
    source, target = make_backend(deep_dir), make_backend(deep_dir, num_shards=3)
    prefill_and_save(source, 0)
    given = source.nodes.export("c")
    damage(given)
    with pytest.raises(SnapshotMismatch):
        target.nodes.adopt("c", CHAIN["c"], given)
    assert all(not shard.nodes._nodes for shard in target._stages[0]._shards)


def test_a_save_without_room_leaves_nothing_on_any_shard(deep_dir: Path, make_backend):
    backend = make_backend(deep_dir, num_shards=3, memory=LittleMemory(2))
    backend.prefill(0, 0, prompt(), project=False)
    with pytest.raises(MemoryError):
        backend.nodes.save(0, "n", Span(0, NUM_PROMPT, True))
    assert all(not shard.nodes._nodes for shard in backend._stages[0]._shards)


@pytest.mark.slow
def test_a_refused_adopt_leaves_what_was_held(deep_dir: Path, make_backend):
    backend = make_backend(deep_dir, num_shards=3)
    prefill_and_save(backend, 0)
    given = backend.nodes.export("c")
    _missing(given)
    with pytest.raises(SnapshotMismatch):
        backend.nodes.adopt("c", CHAIN["c"], given)
    expected = decode(backend, 0, NUM_PROMPT)
    backend.nodes.restore(1, list(CHAIN), NUM_PROMPT)
    assert torch.equal(decode(backend, 1, NUM_PROMPT), expected)


def test_pure_attention_goes_on_from_a_part_of_a_node(tmp_path: Path, make_backend):
    backend = make_backend(tiny.save(tiny.build("qwen3"), tmp_path), page_order=SHUFFLED)
    prefill_and_save(backend, 0)
    expected = decode(backend, 0, NUM_PROMPT)
    backend.nodes.restore(1, ["a", "b", "c"], 128)
    backend.prefill(1, 128, prompt()[128:], project=False)
    assert torch.equal(decode(backend, 1, NUM_PROMPT), expected)


def test_a_node_without_its_state_is_still_part_of_a_chain(deep_dir: Path, make_backend):
    source, target = make_backend(deep_dir, num_shards=2), make_backend(deep_dir, num_shards=3)
    prefill_and_save(source, 0)
    source.nodes.drop("b", state_only=True)
    assert not any("_delta" in name for name in source.nodes.export("b"))
    for node, span in CHAIN.items():
        given = source.nodes.export(node)
        target.nodes.adopt(node, Span(span.begin, span.end, node == "c"), given)
    target.nodes.restore(0, list(CHAIN), NUM_PROMPT)
    assert torch.equal(decode(target, 0, NUM_PROMPT), decode(source, 0, NUM_PROMPT))


def test_bytes_of_a_node_are_those_of_its_tensors_under_any_split(deep_dir: Path, make_backend):
    for num_shards in (1, 3):
        backend = make_backend(deep_dir, num_shards=num_shards)
        prefill_and_save(backend, 0)
        for node, span in CHAIN.items():
            sizes = {name: t.nbytes for name, t in backend.nodes.export(node).items()}
            rows = sum(size for name, size in sizes.items() if "_attn_" in name)
            assert backend.nodes.sizes.of(span) == (rows, sum(sizes.values()) - rows)


def test_a_dropped_node_is_gone(deep_dir: Path, make_backend):
    backend = make_backend(deep_dir)
    prefill_and_save(backend, 0)
    backend.nodes.drop("b")
    backend.nodes.drop("b")
    with pytest.raises(KeyError):
        backend.nodes.export("b")
