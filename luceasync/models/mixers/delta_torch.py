"""Gated DeltaNet in torch, for any device: the reference of the kernels in delta_triton.

Addresses states as tensors by lane; does not know pages.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.models.mixers.delta_sizes import DeltaParameters, DeltaSizes
from luceasync.models.mixers.gated_delta import delta_chunks, delta_path, delta_step, delta_tree
from luceasync.models.mixers.mixer import State
from luceasync.models.pass_rows import NO_LANE, Paths, Rows, with_padding
from luceasync.models.trees import Trees


class TorchDelta:
    """Gated DeltaNet as plain torch."""

    def __init__(self, spec: DeltaSizes) -> None:
        self._spec = spec
        # Widths of query|key|value, z, b and a in the projection.
        heads = spec.num_value_heads
        self._widths = (spec.conv_channels, spec.output_dim, heads, heads)

    def prepare(self, positions: Tensor) -> None:
        """No-op: nothing depends on positions."""

    def delta(
        self,
        projected: Tensor,
        parameters: DeltaParameters,
        conv_state: Tensor,
        delta_state: Tensor,
        rows: Rows,
    ) -> Tensor:
        """Run causal convolution, gated delta rule and gated norm; update both states in place.

        projected: [entries, rows, conv_channels + output_dim (z) + 2 value_heads (b, a)];
        conv_state: [lanes + 1, kernel - 1, channels], the newest inputs, oldest first;
        delta_state: float32 [lanes + 1, value_heads, key_dim, value_dim]. The extra lane, index
        NO_LANE, takes the writes of padding entries on other devices, and both states as they are
        after `rows.mark` rows. Returns [entries, rows, output_dim], zeros for padding.
        """
        if not rows.num_lanes:
            return projected.new_zeros((*projected.shape[:2], self._spec.output_dim))
        mixed, z, b, a = projected[: rows.num_lanes].split_with_sizes(self._widths, -1)
        lanes = _ends_of(rows)
        convolved_rows = convolve(mixed, parameters.conv, conv_state, lanes, rows.mark)
        q, k, v = delta_heads(convolved_rows, self._spec)
        g, beta = delta_gates(a, b, parameters)
        state = delta_state[lanes]  # a view if lanes are consecutive
        if q.shape[1] == 1:
            out = delta_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)[:, None]
            if isinstance(lanes, Tensor):
                delta_state[lanes] = state
        else:
            out, state, at_mark = delta_chunks(q, k, v, g, beta, state, rows.mark)
            if rows.mark is not None:
                delta_state[NO_LANE] = at_mark[0]
            delta_state[lanes] = state
        return with_padding(gated_norm(out, z, parameters), projected.shape[0])

    def delta_tree(
        self,
        projected: Tensor,
        parameters: DeltaParameters,
        conv_state: Tensor,
        delta_state: Tensor,
        rows: Rows,
        trees: Trees,
        scratch: State,
    ) -> Tensor:
        """`delta` for trees: each row follows its parent. Writes to the scratch only."""
        spec = self._spec
        mixed, z, b, a = projected.split_with_sizes(self._widths, -1)
        lanes = rows.lanes.long()
        window = torch.cat([conv_state[lanes], mixed], 1)  # [entries, kernel - 1 + rows, channels]
        entry = torch.arange(window.shape[0], device=window.device)[:, None, None]
        inputs = window[entry, trees.taps].float()  # [entries, rows, kernel, channels]
        q, k, v = delta_heads(F.silu((inputs * parameters.conv.t()).sum(2)), spec)
        g, beta = delta_gates(a, b, parameters)
        out, u, totals = delta_tree(q, k, v, g, beta, delta_state[lanes], trees.ancestors)
        new_inputs, new_keys, new_updates, new_totals = scratch
        new_inputs.copy_(mixed)
        new_keys.copy_(k[:, :, :: spec.num_value_heads // spec.num_key_heads])
        new_updates.copy_(u.transpose(1, 2))
        new_totals.copy_(totals.transpose(1, 2))
        return gated_norm(out, z, parameters)

    def commit(self, scratch: State, state: State, paths: Paths) -> None:
        """Advance the states of all layers by the accepted rows: [layers, lanes + 1, ...]."""
        conv_state, delta_state = state
        repeats = self._spec.num_value_heads // self._spec.num_key_heads
        for kept in paths.kept:
            inputs, k, u, totals = (t[:, kept.entry, kept.rows] for t in scratch)
            window = torch.cat([conv_state[:, kept.lane], inputs], 1)
            conv_state[:, kept.lane] = window[:, window.shape[1] - conv_state.shape[2] :]
            delta_state[:, kept.lane] = delta_path(
                delta_state[:, kept.lane],
                k.repeat_interleave(repeats, 2).transpose(1, 2),
                u.transpose(1, 2),
                totals.transpose(1, 2),
            )


def _ends_of(rows: Rows) -> slice | Tensor:
    """The lanes of the entries: a slice if they are consecutive, otherwise int64 indices."""
    num_lanes = rows.num_lanes
    lanes = [entry.lane for entry in rows.entries[:num_lanes]]
    if lanes == [*range(lanes[0], lanes[0] + num_lanes)]:
        return slice(lanes[0], lanes[0] + num_lanes)
    return rows.lanes[:num_lanes].long()


def convolve(
    x: Tensor, weight: Tensor, state: Tensor, lanes: slice | Tensor, mark: int | None = None
) -> Tensor:
    """Depthwise causal convolution and SiLU in float32. x: [entries, rows, channels]. `mark`, of a
    single entry: the window after this many rows is also written to NO_LANE."""
    window = torch.cat([state[lanes], x], 1)  # [entries, kernel - 1 + rows, channels]
    kernel = weight.shape[1]
    if mark is not None:
        state[NO_LANE] = window[0, mark : mark + kernel - 1]
    state[lanes] = window[:, window.shape[1] - kernel + 1 :]
    return F.silu(convolved(window, weight, x.shape[1]))


def convolved(window: Tensor, weight: Tensor, num_rows: int) -> Tensor:
    """Convolve a window of `num_rows + kernel - 1` rows: float32 [entries, num_rows, channels]."""
    window = window.float()
    total = window[:, :num_rows] * weight[:, 0]
    for i in range(1, weight.shape[1]):
        total = total + window[:, i : i + num_rows] * weight[:, i]
    return total


def delta_heads(mixed: Tensor, spec: DeltaSizes) -> tuple[Tensor, Tensor, Tensor]:
    """Split the convolution's output into query, key and value heads, float32 [entries, rows,
    value_heads, dim] each. Query and key are L2-normalised and shared by groups of value heads.
    """
    both = 2 * spec.num_key_heads
    keys, values = mixed.split_with_sizes((both * spec.key_dim, spec.output_dim), -1)
    keys = keys.unflatten(-1, (both, spec.key_dim))
    keys = keys * torch.rsqrt(keys.square().sum(-1, keepdim=True) + 1e-6)
    q, k = keys.repeat_interleave(spec.num_value_heads // spec.num_key_heads, 2).chunk(2, 2)
    return q * spec.key_dim**-0.5, k, values.unflatten(-1, (spec.num_value_heads, spec.value_dim))


def delta_gates(a: Tensor, b: Tensor, parameters: DeltaParameters) -> tuple[Tensor, Tensor]:
    """Log decay g and write strength beta, float32 [entries, rows, value_heads]."""
    g = parameters.decay_rate * F.softplus(a.float() + parameters.dt_bias)
    return g, b.float().sigmoid()


def gated_norm(out: Tensor, z: Tensor, parameters: DeltaParameters) -> Tensor:
    """RMS norm of each head, times silu(z): [entries, rows, output_dim] in z's dtype."""
    out = F.rms_norm(out, parameters.norm.shape, parameters.norm, parameters.eps)
    return (out * F.silu(z.float().view_as(out))).flatten(2).to(z.dtype)
