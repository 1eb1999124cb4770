"""Attention to a window of the newest tokens in torch, for any device: the reference of the
kernels.

Addresses a lane's keys and values as rings, and rows by their positions: row indices differ from
positions where chunks of other layers are absent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from luceasync.models.mixers.attention_sizes import AttentionBody, AttentionSizes, HeadNorms
from luceasync.models.mixers.attention_torch import (
    Rotation,
    attend_one,
    frequencies,
    gated,
    heads_of,
    masked_attention,
    of_all,
    rotation,
)
from luceasync.models.mixers.mixer import State
from luceasync.models.pass_rows import Paths, Rows
from luceasync.models.recent import ring_positions
from luceasync.models.trees import Trees

Pair = tuple[Tensor, Tensor]  # keys and values

BLOCK_ROWS = 256  # of a chunk whose scores are computed at once


@dataclass(frozen=True, slots=True)
class Turn:
    """`rotation` of the rows, and the position of each entry's first row."""

    rotation: Rotation
    begins: tuple[int, ...]


class TorchSliding(AttentionBody):
    """Attention to a window as plain torch. Methods without a docstring are documented at
    attention_torch.TorchAttention."""

    def __init__(self, spec: AttentionSizes) -> None:
        self._spec = spec
        # On the device of the first pass, which is that of all passes.
        self._frequencies: Tensor | None = None

    def prepare(self, positions: Tensor) -> Turn:
        if self._frequencies is None:
            self._frequencies = frequencies(self._spec, positions.device)
        turn = rotation(positions, self._frequencies, self._spec.rope.magnitude)
        return Turn(turn, tuple(positions[:, 0].tolist()))

    def attend(self, projected: Tensor, norms: HeadNorms, state: State, rows: Rows) -> Tensor:
        """Let each row attend to its window, then keep the newest rows in the lane's ring. state:
        keys and values [lanes, window, kv_heads, head_dim].
        """
        assert rows.mark is None, "rings are large: nothing takes them beside the lanes"
        prepared: Turn = rows.prepared[self._spec]
        q, k, v, gates = self.heads(projected, norms, prepared.rotation)
        keys, values = state
        out = []  # of each entry [rows, heads, head_dim]
        for i, entry in enumerate(rows.entries[: rows.num_lanes]):
            rings = keys[entry.lane], values[entry.lane]
            out.append(self.attend_entry(q[i], (k[i], v[i]), rings, prepared.begins[i]))
            for ring, new in zip(rings, (k[i], v[i]), strict=True):
                keep(ring, new, prepared.begins[i])
        return gated(of_all(out, q).flatten(2), gates)

    def heads(
        self, projected: Tensor, norms: HeadNorms, turn: Rotation
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return heads_of(projected, self._spec, norms, turn)

    def attend_entry(self, q: Tensor, new: Pair, rings: Pair, begin: int) -> Tensor:
        """Attention of rows from position `begin` on to their windows.

        q: [rows, heads, head_dim]; new: their keys and values [rows, kv_heads, head_dim]; rings:
        those of the lane [window, kv_heads, head_dim], as before these rows, except that a single
        row is already written. Returns [rows, heads, head_dim].
        """
        if len(q) == 1:
            for ring, row in zip(rings, new, strict=True):
                keep(ring, row, begin)
            return attend_one(q, *rings, num_seen=min(begin + 1, self._spec.window))
        return self.attend_rows(q, *unrolled(rings, new, begin))

    def attend_rows(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of the last rows of `keys` and `values` [span, kv_heads, head_dim], which are
        in order of position, block by block.
        """
        window, before, out = self._spec.window, len(keys) - len(q), []
        for first in range(0, len(q), BLOCK_ROWS):
            rows = q[first : first + BLOCK_ROWS]
            own = before + first + torch.arange(len(rows), device=q.device)
            seen = slice(max(0, before + first + 1 - window), before + first + len(rows))
            apart = own[:, None] - torch.arange(seen.start, seen.stop, device=q.device)
            mask = (apart >= 0) & (apart < window)
            out.append(masked_attention(rows, keys[seen], values[seen], mask))
        return out[0] if len(out) == 1 else torch.cat(out)

    def attend_tree(
        self,
        projected: Tensor,
        norms: HeadNorms,
        state: State,
        rows: Rows,
        trees: Trees,
        scratch: State,
    ) -> Tensor:
        """`attend` for trees: each row sees those of its ancestors and of the committed rows that
        are in its window. Writes to the scratch only.
        """
        prepared: Turn = rows.prepared[self._spec]
        q, k, v, gates = self.heads(projected, norms, prepared.rotation)
        new_keys, new_values = scratch
        new_keys.copy_(k)
        new_values.copy_(v)
        keys, values = state
        out = []
        for i, entry in enumerate(rows.entries[: rows.num_lanes]):
            ancestors, depths = trees.ancestors[i], trees.depths[i]
            mask = tree_mask(prepared.begins[i], self._spec.window, ancestors, depths)
            seen_keys = torch.cat([keys[entry.lane], new_keys[i]])
            seen_values = torch.cat([values[entry.lane], new_values[i]])
            out.append(masked_attention(q[i], seen_keys, seen_values, mask))
        return gated(of_all(out, q).flatten(2), gates)

    def commit(self, scratch: State, state: State, paths: Paths) -> None:
        """Write the accepted rows of all layers to their rings: [layers, lanes, window, ...]."""
        for kept in paths.kept:
            for stack, rows in zip(state, scratch, strict=True):
                chosen = rows[:, kept.entry, kept.rows].transpose(0, 1)
                keep(stack[:, kept.lane].transpose(0, 1), chosen, kept.position)


def keep(ring: Tensor, new: Tensor, begin: int) -> None:
    """Write the newest of the rows `new` [rows, ...] from position `begin` on to a ring [window,
    ...].
    """
    window = len(ring)
    num_kept = min(len(new), window)
    first = (begin + len(new) - num_kept) % window
    new = new[len(new) - num_kept :]
    num_before_turn = min(num_kept, window - first)
    ring[first : first + num_before_turn] = new[:num_before_turn]
    ring[: num_kept - num_before_turn] = new[num_before_turn:]


def unrolled(rings: Pair, new: Pair, begin: int) -> Pair:
    """Keys and values [span, ...] in order of position: first the part of the rings that rows from
    position `begin` on still see, then the `new` ones."""
    keys, values = (
        torch.cat([ring[piece] for piece in _pieces(len(ring), begin)] + [rows])
        for ring, rows in zip(rings, new, strict=True)
    )
    return keys, values


def _pieces(window: int, begin: int) -> list[slice]:
    """Places of a ring's positions that a row at position `begin` sees, in order."""
    num_seen = min(begin, window - 1)
    first, end = (begin - num_seen) % window, begin % window
    if num_seen == 0:
        return []
    return [slice(first, end)] if first < end else [slice(first, window), slice(0, end)]


def tree_mask(begin: int, window: int, ancestors: Tensor, depths: Tensor) -> Tensor:
    """What rows of a tree after the committed end `begin` see of the ring and of each other: bool
    [rows, window + rows]."""
    own = begin + depths[:, None]
    there = ring_positions(window, begin, depths.device)
    committed = (there >= 0) & (there > own - window)
    return torch.cat([committed, ancestors & (depths > own - begin - window)], 1)
