"""Verification: rows that form trees run through the mixers, and nothing permanent is written.

What a pass leaves is its scratch; committing a path writes that into the lane. Knows tensors only:
which rows are proposed and which are accepted is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.models.gated_delta import delta_path, delta_tree
from luceasync.models.ops import (
    BLOCK_ROWS,
    AttentionNorms,
    DeltaParameters,
    attention_widths,
    delta_gates,
    delta_heads,
    delta_widths,
    gated_norm,
    heads_norm,
    rotate,
)
from luceasync.models.pass_rows import NO_LANE, Paths, Rows
from luceasync.models.scratch import AttentionScratch, DeltaScratch
from luceasync.models.spec import AttentionSpec, DeltaSpec

ROOT = -1  # the parent of row 0, which is the lane's committed end


@dataclass(frozen=True, slots=True)
class Trees:
    """The trees of a verify pass, one an entry, with the same number of rows each.

    `ancestors` bool [entries, rows, rows]: ancestor or self. `depths` int32 [entries, rows]: 0 for
    row 0. `taps` int [entries, rows, reach]: for each row the places of the last `reach` inputs on
    its path, oldest first, in the committed window of `reach - 1` inputs followed by the rows.
    """

    ancestors: Tensor
    depths: Tensor
    taps: Tensor


def chain(num_entries: int, num_rows: int, device: torch.device) -> Tensor:
    """Parents int32 [entries, rows] of rows that follow each other."""
    parents = torch.arange(ROOT, num_rows - 1, dtype=torch.int32, device=device)
    return parents.expand(num_entries, -1)


class TorchTrees:
    """What verification does otherwise than decoding, as plain torch, for any device."""

    def trees(self, parents: Tensor, reach: int) -> Trees:
        """parents: int32 [entries, rows], ROOT for row 0 and a row before its own for every other;
        reach: the width of the widest convolution, 1 if there is none.
        """
        num_entries, num_rows = parents.shape
        own = torch.arange(num_rows, device=parents.device)
        # Ancestors of the second degree from those of the first, of the fourth from those, ...
        seen = ((parents[..., None] == own) | (own[:, None] == own)).float()
        for _ in range((num_rows - 1).bit_length()):
            seen = (seen @ seen).clamp_(max=1)
        taps = [own.expand(num_entries, -1)]
        for _ in range(reach - 1):
            last = taps[-1]
            taps.append(parents.gather(1, last.clamp(min=0)).where(last >= 0, last - 1).long())
        depths = (seen.sum(-1) - 1).int()
        return Trees(seen > 0, depths, torch.stack(taps[::-1], -1) + (reach - 1))

    def attend(
        self,
        projected: Tensor,
        spec: AttentionSpec,
        norms: AttentionNorms,
        keys: Tensor,
        values: Tensor,
        rows: Rows,
        trees: Trees,
        scratch: AttentionScratch,
    ) -> Tensor:
        """As TorchOps.attend, but every row sees what is committed (its entry's `read`) and its
        ancestors, and is written to the scratch.
        """
        q, k, v, *gates = projected.split(attention_widths(spec), -1)
        q = rotate(heads_norm(q, spec.head_dim, norms.query, norms.eps), spec, rows)
        k = rotate(heads_norm(k, spec.head_dim, norms.key, norms.eps), spec, rows)
        scratch.keys.copy_(k)
        scratch.values.copy_(v.unflatten(-1, (-1, spec.head_dim)))
        out = torch.zeros_like(q)
        for i, entry in enumerate(rows.entries):
            if entry.lane != NO_LANE:
                committed = keys[entry.lane, entry.read], values[entry.lane, entry.read]
                new = scratch.keys[i], scratch.values[i]
                out[i] = attend_tree(q[i], committed, entry.begin, new, trees.ancestors[i])
        out = out.flatten(2)
        for gate in gates:
            out = out * torch.sigmoid(gate)
        return out

    def delta(
        self,
        projected: Tensor,
        spec: DeltaSpec,
        parameters: DeltaParameters,
        conv_state: Tensor,
        delta_state: Tensor,
        rows: Rows,
        trees: Trees,
        scratch: DeltaScratch,
    ) -> Tensor:
        """As TorchOps.delta, but the states stay as they are and each row follows its parent."""
        mixed, z, b, a = projected.split(delta_widths(spec), -1)
        lanes = rows.lanes.long()
        window = torch.cat([conv_state[lanes], mixed], 1)  # [entries, kernel - 1 + rows, channels]
        entry = torch.arange(window.shape[0], device=window.device)[:, None, None]
        inputs = window[entry, trees.taps].float()  # [entries, rows, kernel, channels]
        q, k, v = delta_heads(F.silu((inputs * parameters.conv.t()).sum(2)), spec)
        g, beta = delta_gates(a, b, parameters)
        out, u, totals = delta_tree(q, k, v, g, beta, delta_state[lanes], trees.ancestors)
        scratch.inputs.copy_(mixed)
        scratch.keys.copy_(k[:, :, :: spec.num_value_heads // spec.num_key_heads])
        scratch.updates.copy_(u.transpose(1, 2))
        scratch.totals.copy_(totals.transpose(1, 2))
        return gated_norm(out, z, parameters)

    def commit_attention(
        self, scratch: AttentionScratch, keys: Tensor, values: Tensor, paths: Paths
    ) -> None:
        """Write the accepted rows of every layer to their places: [layers, lanes, places, ...]."""
        for kept in paths.kept:
            keys[:, kept.lane, kept.places] = scratch.keys[:, kept.entry, kept.rows]
            values[:, kept.lane, kept.places] = scratch.values[:, kept.entry, kept.rows]

    def commit_delta(
        self, scratch: DeltaScratch, conv_state: Tensor, delta_state: Tensor, paths: Paths
    ) -> None:
        """Move the states of every layer on along the accepted rows: [layers, lanes + 1, ...]."""
        repeats = scratch.updates.shape[-2] // scratch.keys.shape[-2]
        for kept in paths.kept:
            inputs, k, u, totals = (t[:, kept.entry, kept.rows] for t in scratch.tensors)
            window = torch.cat([conv_state[:, kept.lane], inputs], 1)
            conv_state[:, kept.lane] = window[:, window.shape[1] - conv_state.shape[2] :]
            delta_state[:, kept.lane] = delta_path(
                delta_state[:, kept.lane],
                k.repeat_interleave(repeats, 2).transpose(1, 2),
                u.transpose(1, 2),
                totals.transpose(1, 2),
            )


def attend_tree(
    q: Tensor,
    committed: tuple[Tensor, Tensor],
    num_committed: int,
    new: tuple[Tensor, Tensor],
    ancestors: Tensor,
) -> Tensor:
    """Attention of a tree's rows to what is committed and to their ancestors.

    q: [rows, heads, head_dim]; committed: keys and values [span, kv_heads, head_dim], of which the
    first `num_committed` count, and those behind them hold anything finite; new: keys and values
    [rows, kv_heads, head_dim]; ancestors: bool [rows, rows]. Returns [rows, heads, head_dim].
    Blocks and whole chunks as in models.ops.attend_one, for the same reasons.
    """
    keys, values = committed
    num_rows, num_kv_heads, head_dim = new[0].shape
    # [kv_heads, group, rows, head_dim]: query heads that share a kv head are rows of one product.
    folded = (q * head_dim**-0.5).unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    folded = folded.flatten(1, 2).transpose(1, 2)
    blocks = [k.transpose(0, 1) @ folded for k in (*keys.split(BLOCK_ROWS), new[0])]
    scores = torch.cat(blocks, 1).transpose(1, 2)  # [kv_heads, group * rows, span + rows]
    span = keys.shape[0]
    scores[..., num_committed:span] = -torch.inf
    within = scores[..., span:].unflatten(1, (-1, num_rows))
    within.masked_fill_(~ancestors, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    shares = [*weights[..., :span].split(BLOCK_ROWS, -1), weights[..., span:]]
    pairs = zip(shares, (*values.split(BLOCK_ROWS), new[1]), strict=True)
    out = sum(share @ v.transpose(0, 1) for share, v in pairs)
    return out.unflatten(1, (-1, num_rows)).permute(2, 0, 1, 3).flatten(1, 2)
