"""Probes how a drafter's full layers attend to a lane's chunks, for the choice of resident ones.

Runs a block of mask tokens over the drafter's context, outside of all graphs. Knows no pages.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.kv.pages import CHUNK_TOKENS, num_chunks
from luceasync.pipeline.passes import AttentionMass
from luceasync.speculation.dflash.context import held_positions
from luceasync.speculation.dflash.draft import DraftNetwork
from luceasync.speculation.dflash.draft_ops import DraftBlock, LayerNorms, TorchDraftOps, attend
from luceasync.speculation.dflash.features import FeatureRing


class DraftAttentionProbe:
    """Probes lanes with a drafter of this process; see luceasync.pipeline.passes.Passes."""

    def __init__(self, network: DraftNetwork, ring: FeatureRing) -> None:
        self._network = network
        self._ring = ring
        self._found: dict[int, AttentionMass] = {}

    @torch.inference_mode()
    def start_probe(self, lane: int, num_tokens: int) -> None:
        """See Passes. Chunks after the last token that has features are left out."""
        begin, end = time.perf_counter(), min(self._ring.valid(lane).stop, num_tokens)
        with self._ring.platform.on_device():
            found = chunk_attention(self._network, lane, end).cpu()
        self._found[lane] = AttentionMass(found, time.perf_counter() - begin)

    def attention_mass(self, lane: int) -> AttentionMass:
        return self._found.pop(lane)


def chunk_attention(network: DraftNetwork, lane: int, num_tokens: int) -> Tensor:
    """The largest share of a row's attention that falls on each chunk of the lane's first
    `num_tokens` tokens, summed over the heads of layers that see the whole context: float32
    [chunks].
    """
    ops = _ProbeOps(network, num_tokens)
    begins = torch.tensor([num_tokens], device=network.device)
    lanes = torch.tensor([lane], device=network.device)
    anchors = torch.tensor([network.spec.mask_token], device=network.device)
    network.run(ops, anchors, lanes, begins, network.spec.block)
    return ops.masses


class _ProbeOps(TorchDraftOps):
    """The operations of one block, which also add up its attention by chunk."""

    def __init__(self, network: DraftNetwork, num_tokens: int) -> None:
        super().__init__(network.spec, network.context)
        self._num_tokens = num_tokens
        self.masses = torch.zeros(max(num_chunks(num_tokens), 1), device=network.device)

    def attend(
        self, layer: int, projected: Tensor, weights: LayerNorms, block: DraftBlock
    ) -> Tensor:
        q, keys, values = self.heads(layer, projected, weights, block)
        mask = block.masks[layer]
        if self._spec.layers[layer].window is None:
            self._count(layer, q, keys, mask)
        return attend(q, keys, values, mask).flatten(2)

    def _count(self, layer: int, q: Tensor, keys: Tensor, mask: Tensor) -> None:
        """q: [1, rows, heads, head_dim]; keys: [1, rows + places, kv_heads, head_dim]."""
        num_rows, group = q.shape[1], q.shape[2] // keys.shape[2]
        folded = q.float().unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)[0]
        scores = folded @ keys[0].float().permute(1, 2, 0) * q.shape[-1] ** -0.5
        shares = scores.masked_fill(~mask[0], -torch.inf).softmax(-1)[..., num_rows:]
        ring, num_places = self._context.ring_of(layer), shares.shape[-1]
        begins = torch.tensor([self._num_tokens], device=q.device)
        held = held_positions(begins, ring.capacity, num_places)[0]
        chunk = torch.where(held >= 0, held // CHUNK_TOKENS, len(self.masses))
        wide = F.pad(torch.zeros_like(shares[..., :1]), (0, len(self.masses)))
        wide.index_add_(-1, chunk, shares)
        by_row = wide[..., :-1].unflatten(1, (group, num_rows))
        self.masses += by_row.amax(2).flatten(0, 1).sum(0)
