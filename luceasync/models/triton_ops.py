"""The operations of luceasync.models.ops on GPUs: fused Triton kernels, and torch's matrix products
where the rows are many. Knows which kernel serves which number of rows, and nothing else.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.kernels import attention as attention_kernels
from luceasync.kernels import few_rows
from luceasync.kernels import linear as decode_rows
from luceasync.kernels import rows as row_kernels
from luceasync.kernels.delta import delta_step
from luceasync.kernels.delta_chunks import delta_rows
from luceasync.models.ops import AttentionNorms, DeltaParameters, attention
from luceasync.models.pass_rows import NO_LANE, Rows
from luceasync.models.spec import AttentionSpec, DeltaSpec

DECODE_ROWS = 8  # up to as many, the decode step's kernels are the fastest in any kind of pass
SWIGLU_ROWS = 32  # up to as many, few_rows is faster than the library with two weights at once


class TritonOps:
    """The operations of TorchOps, which says what each means, as fused kernels.

    Decode, one row for each entry, gives a row the same bits whatever the other rows are, up to
    MAX_ROWS of them. It can be captured as a CUDA graph and reads `rows` from the device alone.
    """

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        flat, fused = x.reshape(-1, x.shape[-1]), _fused(x, few_rows.MAX_ROWS)
        out = fused.linear(flat, weight) if fused else F.linear(flat, weight)
        return out.view(*x.shape[:-1], -1)

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        normed = row_kernels.rms_norm(x.reshape(-1, x.shape[-1]), norm, eps)
        return self.linear(normed.view_as(x), weight)

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        flat, flat_residual = x.reshape(-1, x.shape[-1]), residual.view(-1, residual.shape[-1])
        if fused := _fused(x, few_rows.MAX_ROWS):
            return fused.linear(flat, weight, flat_residual).view_as(residual)
        flat_residual.addmm_(flat, weight.t())  # in place: else it would be copied first
        return residual

    def norm_swiglu(self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        normed = row_kernels.rms_norm(x.reshape(-1, x.shape[-1]), norm, eps)
        if fused := _fused(x, SWIGLU_ROWS):
            out = fused.swiglu(normed, gate_up)
        else:
            out = row_kernels.swiglu(F.linear(normed, gate_up))
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


def _fused(x: Tensor, max_rows: int) -> ModuleType | None:
    """The kernels to multiply `x` with, [..., rows, dim]; None: the library's are faster, as they
    are from `max_rows` on. Measured on an H200 with bfloat16 weights.
    """
    num_rows = x.numel() // x.shape[-1]
    if num_rows <= DECODE_ROWS or (num_rows <= decode_rows.MAX_ROWS and x.shape[-2] == 1):
        return decode_rows
    return few_rows if num_rows <= max_rows and x.element_size() == 2 else None


def _attend_entries(queries: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
    """queries: [entries, rows, heads, head_dim] of rows that are written; the same shape."""
    outputs = [
        torch.zeros_like(queries[i])
        if entry.lane == NO_LANE
        else attention(queries[i], keys[entry.lane, entry.read], values[entry.lane, entry.read])
        for i, entry in enumerate(rows.entries)
    ]
    return outputs[0][None] if len(outputs) == 1 else torch.stack(outputs)
