"""Attention to a window on GPUs: a fused kernel over the rings for steps and trees; for the many
rows of a prompt one for Hopper, elsewhere torch's products.

Everything except passes of many rows can be captured as a CUDA graph, and reads `rows` and `paths`
from the device only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from luceasync.kernels import prefill_attention
from luceasync.kernels import rows as row_kernels
from luceasync.kernels.commit import commit_recent
from luceasync.kernels.positions import rotation
from luceasync.kernels.window_attention import attend_window
from luceasync.models.mixers.attention_sizes import AttentionBody, AttentionSizes, HeadNorms
from luceasync.models.mixers.attention_torch import Rotation, frequencies, masked_attention
from luceasync.models.mixers.mixer import State
from luceasync.models.pass_rows import NO_LANE, Paths, Rows
from luceasync.models.trees import Trees

BLOCK_ROWS = 1024  # of a chunk whose scores are computed at once


@dataclass(frozen=True, slots=True)
class TurnOnDevice:
    """`rotation` of the rows; int32 [entries, rows] contiguous, their positions, and how many rows
    of their rings were ever written; `alone`: bool [entries, 1, 1], all true.
    """

    rotation: Rotation
    positions: Tensor
    spans: Tensor
    alone: Tensor


class TritonSliding(AttentionBody):
    """Attention to a window as a fused kernel; sliding_torch.TorchSliding documents the methods."""

    def __init__(self, spec: AttentionSizes) -> None:
        self._spec = spec
        # On the device of the first pass, which is that of all passes.
        self._frequencies: Tensor | None = None

    def prepare(self, positions: Tensor) -> TurnOnDevice:
        if self._frequencies is None:
            self._frequencies = frequencies(self._spec, positions.device)
        turn = rotation(positions, self._frequencies, self._spec.rope.magnitude)
        spans = positions.clamp(max=self._spec.window)
        alone = torch.ones((len(positions), 1, 1), dtype=torch.bool, device=positions.device)
        return TurnOnDevice(turn, positions.contiguous(), spans.contiguous(), alone)

    def attend(self, projected: Tensor, norms: HeadNorms, state: State, rows: Rows) -> Tensor:
        assert rows.mark is None, "rings are large: nothing takes them beside the lanes"
        prepared: TurnOnDevice = rows.prepared[self._spec]
        if projected.shape[1] > 1:
            return self._attend_chunk(projected, norms, state, rows, prepared)
        new = self._new_rows(projected, state)
        return self._attend(projected, norms, state, rows, prepared.alone, new, keeps=True)

    def attend_tree(
        self,
        projected: Tensor,
        norms: HeadNorms,
        state: State,
        rows: Rows,
        trees: Trees,
        scratch: State,
    ) -> Tensor:
        new_keys, new_values = scratch
        return self._attend(projected, norms, state, rows, trees.ancestors, (new_keys, new_values))

    def commit(self, scratch: State, state: State, paths: Paths) -> None:
        path = (paths.lanes, paths.positions, paths.rows, paths.counts)
        for stack, new in zip(state, scratch, strict=True):
            commit_recent(new, stack, *path)

    def _attend(
        self,
        projected: Tensor,
        norms: HeadNorms,
        state: State,
        rows: Rows,
        ancestors: Tensor,
        new: tuple[Tensor, Tensor],
        *,
        keeps: bool = False,
    ) -> Tensor:
        spec, (keys, values) = self._spec, state
        prepared: TurnOnDevice = rows.prepared[spec]
        return attend_window(
            projected,
            (norms.query, norms.key, norms.eps),
            keys,
            values,
            rows.lanes,
            prepared.positions,
            prepared.spans,
            prepared.rotation,
            ancestors,
            new,
            num_heads=spec.num_heads,
            rotary_dim=spec.rotary_dim,
            gated=spec.gated,
            keeps=keeps,
        )

    def _new_rows(self, projected: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Room for keys and values of a pass."""
        shape = (*projected.shape[:2], *state[0].shape[2:])
        return state[0].new_empty(shape), state[1].new_empty(shape)

    def _attend_chunk(
        self,
        projected: Tensor,
        norms: HeadNorms,
        state: State,
        rows: Rows,
        prepared: TurnOnDevice,
    ) -> Tensor:
        """Attend with many rows of each lane. Only the device knows where they begin: the whole
        ring is read, and what is in no row's window is masked."""
        spec, out = self._spec, []  # of each entry [rows, heads, head_dim]
        num_before, num_rows = spec.window - 1, projected.shape[1]
        for i, entry in enumerate(rows.entries):
            if entry.lane == NO_LANE:
                out.append(projected.new_zeros(num_rows, spec.num_heads, spec.head_dim))
                continue
            begin, rings = prepared.positions[i, :1], [stack[entry.lane] for stack in state]
            shape = (num_before + num_rows, *rings[0].shape[1:])
            keys, values = (ring.new_empty(shape) for ring in rings)
            own = keys[num_before:], values[num_before:]
            queries = row_kernels.split_heads(
                projected[i : i + 1].contiguous(),
                (norms.query, norms.key, norms.eps),
                (prepared.rotation[0][i : i + 1], prepared.rotation[1][i : i + 1]),
                (own[0][None], own[1][None]),
                num_heads=spec.num_heads,
                rotary_dim=spec.rotary_dim,
            )
            row_kernels.unroll(rings, begin, (keys, values))
            out.append(self._attend_rows(queries[0], keys, values, begin))
            row_kernels.keep_newest(rings, begin, own)
        attended = (out[0][None] if len(out) == 1 else torch.stack(out)).flatten(2)
        if spec.gated:
            attended = attended * torch.sigmoid(projected[..., -spec.query_dim :])
        return attended

    def _attend_rows(self, q: Tensor, keys: Tensor, values: Tensor, begin: Tensor) -> Tensor:
        """Attention of rows [rows, heads, head_dim] from position `begin` on, int32 [1], to
        `keys` and `values` [window - 1 + rows, kv_heads, head_dim].
        """
        window, num_rows = self._spec.window, len(q)
        if prefill_attention.can_attend(q):
            given = q, keys, values
            attended: Tensor = prefill_attention.attend_rows(*given, window=window, begin=begin)
            return attended
        out = []
        for first in range(0, num_rows, BLOCK_ROWS):
            block = q[first : first + BLOCK_ROWS]
            seen = slice(first, first + window - 1 + len(block))
            there = torch.arange(seen.start, seen.stop, device=q.device) + 1 - window
            own = torch.arange(first, first + len(block), device=q.device)
            apart = own[:, None] - there
            mask = (apart >= 0) & (apart < window) & (there >= -begin)
            out.append(masked_attention(block, keys[seen], values[seen], mask))
        return out[0] if len(out) == 1 else torch.cat(out)
