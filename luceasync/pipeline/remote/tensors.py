"""Tensors as the bytes of a payload and back: laid one after the other, in the order of a list.

Owns their layout. Knows no message and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from luceasync.cyext.flatten import fill
from luceasync.ipc.channel import Outgoing, Payload
from luceasync.models.precision import torch_dtype
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.passes import Batch
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.platform import Event
from luceasync.pipeline.remote import wire
from luceasync.pipeline.transfer import queue_copy

# Shapes and bytes of what crosses the borders of a stage, which each end computes itself. Knows
# no process and no ring.


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
    """Shapes of what crosses the borders of one stage."""

    def __init__(self, spec: ModelSpec, plan: Plan, number: int) -> None:
        begin, end = plan.stages[number]
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
        """Of the rings to the stage and from it: two chunks, and what single calls may take."""
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


HOST = torch.device("cpu")
LARGE_BYTES = 256 << 10


def specs_of(tensors: Sequence[Tensor]) -> list[Spec]:
    """Shape and dtype of each."""
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def views(memory: memoryview, specs: Sequence[Spec]) -> list[Tensor]:
    """Tensors over memory of exactly their size; nothing is copied."""
    found, begin = [], 0
    for spec in specs:
        shape, dtype = spec
        if count := prod(shape):
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=begin)
            found.append(flat.view(shape))
        else:
            found.append(torch.empty(shape, dtype=dtype))
        begin += payload_bytes([spec])
    return found


def put(room: Outgoing, tensors: Sequence[Tensor]) -> None:
    """Copy tensors of any device there; complete when this returns."""
    for target, tensor in zip(views(room.view, specs_of(tensors)), tensors, strict=True):
        if tensor.nbytes < LARGE_BYTES or tensor.device != HOST or not tensor.is_contiguous():
            target.copy_(tensor)
        else:  # past the caches: nearly twice as fast
            source, place = (t.view(-1).view(torch.uint8).numpy() for t in (tensor, target))
            fill(place, [0], [source])


def put_soon(room: Outgoing, tensor: Tensor) -> Event | None:
    """As `put`, of one tensor, while others compute: what comes when it is there, None: now. The
    tensor's device has the room registered.
    """
    [target] = views(room.view, specs_of([tensor]))
    return queue_copy(tensor, target)


def lend(payload: Payload, specs: Sequence[Spec]) -> list[Tensor]:
    """Tensors over a payload where it lies, until it is freed. One of another size than these have
    closes its channel. Raises ChannelClosed.
    """
    return views(payload.view(payload_bytes([*specs])), specs)


def take(payload: Payload, specs: Sequence[Spec]) -> list[Tensor]:
    """Tensors of our own, on the host; the payload is freed. One of another size than these have
    closes its channel. Raises ChannelClosed.
    """
    whole = torch.empty(payload_bytes([*specs]), dtype=torch.uint8)
    memory = whole.numpy().data
    payload.into(memory)
    return views(memory, specs)
