"""A tap is the residual stream after its layer, for each row of a pass, on any shard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from luceasync.errors import ModelError
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.ranking.proposals import TreeProposer, propose_chain
from tests import tiny
from tests.pipeline.heard import taps_of

TAPS = (3, 0, 2)
TOLERANCE = 1e-4


def prompt(num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, tiny.VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


@pytest.fixture(scope="module")
def peer_rows(family: str) -> list[Tensor]:
    """transformers' output of each tapped layer, for a prompt of 40 tokens."""
    model, found = tiny.build(family), {}
    for tap in TAPS:
        layer = model.model.layers[tap]
        layer.register_forward_hook(lambda _, __, out, tap=tap: found.update({tap: first(out)}))
    with torch.inference_mode():
        model(torch.tensor([prompt(40)]))
    return [found[tap] for tap in TAPS]


def first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def check(backend: LayerSplitBackend, expected: list[Tensor]) -> None:
    for found, rows in zip(taps_of(backend), expected, strict=True):
        assert found.shape == rows.shape and (found - rows).abs().max() < TOLERANCE


@pytest.mark.parametrize("num_shards", [1, 3])
def test_prefill_decode_and_verify_give_the_peers_rows(
    tiny_dir: Path, make_backend, peer_rows: list[Tensor], num_shards: int
):
    backend = make_backend(tiny_dir, num_shards=num_shards, taps=TAPS, verify_rows=[9])
    backend.prefill(1, 0, prompt(40)[:30], project=False)
    check(backend, [rows[:, :30] for rows in peer_rows])
    backend.decode([1], [30], [prompt(40)[30]])
    check(backend, [rows[:, 30:31] for rows in peer_rows])
    backend.verify([1], [31], torch.tensor([prompt(40)[31:]]))
    check(backend, [rows[:, 31:] for rows in peer_rows])


def test_without_taps_nothing_is_kept(tiny_dir: Path, make_backend):
    backend = make_backend(tiny_dir)
    backend.prefill(0, 0, prompt(5), project=False)
    assert taps_of(backend) == []


@pytest.mark.parametrize("taps", [[4], [-1], [1, 1]], ids=str)
def test_a_tap_that_is_no_layer_is_refused(tiny_dir: Path, make_backend, taps: list[int]):
    with pytest.raises(ModelError, match=r"distinct layers in \[0, 4\) are expected"):
        make_backend(tiny_dir, taps=taps)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_the_embedding_can_be_borrowed_and_the_head_be_asked(
    tiny_dir: Path, make_backend, family, num_shards
):
    backend, peer = make_backend(tiny_dir, num_shards=num_shards), tiny.build(family)
    tokens = torch.tensor([prompt(6), prompt(6)])
    rows, anchors = backend.embed(tokens), torch.tensor([7, 8])
    with torch.inference_mode():
        assert torch.equal(rows, peer.model.embed_tokens(tokens))
        expected = peer.lm_head(rows)
    chain, tree = (backend.propose_from(rows, anchors, budget) for budget in (None, 9))
    assert torch.equal(chain.tokens, propose_chain(anchors, expected).tokens)
    wanted = TreeProposer(9, tiny.VOCAB_SIZE, torch.device("cpu"))(anchors, expected)
    assert torch.equal(tree.tokens, wanted.tokens) and torch.equal(tree.parents, wanted.parents)
    best = backend.candidates_from(rows, 5)
    assert torch.equal(best.logits, expected.topk(5).values)
    assert torch.equal(best.ids[..., 0], expected.argmax(-1))
