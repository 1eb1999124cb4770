"""The DFlash draft network on preallocated tensors: context in, a block of hidden rows out.

Owns the drafter's weights, and its keys and values of all lanes. Knows no target: the embedding is
handed in, and the caller projects what `propose` returns with the target's head. Chen et al.,
"DFlash: Block Diffusion for Flash Speculative Decoding", 2026.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.models.encodings import HostTransfer, RowTransfer, WeightPlacement
from luceasync.models.ops import Ops
from luceasync.pipeline.platform import Platform
from luceasync.speculation.dflash.context import DraftContext
from luceasync.speculation.dflash.draft_files import DraftFiles
from luceasync.speculation.dflash.draft_ops import DraftOps, TorchDraftOps
from luceasync.speculation.dflash.draft_spec import DraftSpec
from luceasync.speculation.dflash.weights import DraftWeights, read_weights

Embed = Callable[[Tensor], Tensor]  # tokens int64 [...] -> rows [..., hidden]
ChooseOps = Callable[[DraftSpec, DraftContext], DraftOps]


def draft_ops_on(platform: Platform) -> ChooseOps:
    """The operations on the context for a platform."""

    def fused() -> ChooseOps:
        from luceasync.speculation.dflash.triton_draft_ops import TritonDraftOps

        return TritonDraftOps

    return platform.pick(torch=lambda: TorchDraftOps, triton=fused)


class DraftNetwork:
    """A drafter on one device.

    `write_context` and `propose` read nothing but tensors on the device and have fixed shapes for
    fixed numbers of entries and rows, so they can be captured as CUDA graphs. An entry of lane -1
    is padding. Not thread-safe; run under `torch.inference_mode`.
    """

    def __init__(
        self,
        spec: DraftSpec,
        weights: DraftWeights,
        embed: Embed,
        *,
        num_lanes: int,
        max_ctx_tokens: int,
        choose: ChooseOps = TorchDraftOps,
    ) -> None:
        """`embed` is the target's embedding, and returns rows on the device of the weights;
        `choose` makes the operations on the context.
        """
        self.spec = spec
        self.device = weights.key_norms.device
        self.dtype = weights.fc.dtype
        self._weights: DraftWeights | None = weights
        self._embed = embed
        self.context = DraftContext(
            spec,
            num_lanes=num_lanes,
            max_ctx_tokens=max_ctx_tokens,
            dtype=self.dtype,
            device=self.device,
        )
        self._draft_ops = choose(spec, self.context)
        # Behind each block's anchor.
        self._masks = torch.full((1, spec.block - 1), spec.mask_token, device=self.device)

    def reach_for(self, position: int) -> int | None:
        """The `reach` of `propose` for entries that begin at `position` at most; None if passes for
        all positions are the same.
        """
        return self._draft_ops.reach_for(position)

    def set_valid_from(self, lane: int, position: int) -> None:
        """Note that context of `lane` below `position` was never written: 0 for a fresh lane, the
        lane's end after a restore without features.
        """
        self.context.valid_from[lane] = position

    def write_context(
        self, features: Tensor, lanes: Tensor, begins: Tensor, counts: Tensor
    ) -> None:
        """Add tokens that the target has committed to the context.

        `features` [entries, rows, taps * hidden], any float dtype: the outputs of the tapped layers
        at positions `[begins, begins + rows)`; only the first `counts` rows of an entry are kept.
        `lanes`, `begins`, `counts` int32 or int64, all [entries], on the drafter's device. An entry
        may bring more rows than a ring holds. No lane twice in one call.
        """
        weights = self._loaded
        fused = weights.fc.linear(weights.read(features))
        norm = weights.hidden_norm
        if weights.context_norm is not None:
            fused, norm = norm(fused), weights.context_norm
        projected = weights.context_kv.linear(fused, norm)
        self._draft_ops.write_context(projected, weights.key_norms, lanes, begins, counts)

    def propose(
        self,
        anchors: Tensor,
        lanes: Tensor,
        begins: Tensor,
        block: int,
        *,
        reach: int | None = None,
    ) -> Tensor:
        """Hidden rows [entries, block - 1, hidden] for the positions behind the anchors, after the
        final norm: row j predicts the token at begins + 1 + j.

        `anchors` int64 [entries]: each lane's newest token, at position `begins`, for which no
        context has been written yet; `lanes`, `begins` int32 or int64. No entry may begin behind
        `reach`: no more places are read.
        """
        x = self.run(self._draft_ops, anchors, lanes, begins, block, reach)
        return self._draft_ops.norm(x[:, 1:], self._loaded.norm, self.spec.norm_eps)

    def run(
        self,
        ops: DraftOps,
        anchors: Tensor,
        lanes: Tensor,
        begins: Tensor,
        block: int,
        reach: int | None = None,
    ) -> Tensor:
        """The rows of blocks after the last layer, [entries, block, hidden]; see `propose`."""
        rows = ops.block(lanes, begins, block, reach)
        x = self._block_rows(anchors, block)
        for layer, weights in enumerate(self._loaded.layers):
            if weights.convolutions is not None:
                x = self._convolved(ops, layer, x, rows)
                continue
            projected = weights.projection.linear(x, weights.norm)
            mixed = ops.attend(layer, projected, weights, rows)
            if weights.gate is not None:
                gate = F.softplus(weights.gate.linear(x, weights.norm).float()).to(mixed.dtype)
                mixed = (mixed.unflatten(-1, (gate.shape[-1], -1)) * gate[..., None]).flatten(-2)
            x = weights.feed_forward.forward(weights.output.linear_add(mixed, x))
        return x

    def _convolved(self, ops: DraftOps, layer: int, x: Tensor, rows: Any) -> Tensor:
        """Rows after a layer that mixes those of a block."""
        weights = self._loaded.layers[layer]
        convolutions, forward = weights.convolutions, weights.feed_forward
        assert convolutions is not None

        def attended(normed: Tensor) -> Tensor:
            projected = weights.projection.linear(normed)
            return weights.output.linear(ops.attend(layer, projected, weights, rows))

        x = convolutions.attention.around(x, weights.norm, attended)
        return convolutions.feed_forward(x, forward.norm, forward.network)

    def _block_rows(self, anchors: Tensor, block: int) -> Tensor:
        """Embeddings [entries, block, hidden]: of the anchor, then of the mask token."""
        masks = self._masks[:, : block - 1].expand(len(anchors), -1)
        x = self._embed(torch.cat([anchors[:, None], masks], 1)).to(self.dtype)
        if self.spec.embedding_scale != 1.0:
            x = x * self.spec.embedding_scale
        mask = self._loaded.mask_embedding
        if mask is None:
            return x
        return torch.cat([x[:, :1], mask.expand(x.shape[0], block - 1, -1)], 1)

    @property
    def _loaded(self) -> DraftWeights:
        assert self._weights is not None, "the network is closed"
        return self._weights

    def close(self) -> None:
        """Free weights and context. Idempotent."""
        self.context.close()
        self._weights = None

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and context."""
        return self.context.num_bytes + (self._weights.num_bytes if self._weights else 0)


def open_network(
    draft_dir: Path,
    spec: DraftSpec,
    ops: Ops,
    embed: Embed,
    *,
    num_lanes: int,
    max_ctx_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    advance: Callable[[int], None] = lambda num_bytes: None,
    choose: ChooseOps = TorchDraftOps,
    transfer: RowTransfer | None = None,
) -> DraftNetwork:
    """The drafter in `draft_dir` on `device`, its weights packed for `ops`; `transfer`: their way
    there, None: the host's. Raises ModelError.
    """
    files = DraftFiles(draft_dir)
    with files.open(spec) as source, closing(transfer or HostTransfer()) as rows:
        weights = read_weights(
            spec,
            source,
            WeightPlacement(ops, device, dtype, rows),
            has_mask_embedding=files.has_mask_embedding,
            advance=advance,
        )
    sizes = {"num_lanes": num_lanes, "max_ctx_tokens": max_ctx_tokens}
    return DraftNetwork(spec, weights, embed, **sizes, choose=choose)
