"""A saved node is restored as it was, or not at all."""

from __future__ import annotations

from array import array

import pytest
import torch

from luceasync.errors import SnapshotMismatch
from luceasync.host_cache.nodes import Span
from luceasync.prefix_cache.memory import (
    FEATURE_DATA,
    LOGITS,
    TOKENS,
    MemoryNodes,
    NodeSize,
    UnreadFeatures,
)
from tests.prefix_cache.token_target import STATE_BYTES, TOKEN_BYTES, VOCAB_SIZE, TokenTarget
from tests.whole_lanes import PagelessLanes

TOKEN_IDS = array("i", [3, 1, 4, 1, 5])
SPAN = Span(0, 5, with_state=True)


class RowFeatures(UnreadFeatures):
    """One number for each token: its position. `is_full`: there is no memory."""

    reach_tokens = 2
    is_full = False

    def __init__(self) -> None:
        super().__init__()
        self.restored: list = []

    def num_bytes(self, num_tokens: int) -> int:
        return 10 * num_tokens

    def save(self, lane: int, node: bytes, span: Span) -> None:
        self.adopt(node, span, {FEATURE_DATA: torch.arange(span.begin, span.end)})

    def adopt(self, node: bytes, span: Span, tensors) -> None:
        if self.is_full:
            raise MemoryError("no room")
        super().adopt(node, span, tensors)

    def restore(self, lane: int, nodes, num_tokens: int) -> None:
        self.restored = [sorted(self.export(node)) for node in nodes]


@pytest.fixture
def features() -> RowFeatures:
    return RowFeatures()


@pytest.fixture
def memory(features: RowFeatures) -> MemoryNodes:
    target = TokenTarget(2, recurrent=True)
    target.lanes[0] = list(TOKEN_IDS)
    memory = MemoryNodes(target, features, VOCAB_SIZE, PagelessLanes())
    memory.save(0, b"n", SPAN, torch.arange(8.0), with_features=True)
    return memory


def test_a_nodes_size_separates_its_span_from_its_end(memory):
    size = memory.size(SPAN, with_logits=True, with_features=True)
    assert size == NodeSize(5 * (TOKEN_BYTES + 10), STATE_BYTES + 4 * VOCAB_SIZE)


def test_saved_logits_are_a_copy(memory):
    logits = torch.arange(8.0)
    memory.save(0, b"m", SPAN, logits, with_features=False)
    logits += 1
    assert memory.logits(b"m").tolist() == list(range(8))


def test_what_is_exported_can_be_adopted_elsewhere(memory, features):
    tensors = memory.export(b"n", TOKEN_IDS, with_end=True)
    assert {TOKENS, LOGITS, FEATURE_DATA} < tensors.keys()
    target = TokenTarget(1, recurrent=True)
    other = MemoryNodes(target, features, VOCAB_SIZE, PagelessLanes())
    other.adopt(b"n", SPAN, TOKEN_IDS, tensors)
    other.restore(0, [b"n"], 5)
    assert other._target.lanes[0] == list(TOKEN_IDS)
    assert other.logits(b"n").tolist() == list(range(8))
    assert features.restored == [[FEATURE_DATA]]


def test_without_its_end_a_node_has_neither_state_nor_logits(memory):
    tensors = memory.export(b"n", TOKEN_IDS, with_end=False)
    assert tensors.keys() == {"ls0_attn_k.0", TOKENS, FEATURE_DATA}


def test_a_dropped_state_takes_the_logits_with_it(memory):
    memory.drop(b"n", state_only=True)
    assert memory.export(b"n", TOKEN_IDS, with_end=True).keys() == {
        "ls0_attn_k.0",
        TOKENS,
        FEATURE_DATA,
    }


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (TOKENS, torch.tensor([3, 1, 4, 1, 6], dtype=torch.int32), "tokens"),
        (TOKENS, torch.tensor([3, 1, 4, 1], dtype=torch.int32), "tokens"),
        (TOKENS, torch.tensor([3, 1, 4, 1, 5]), "tokens"),
        (LOGITS, torch.zeros(VOCAB_SIZE + 1), "snap_prefill_logits"),
        (LOGITS, torch.zeros(VOCAB_SIZE, dtype=torch.bfloat16), "snap_prefill_logits"),
        ("ls0_other.0", torch.zeros(1), "node"),
    ],
)
def test_tensors_of_another_node_are_refused_and_the_old_ones_stay(memory, name, tensor, words):
    tensors = memory.export(b"n", TOKEN_IDS, with_end=True)
    with pytest.raises(SnapshotMismatch, match=words):
        memory.adopt(b"n", SPAN, TOKEN_IDS, tensors | {name: tensor})
    assert memory.export(b"n", TOKEN_IDS, with_end=True).keys() == tensors.keys()


def test_without_memory_for_features_nothing_is_saved(memory, features):
    features.is_full = True
    with pytest.raises(MemoryError):
        memory.save(0, b"m", SPAN, None, with_features=True)
    with pytest.raises(KeyError):
        memory._target.export(b"m")


def test_without_memory_for_features_nothing_is_adopted(memory, features):
    tensors = memory.export(b"n", TOKEN_IDS, with_end=True)
    features.is_full = True
    with pytest.raises(MemoryError):
        memory.adopt(b"m", SPAN, TOKEN_IDS, tensors)
    with pytest.raises(KeyError):
        memory._target.export(b"m")


def test_features_stay_without_the_state_and_go_with_the_node(memory, features):
    memory.drop(b"n", state_only=True)
    assert features.export(b"n")
    memory.drop(b"n")
    memory.drop(b"n")
    assert not features.export(b"n")


def test_a_node_that_is_saved_without_features_has_none(memory, features):
    memory.save(0, b"n", SPAN, None, with_features=False)
    assert not features.export(b"n")


def test_without_memory_nothing_is_saved(memory):
    memory._target.is_full = True
    with pytest.raises(MemoryError):
        memory.save(0, b"m", SPAN, None, with_features=True)
    memory.drop(b"m")
    with pytest.raises(KeyError):
        memory.export(b"m", TOKEN_IDS, with_end=True)
