"""Verification: rows that form trees run through the mixers, and nothing permanent is written.

What a pass leaves is its scratch; committing a path writes that into the lane. Knows tensors only:
which rows are proposed and which are accepted is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.models.gated_delta import delta_path, delta_tree
from luceasync.models.ops import (
    AttentionNorms,
    DeltaParameters,
    attention_widths,
    delta_gates,
    delta_heads,
    delta_widths,
    gated_norm,
    heads_norm,
    masked_attention,
    rotate,
)
from luceasync.models.rows import NO_LANE, Rows
from luceasync.models.spec import AttentionSpec, DeltaSpec

ROOT = -1  # the parent of row 0, which is the lane's committed end


def ancestry(parents: Sequence[int]) -> list[list[int]]:
    """For each row itself, its parent, and so on up to row 0.

    Row 0 has the parent ROOT, every other row a row before it (an assertion of ours: proposals are
    made here, not sent in).
    """
    lines: list[list[int]] = []
    for row, parent in enumerate(parents):
        assert (parent == ROOT) == (row == 0) and parent < row, f"no tree: {list(parents)}"
        lines.append([row] if parent == ROOT else [row, *lines[parent]])
    return lines


@dataclass(frozen=True, slots=True)
class Trees:
    """The trees of a verify pass, one an entry, with the same number of rows each.

    `ancestors` bool [entries, rows, rows]: ancestor or self. `taps` int64 [entries, rows, reach]:
    for each row the places of the last `reach` inputs on its path, oldest first, in the committed
    window of `reach - 1` inputs followed by the rows.
    """

    ancestors: Tensor
    taps: Tensor

    @classmethod
    def of(cls, parents: Sequence[Sequence[int]], reach: int, device: torch.device) -> Trees:
        """`reach`: the width of the widest convolution, 1 if there is none."""
        lines = [ancestry(entry) for entry in parents]
        num_rows = len(parents[0])
        ancestors = torch.zeros(len(parents), num_rows, num_rows, dtype=torch.bool)
        for entry, rows in enumerate(lines):
            for row, line in enumerate(rows):
                ancestors[entry, row, line] = True
        taps = [[_taps(line, reach) for line in rows] for rows in lines]
        return cls(ancestors.to(device), torch.tensor(taps, device=device))


def _taps(line: Sequence[int], reach: int) -> list[int]:
    """Places of the last `reach` inputs before and with a row, oldest first."""
    window = reach - 1
    inside = [window + row for row in line[:reach]]
    before = [window - 1 - i for i in range(reach - len(inside))]
    return [*inside, *before][::-1]


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Keys and values of every row: [entries, rows, kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class DeltaScratch:
    """What a path needs to become state: inputs of the convolution [entries, rows, channels], keys
    [entries, heads, rows, key_dim], updates u [entries, heads, rows, value_dim], summed log decay
    [entries, heads, rows]."""

    inputs: Tensor
    keys: Tensor
    updates: Tensor
    totals: Tensor


Scratch = AttentionScratch | DeltaScratch


def attend_trees(
    projected: Tensor,
    spec: AttentionSpec,
    norms: AttentionNorms,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    trees: Trees,
) -> tuple[Tensor, AttentionScratch]:
    """As TorchOps.attend, but every row sees what is committed (its entry's `read`) and its
    ancestors.
    """
    q, k, v, *gates = projected.split(attention_widths(spec), -1)
    q = rotate(heads_norm(q, spec.head_dim, norms.query, norms.eps), spec, rows)
    k = rotate(heads_norm(k, spec.head_dim, norms.key, norms.eps), spec, rows)
    v = v.unflatten(-1, (-1, spec.head_dim))
    out = torch.zeros_like(q)
    for i, entry in enumerate(rows.entries):
        if entry.lane == NO_LANE:
            continue
        seen = trees.ancestors[i]
        committed = seen.new_ones(seen.shape[0], entry.begin)
        out[i] = masked_attention(
            q[i],
            torch.cat([keys[entry.lane, entry.read], k[i]]),
            torch.cat([values[entry.lane, entry.read], v[i]]),
            torch.cat([committed, seen], 1),
        )
    out = out.flatten(2)
    for gate in gates:
        out = out * torch.sigmoid(gate)
    return out, AttentionScratch(k, v)


def delta_trees(
    projected: Tensor,
    spec: DeltaSpec,
    parameters: DeltaParameters,
    conv_state: Tensor,
    delta_state: Tensor,
    rows: Rows,
    trees: Trees,
) -> tuple[Tensor, DeltaScratch]:
    """As TorchOps.delta, but the states stay as they are; each row follows its parent."""
    mixed, z, b, a = projected.split(delta_widths(spec), -1)
    lanes = rows.lanes.long()
    window = torch.cat([conv_state[lanes], mixed], 1)  # [entries, kernel - 1 + rows, channels]
    entry = torch.arange(window.shape[0], device=window.device)[:, None, None]
    inputs = window[entry, trees.taps].float()  # [entries, rows, kernel, channels]
    q, k, v = delta_heads(F.silu((inputs * parameters.conv.t()).sum(2)), spec)
    g, beta = delta_gates(a, b, parameters)
    out, u, totals = delta_tree(q, k, v, g, beta, delta_state[lanes], trees.ancestors)
    scratch = DeltaScratch(mixed, k.transpose(1, 2), u, totals)
    return gated_norm(out, z, parameters), scratch


def commit_delta(
    scratch: DeltaScratch,
    conv_state: Tensor,
    delta_state: Tensor,
    entry: int,
    lane: int,
    path: Tensor,
) -> None:
    """Move the lane's states on along `path`, int64 row indices from row 0 on."""
    window = torch.cat([conv_state[lane], scratch.inputs[entry, path]])
    conv_state[lane] = window[window.shape[0] - conv_state.shape[1] :]
    delta_state[lane] = delta_path(
        delta_state[lane],
        scratch.keys[entry][:, path],
        scratch.updates[entry][:, path],
        scratch.totals[entry][:, path],
    )


def commit_attention(
    scratch: AttentionScratch,
    keys: Tensor,
    values: Tensor,
    entry: int,
    lane: int,
    path: Tensor,
    places: slice | Tensor,
) -> None:
    """Write the rows of `path` to their `places` in the lane."""
    keys[lane, places] = scratch.keys[entry, path]
    values[lane, places] = scratch.values[entry, path]
