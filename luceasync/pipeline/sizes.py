"""Shapes and bytes of what crosses the borders of a group, which each end computes itself.

Knows no process and no ring.
"""

from __future__ import annotations

from math import prod

import torch

from luceasync.models.precision import torch_dtype
from luceasync.models.spec import ModelSpec
from luceasync.pipeline import wire
from luceasync.pipeline.passes import Batch
from luceasync.pipeline.plan import Plan

Spec = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor that crosses

RANKED_BYTES = 48 << 10  # of a row of which the most candidates are wanted, and more
ALIGN_BYTES = 8  # of each tensor of a payload


def num_bytes(spec: Spec) -> int:
    """Of one tensor."""
    shape, dtype = spec
    return prod(shape) * dtype.itemsize


def payload_bytes(specs: list[Spec]) -> int:
    """Of tensors one after the other, each of them aligned."""
    return sum(-(-num_bytes(spec) // ALIGN_BYTES) * ALIGN_BYTES for spec in specs)


class Sizes:
    """Shapes of what crosses the borders of one group."""

    def __init__(self, spec: ModelSpec, plan: Plan, number: int) -> None:
        begin, end = plan.groups[number]
        self.shards = plan.shards[begin:end]
        self.is_first, self.is_last = self.shards[0].is_first, self.shards[-1].is_last
        self.layers = range(self.shards[0].begin, self.shards[-1].end)
        self.dtype = torch_dtype(plan.precision.compute)
        self.hidden, self.num_vocab = spec.hidden_size, spec.vocab_size
        self._plan = plan

    def given(self, batch: Batch) -> Spec:
        """What the first layer is given."""
        shape = (len(batch.lanes), batch.num_rows)
        return (shape, torch.int64) if self.is_first else self.rows(*shape)

    def gives(self, batch: Batch, project: bool) -> Spec | None:
        """What the last layer gives."""
        if not self.is_last:
            return self.rows(len(batch.lanes), batch.num_rows)
        return ((1, 1, self.num_vocab), torch.float32) if project else None

    def rows(self, *shape: int) -> Spec:
        """Hidden rows."""
        return (*shape, self.hidden), self.dtype

    def masks(self, num_masked: int) -> list[Spec]:
        """Rows, and a bit for each token of each."""
        if not num_masked:
            return []
        num_words = (self.num_vocab + 31) // 32
        return [((num_masked,), torch.int64), ((num_masked, num_words), torch.int32)]

    def ranked(self, num_rows: int, num_ranked: int, num_top: int | None) -> list[Spec]:
        """Best tokens; where any are ranked, values, ids and masses of them, and where they are
        wanted, what is known of log-probabilities, and the highest ones with their ids.
        """
        specs: list[Spec] = [((num_rows,), torch.int64)]
        if not num_ranked:
            return specs
        ranked, real = min(num_ranked, self.num_vocab), torch.float64
        specs += [((num_rows, ranked), real), ((num_rows, ranked), real), ((num_rows,), real)]
        if num_top is not None:
            top = (num_rows, min(num_top, self.num_vocab))
            specs += [((num_rows, 1 + ranked), real), (top, real), (top, real)]
        return specs

    def proposal(self, message: wire.Propose) -> list[Spec]:
        """Tokens, and the parents of a tree."""
        if message.budget is None:
            return [((message.num_entries, 1 + message.num_slots), torch.int64)]
        shape = (message.num_entries, 1 + message.budget)
        return [(shape, torch.int64), (shape, torch.int32)]

    def ring_bytes(self) -> tuple[int, int]:
        """Of the rings to the group and from it: two chunks, and what single calls may take."""
        plan = self._plan
        chunk = num_bytes(self.rows(1, plan.prefill_chunk_tokens))
        most_rows = plan.parallel * max(plan.verify_rows, default=1)
        passed = num_bytes(self.rows(1, most_rows))
        to = max(2 * chunk, 2 * passed, wire.PIECE_BYTES * 2)
        back = to
        if self.is_last:
            # An edit of each token a lane may have, and as many that were asked for; whole rows.
            to += plan.parallel * 2 * self.num_vocab * 5 * 8
            to += payload_bytes(self.masks(most_rows))
            back += 4 * self.num_vocab * 8 + most_rows * RANKED_BYTES
        return to + (1 << 20), back + (1 << 20)
