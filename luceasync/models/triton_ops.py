"""The operations of luceasync.models.ops on GPUs: fused Triton kernels, and torch's matrix products
where the rows are many. Knows which kernel serves which number of rows, and nothing else.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.kernels import attention as attention_kernels
from luceasync.kernels import rows as row_kernels
from luceasync.kernels.delta import delta_step
from luceasync.kernels.delta_chunks import delta_rows
from luceasync.kernels.linear import MAX_ROWS, linear, swiglu
from luceasync.models.ops import AttentionNorms, DeltaParameters, attention
from luceasync.models.rows import NO_LANE, Rows
from luceasync.models.spec import AttentionSpec, DeltaSpec


class TritonOps:
    """The operations of TorchOps, which says what each means, as fused kernels.

    Up to MAX_ROWS rows a result is the same bits whatever the other rows are. Decode, one row for
    each entry, can be captured as a CUDA graph and reads `rows` from the device alone.
    """

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = linear(flat, weight) if flat.shape[0] <= MAX_ROWS else F.linear(flat, weight)
        return out.view(*x.shape[:-1], -1)

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        normed = row_kernels.rms_norm(x.reshape(-1, x.shape[-1]), norm, eps)
        return self.linear(normed, weight).view(*x.shape[:-1], -1)

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        flat, flat_residual = x.reshape(-1, x.shape[-1]), residual.reshape(-1, residual.shape[-1])
        if flat.shape[0] <= MAX_ROWS:
            out = linear(flat, weight, flat_residual)
        else:
            out = torch.addmm(flat_residual, flat, weight.t())
        return out.view_as(residual)

    def norm_swiglu(self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        normed = row_kernels.rms_norm(flat, norm, eps)
        few = flat.shape[0] <= MAX_ROWS
        out = swiglu(normed, gate_up) if few else row_kernels.swiglu(F.linear(normed, gate_up))
        return out.view(*x.shape[:-1], -1)

    def attend(
        self,
        projected: Tensor,
        spec: AttentionSpec,
        norms: AttentionNorms,
        keys: Tensor,
        values: Tensor,
        rows: Rows,
    ) -> Tensor:
        state = (keys, values, rows.lanes)
        weights = (norms.query, norms.key, norms.eps)
        if projected.shape[1] == 1:
            return attention_kernels.attend(
                projected[:, 0],
                weights,
                *state,
                rows.positions[:, 0],
                rows.tables,
                (rows.cos[:, 0], rows.sin[:, 0]),
                num_heads=spec.num_heads,
                rotary_dim=spec.rotary_dim,
                gated=spec.gated,
            )[:, None]
        queries = row_kernels.write_heads(
            projected,
            weights,
            *state,
            rows.positions,
            rows.tables,
            (rows.cos, rows.sin),
            num_heads=spec.num_heads,
            rotary_dim=spec.rotary_dim,
        )
        out = _attend_entries(queries, keys, values, rows).flatten(2)
        if spec.gated:
            out = out * torch.sigmoid(projected[..., -spec.query_dim :])
        return out

    def delta(
        self,
        projected: Tensor,
        spec: DeltaSpec,
        parameters: DeltaParameters,
        conv_state: Tensor,
        delta_state: Tensor,
        rows: Rows,
    ) -> Tensor:
        small = (parameters.conv, parameters.decay_rate, parameters.dt_bias, parameters.norm)
        arguments = (*small, parameters.eps, conv_state, delta_state, rows.lanes)
        key_heads = spec.num_key_heads
        if projected.shape[1] == 1:
            return delta_step(projected[:, 0], *arguments, num_key_heads=key_heads)[:, None]
        return delta_rows(projected, *arguments, num_key_heads=key_heads)


def _attend_entries(queries: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
    """queries: [entries, rows, heads, head_dim] of rows that are written; the same shape."""
    outputs = [
        torch.zeros_like(queries[i])
        if entry.lane == NO_LANE
        else attention(queries[i], keys[entry.lane, entry.read], values[entry.lane, entry.read])
        for i, entry in enumerate(rows.entries)
    ]
    return outputs[0][None] if len(outputs) == 1 else torch.stack(outputs)
