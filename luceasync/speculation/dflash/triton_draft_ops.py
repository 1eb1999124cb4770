"""The operations of luceasync.speculation.dflash.draft_ops on GPUs, as fused kernels.

Imports Triton, so it is imported only where a platform has chosen it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from luceasync.kernels.draft_attention import NO_LIMIT, DraftWindow, attend_block
from luceasync.kernels.draft_context import write_context
from luceasync.kernels.draft_rows import DraftRowTensors, draft_rows
from luceasync.kernels.rows import rms_norm
from luceasync.speculation.dflash.context import DraftContext
from luceasync.speculation.dflash.draft_ops import LayerNorms, inverse_frequencies
from luceasync.speculation.dflash.draft_spec import DraftLayerSpec, DraftSpec


class TritonDraftOps:
    """See TorchDraftOps. All operations can be captured in a CUDA graph, and read the rings where
    they lie: one graph serves all lengths of context.
    """

    def __init__(self, spec: DraftSpec, context: DraftContext) -> None:
        self._spec = spec
        self._context = context
        device = context.valid_from.device
        self._inverse = inverse_frequencies(spec, device)
        capacities = [ring.capacity for ring in context.rings]
        self._capacities = torch.tensor(capacities, dtype=torch.int32, device=device)

    def reach_for(self, position: int) -> int | None:
        """None: a pass reads as many places as the lanes have."""
        return None

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)

    def block(
        self, lanes: Tensor, begins: Tensor, num_rows: int, reach: int | None
    ) -> DraftRowTensors:
        return draft_rows(lanes, begins, num_rows, self._inverse, self._capacities)

    def attend(
        self, layer: int, projected: Tensor, weights: LayerNorms, block: DraftRowTensors
    ) -> Tensor:
        ring = self._context.ring_of(layer)
        keys, values = (places[ring.layers.index(layer)] for places in ring.places)
        num_heads = self._spec.attention.num_heads
        return attend_block(
            projected,
            (weights.head_norms[0], weights.head_norms[num_heads], weights.norm.eps),
            keys,
            values,
            block,
            block.spans[self._context.rings.index(ring)],
            self._window(self._spec.layers[layer]),
            num_heads=num_heads,
        )

    def write_context(
        self, projected: Tensor, key_norms: Tensor, lanes: Tensor, begins: Tensor, counts: Tensor
    ) -> None:
        rows = draft_rows(lanes, begins, projected.shape[1], self._inverse, self._capacities)
        norms = (key_norms, self._spec.norm_eps)
        for ring in self._context.rings:
            write_context(projected, norms, ring.index, *ring.places, rows, counts)

    def _window(self, layer: DraftLayerSpec) -> DraftWindow:
        window = NO_LIMIT if layer.window is None else layer.window
        num_ctx_tokens = self._spec.ctx_max_tokens
        return DraftWindow(
            self._context.valid_from,
            window,
            NO_LIMIT if num_ctx_tokens is None else num_ctx_tokens,
            layer.is_causal,
        )
