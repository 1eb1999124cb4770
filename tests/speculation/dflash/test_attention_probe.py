"""The attention of a drafter's full layers by chunk, beside a slow count of the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from luceasync.models.files import read_spec
from luceasync.models.ops import TorchOps
from luceasync.speculation.dflash.attention_probe import chunk_attention
from luceasync.speculation.dflash.draft import DraftNetwork, open_network
from luceasync.speculation.dflash.draft_config import adjusted, read_draft_spec
from luceasync.speculation.dflash.draft_ops import TorchDraftOps
from tests import tiny

NUM_TOKENS, MAX_CTX = 330, 512
MIXED = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 24,
}


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> DraftNetwork:
    folder: Path = tmp_path_factory.mktemp("models")
    target_dir = tiny.save(tiny.build("qwen3"), folder)
    target = read_spec(target_dir)
    draft_dir = tiny.save_draft(folder / "draft", tiny.draft_config(**MIXED))
    spec = adjusted(read_draft_spec(draft_dir, target))
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(tiny.VOCAB_SIZE, spec.hidden_size, generator=generator)
    opened = open_network(
        draft_dir,
        spec,
        TorchOps(),
        lambda tokens: table[tokens],
        num_lanes=2,
        max_ctx_tokens=MAX_CTX,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    features = torch.randn(1, NUM_TOKENS, spec.feature_size, generator=generator)
    opened.set_valid_from(1, 0)
    opened.write_context(features, *torch.tensor([[1], [0], [NUM_TOKENS]]))
    return opened


class Slow(TorchDraftOps):
    """Counts softmax by softmax."""

    masses = torch.zeros(-(-NUM_TOKENS // 64))

    def attend(self, layer, projected, weights, block):
        q, keys, _ = self.heads(layer, projected, weights, block)
        if layer:
            for head in range(q.shape[2]):
                of_head = keys[0, :, head // (q.shape[2] // keys.shape[2])]
                seen = block.masks[layer][0, 0, : q.shape[1]]
                most = torch.zeros_like(self.masses)
                for row in range(q.shape[1]):
                    scores = of_head @ q[0, row, head] / q.shape[-1] ** 0.5
                    share = scores.masked_fill(~seen[row], -torch.inf).softmax(0)[q.shape[1] :]
                    for chunk in range(len(most)):
                        mass = share[chunk * 64 : min(chunk * 64 + 64, NUM_TOKENS)].sum()
                        most[chunk] = max(most[chunk], mass)
                self.masses = self.masses + most
        return super().attend(layer, projected, weights, block)


@torch.inference_mode()
def test_masses_are_those_of_the_full_layers(network: DraftNetwork):
    slow = Slow(network.spec, network.context)
    given = torch.tensor([network.spec.mask_token]), torch.tensor([1]), torch.tensor([NUM_TOKENS])
    network.run(slow, *given, network.spec.block)
    found = chunk_attention(network, 1, NUM_TOKENS)
    assert found.shape == slow.masses.shape and slow.masses.sum() > 0
    assert torch.allclose(found, slow.masses, atol=1e-5)


@torch.inference_mode()
def test_a_lane_without_context_gives_no_chunk_any(network: DraftNetwork):
    network.set_valid_from(0, 200)
    assert not chunk_attention(network, 0, 200).any()
