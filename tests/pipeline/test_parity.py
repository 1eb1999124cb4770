"""Our numbers are those of transformers, in float32, however the work is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from luceasync.pipeline.backend import LayerSplitBackend
from tests import tiny

NUM_PROMPT = 150
TOLERANCE = 1e-4


def prompt(seed: int, num_tokens: int = NUM_PROMPT) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny.VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


def prefill(
    backend: LayerSplitBackend, lane: int, ids: list[int], chunk: int, begin: int = 0
) -> Tensor:
    """Logits of every chunk's last token; the last row is the prompt's."""
    logits = []
    for at in range(begin, len(ids), chunk):
        logits.append(backend.prefill(lane, at, ids[at : at + chunk], project=True))
    return torch.stack(logits)


def greedy(backend: LayerSplitBackend, lanes: dict[int, list[int]], num_tokens: int) -> dict:
    """Decode all lanes together from their prompts; token ids of each lane."""
    out: dict[int, list[int]] = {}
    for lane, ids in lanes.items():
        backend.reset(lane)
        out[lane] = [int(prefill(backend, lane, ids, 64)[-1].argmax())]
    for step in range(num_tokens - 1):
        positions = [len(ids) + step for ids in lanes.values()]
        logits = backend.decode(list(lanes), positions, [out[lane][-1] for lane in lanes]).whole()
        for lane, token in zip(lanes, logits.argmax(-1).tolist(), strict=True):
            out[lane].append(token)
    return out


@pytest.fixture(scope="module")
def peer_logits(family: str) -> Tensor:
    with torch.inference_mode():
        return tiny.build(family)(torch.tensor([prompt(0)])).logits[0]


@pytest.mark.parametrize("chunk", [1, 7, 63, 64, 65, 128, NUM_PROMPT])
def test_prefill_logits_are_the_peers_for_every_chunking(
    tiny_dir: Path, peer_logits: Tensor, make_backend, chunk: int
):
    logits = prefill(make_backend(tiny_dir), 0, prompt(0), chunk)
    ends = [min(at + chunk, NUM_PROMPT) - 1 for at in range(0, NUM_PROMPT, chunk)]
    assert (logits - peer_logits[ends]).abs().max() < TOLERANCE


@pytest.mark.slow
def test_decode_logits_are_the_peers(tiny_dir: Path, peer_logits: Tensor, make_backend):
    backend = make_backend(tiny_dir)
    prefill(backend, 1, prompt(0)[:10], 64)
    for position in range(10, NUM_PROMPT):
        logits = backend.decode([1], [position], [prompt(0)[position]]).whole()[0]
        assert (logits - peer_logits[position]).abs().max() < TOLERANCE


@pytest.mark.slow
def test_64_greedy_tokens_are_the_peers(family: str, tiny_dir: Path, make_backend):
    ids = torch.tensor([prompt(0)])
    peer = tiny.build(family).generate(ids, max_new_tokens=64, do_sample=False, eos_token_id=None)
    ours = greedy(make_backend(tiny_dir), {0: prompt(0)}, 64)
    assert ours[0] == peer[0, NUM_PROMPT:].tolist()


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("num_lanes", [4, 2])
def test_lanes_decoded_together_are_each_as_alone(tiny_dir: Path, make_backend, num_lanes: int):
    backend = make_backend(tiny_dir)
    prompts = {lane: prompt(lane, [5, 64, 131, 200][lane]) for lane in range(num_lanes)}
    alone = {lane: greedy(backend, {lane: ids}, 16)[lane] for lane, ids in prompts.items()}
    assert greedy(backend, prompts, 16) == alone


def test_a_rows_logits_do_not_depend_on_the_rows_beside_it(tiny_dir: Path, make_backend):
    backend = make_backend(tiny_dir)
    for lane in range(4):
        prefill(backend, lane, prompt(lane, 100), 64)
    alone = backend.decode([2], [100], [7]).whole()[0].clone()
    backend.reset(2)
    prefill(backend, 2, prompt(2, 100), 64)
    together = backend.decode([0, 1, 2, 3], [100] * 4, [9, 8, 7, 6]).whole()[2]
    assert torch.equal(alone, together)


@pytest.mark.slow
def test_shuffled_pages_change_nothing(tiny_dir: Path, make_backend):
    ordered = greedy(make_backend(tiny_dir), {0: prompt(0), 3: prompt(3, 90)}, 16)
    backend = make_backend(tiny_dir, page_order=[5, 2, 7, 0, 3, 6, 1, 4])
    assert greedy(backend, {0: prompt(0), 3: prompt(3, 90)}, 16) == ordered


def test_a_reset_lane_remembers_nothing(tiny_dir: Path, make_backend):
    backend = make_backend(tiny_dir)
    fresh = prefill(backend, 0, prompt(1), 64)
    prefill(backend, 1, prompt(0), 64)
    backend.reset(1)
    assert torch.equal(prefill(backend, 1, prompt(1), 64), fresh)


def test_the_vision_wrappers_checkpoint_gives_the_same(tmp_path: Path, make_backend):
    """model.language_model.* names, a nested config and vision weights that are not used."""
    import json

    from safetensors.torch import load_file, save_file

    plain = tiny.save(tiny.build("qwen3_5"), tmp_path / "plain")
    wrapped = tiny.save(tiny.build("qwen3_5"), tmp_path / "wrapped")
    text = json.loads((plain / "config.json").read_text())
    (wrapped / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    tensors = load_file(plain / "model.safetensors")
    renamed = {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()}
    renamed["model.visual.patch_embed.weight"] = torch.zeros(3, 3)
    save_file(renamed, wrapped / "model.safetensors")
    expected = prefill(make_backend(plain), 0, prompt(0), 64)
    assert torch.equal(prefill(make_backend(wrapped), 0, prompt(0), 64), expected)


def test_tied_embeddings_are_one_tensor(family: str, tmp_path: Path, make_backend):
    model = tiny.build(family, tied=True)
    backend = make_backend(tiny.save(model, tmp_path))
    with torch.inference_mode():
        peer = model(torch.tensor([prompt(0)])).logits[0, -1]
    assert (prefill(backend, 0, prompt(0), 64)[-1] - peer).abs().max() < TOLERANCE
