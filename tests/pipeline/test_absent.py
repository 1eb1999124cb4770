"""A lane attends to its resident chunks alone, at their own positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from luceasync.kv.pages import PageEvent
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.passes import Batch
from tests import tiny

NUM_PROMPT, GONE = 300, (1, 3)  # chunks that leave the lane
ORDERS = [None, [5, 2, 0, 7, 1, 6, 3, 4]]


def prompt() -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, tiny.VOCAB_SIZE, (NUM_PROMPT,), generator=generator).tolist()


def without_chunks(backend: LayerSplitBackend) -> LayerSplitBackend:
    """The prompt on lane 1, with some chunks removed and their pages filled with NaN."""
    backend.prefill(1, 0, prompt(), project=True)
    pages = backend.lanes._pages.pages(1)
    for stage in backend._stages:
        for shard in stage._shards:
            for stack in shard.cache.row_stacks:
                for chunk in GONE:
                    stack[:, 1, pages[chunk] * 64 : (pages[chunk] + 1) * 64] = float("nan")
    backend.lanes._place([PageEvent(1, chunk, None) for chunk in GONE])
    return backend


def decoded(backend: LayerSplitBackend, num_tokens: int = 30) -> Tensor:
    """Logits of greedy steps that cross into another chunk."""
    token, logits = 5, []
    for position in range(NUM_PROMPT, NUM_PROMPT + num_tokens):
        logits.append(backend.decode([1], [position], [token]).whole()[0].clone())
        token = int(logits[-1].argmax())
    return torch.stack(logits)


def verified(backend: LayerSplitBackend, num_rounds: int = 5) -> Tensor:
    """Logits of the same tokens, by rounds that accept all."""
    token, logits = 5, []
    for begin in range(NUM_PROMPT, NUM_PROMPT + 6 * num_rounds, 6):
        rows = [token]
        for _ in range(5):
            given = torch.tensor([rows + [0] * (6 - len(rows))])
            rows.append(int(backend.verify([1], [begin], given).whole()[0, len(rows) - 1].argmax()))
        out = backend.verify([1], [begin], torch.tensor([rows])).whole()[0].clone()
        backend.commit([[*range(6)]])
        logits.append(out)
        token = int(out[-1].argmax())
    return torch.cat(logits)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_decode_step_sees_what_is_here_as_transformers_does(
    make_backend, tmp_path: Path, order: list[int] | None, num_shards: int
):
    peer = tiny.build("qwen3")
    model_dir = tiny.save(peer, tmp_path)
    backend = make_backend(model_dir, num_shards=num_shards, page_order=order)
    ours = decoded(without_chunks(backend))
    with torch.inference_mode():
        past = peer(torch.tensor([prompt()])).past_key_values
        kept = [t for t in range(NUM_PROMPT) if t // 64 not in GONE]
        for layer in past.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        token = 5
        for position, row in enumerate(ours, NUM_PROMPT):
            at = torch.tensor([[position]])
            theirs = peer(torch.tensor([[token]]), past_key_values=past, position_ids=at).logits
            assert (row - theirs[0, -1]).abs().max() < 1e-4
            token = int(row.argmax())


@pytest.mark.slow
def test_where_chunks_lie_changes_no_bit(make_backend, tiny_dir: Path):
    found = [decoded(without_chunks(make_backend(tiny_dir, page_order=o))) for o in ORDERS]
    assert found[0].equal(found[1])


@pytest.mark.slow
def test_a_verify_pass_sees_what_a_decode_step_sees(make_backend, tiny_dir: Path):
    plain = decoded(without_chunks(make_backend(tiny_dir)))
    backend = make_backend(tiny_dir, verify_rows=[6], page_order=ORDERS[1])
    assert (verified(without_chunks(backend)) - plain).abs().max() < 1e-4


@pytest.mark.gpu
def test_captured_passes_see_what_the_cpu_sees(make_backend, tiny_dir: Path):
    """The graphs are captured while all chunks are resident."""
    expected = decoded(without_chunks(make_backend(tiny_dir)))
    backend = make_backend(tiny_dir, devices=["cuda:0"], verify_rows=[6], page_order=ORDERS[1])
    assert (decoded(without_chunks(backend)).cpu() - expected).abs().max() < 1e-3
    backend.reset(1)
    assert (verified(without_chunks(backend)).cpu() - expected).abs().max() < 1e-3


def test_a_lane_that_begins_again_has_all_its_chunks(make_backend, tiny_dir: Path):
    backend = make_backend(tiny_dir)
    before = backend.prefill(1, 0, prompt(), project=True)
    backend.reset(1)
    without_chunks(backend)
    backend.reset(1)
    assert backend.prefill(1, 0, prompt(), project=True).equal(before)


def test_accepted_rows_say_their_positions_beside_their_row_indices(make_backend, tiny_dir: Path):
    backend = without_chunks(make_backend(tiny_dir))
    [shard] = backend._stages[0]._shards
    paths = shard.paths(Batch((1,), (NUM_PROMPT,), 6), [[0, 2]])
    num_resident = NUM_PROMPT - 64 * len(GONE)
    assert [(kept.begin, kept.position) for kept in paths.kept] == [(num_resident, NUM_PROMPT)]
    assert (paths.begins.tolist(), paths.positions.tolist()) == ([num_resident], [NUM_PROMPT])
