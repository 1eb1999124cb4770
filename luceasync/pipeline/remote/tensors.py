"""Tensors as the bytes of a payload and back, one after the other in the order of a list.

Owns that layout, and the shapes and bounds that both ends of a stage's channel compute for
themselves. Knows no message and no process.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from luceasync.cyext.flatten import fill
from luceasync.ipc.channel import OutgoingPayload, Payload
from luceasync.ipc.packets import WireError
from luceasync.kv.pages import num_chunks
from luceasync.models.precision import torch_dtype
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.passes import Batch
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.platform import Event
from luceasync.pipeline.transfer import queue_copy

Spec = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor that crosses

HOST = torch.device("cpu")
ALIGN_BYTES = 8  # of each tensor of a payload
LARGE_BYTES = 256 << 10
PIECE_BYTES = 4 << 20  # of a node that is streamed, in one message
RANKED_BYTES = 48 << 10  # of a row of which the most candidates are wanted, and more


def tensor_bytes(spec: Spec) -> int:
    """Bytes of one tensor."""
    shape, dtype = spec
    return prod(shape) * dtype.itemsize


def payload_bytes(specs: Sequence[Spec]) -> int:
    """Bytes of tensors one after the other, each of them aligned."""
    return sum(-(-tensor_bytes(spec) // ALIGN_BYTES) * ALIGN_BYTES for spec in specs)


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


def put(room: OutgoingPayload, tensors: Sequence[Tensor]) -> None:
    """Copy tensors of any device into a payload; complete on return."""
    for target, tensor in zip(views(room.view, specs_of(tensors)), tensors, strict=True):
        if tensor.nbytes < LARGE_BYTES or tensor.device != HOST or not tensor.is_contiguous():
            target.copy_(tensor)
        else:  # past the caches: nearly twice as fast
            source, place = (t.view(-1).view(torch.uint8).numpy() for t in (tensor, target))
            fill(place, [0], [source])


def put_soon(room: OutgoingPayload, tensor: Tensor) -> Event | None:
    """Queue a copy of one tensor into a payload. Returns the event of its completion, or None if it
    is complete. The payload's memory must be registered with the tensor's device.
    """
    [target] = views(room.view, specs_of([tensor]))
    return queue_copy(tensor, target)


def lend(payload: Payload, specs: Sequence[Spec]) -> list[Tensor]:
    """Tensors over a payload where it lies, valid until it is freed. A payload of another size
    closes its channel. Raises ChannelClosed.
    """
    return views(payload.view(payload_bytes(specs)), specs)


def take(payload: Payload, specs: Sequence[Spec]) -> list[Tensor]:
    """Copy a payload into tensors on the host, and free it. A payload of another size closes its
    channel. Raises ChannelClosed.
    """
    num_bytes = payload_bytes(specs)
    if payload.num_bytes != num_bytes:
        payload.view(num_bytes)  # raises, before anything is allocated
    whole = torch.empty(num_bytes, dtype=torch.uint8)
    memory = whole.numpy().data
    payload.into(memory)
    return views(memory, specs)


class StageSizes:
    """Shapes of what crosses the borders of one stage, and the bounds of what it may be told."""

    def __init__(self, spec: ModelSpec, plan: Plan, number: int) -> None:
        begin, end = plan.stages[number]
        self.shards = plan.shards[begin:end]
        self.is_first, self.is_last = self.shards[0].is_first, self.shards[-1].is_last
        self.layers = range(self.shards[0].begin, self.shards[-1].end)
        self.dtype = torch_dtype(plan.precision.compute)
        self.hidden, self.num_vocab = spec.hidden_size, spec.vocab_size
        self.num_lanes, self.max_tokens = plan.parallel, plan.max_ctx_tokens
        self.num_pages = plan.num_pages
        self._plan = plan

    def input(self, batch: Batch) -> Spec:
        """What the first layer is given: tokens or hidden rows."""
        shape = (len(batch.lanes), batch.num_rows)
        return (shape, torch.int64) if self.is_first else self.rows(*shape)

    def output(self, batch: Batch, project: bool) -> list[Spec]:
        """What the last layer returns: hidden rows, logits of one row, or nothing."""
        if not self.is_last:
            return [self.rows(len(batch.lanes), batch.num_rows)]
        return [((1, 1, self.num_vocab), torch.float32)] if project else []

    def rows(self, *shape: int) -> Spec:
        """Hidden rows."""
        return (*shape, self.hidden), self.dtype

    def masks(self, num_masked: int) -> list[Spec]:
        """Row numbers, and a bit for each token of each row."""
        if not num_masked:
            return []
        num_words = (self.num_vocab + 31) // 32
        return [((num_masked,), torch.int64), ((num_masked, num_words), torch.int32)]

    def ranked(self, num_rows: int, num_ranked: int, num_top: int | None) -> list[Spec]:
        """Best tokens. If any are ranked, their values, ids and masses; and if log-probabilities
        are wanted, the known ones, and the highest with their ids.
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

    def check_lane(self, lane: int, num_tokens: int = 0) -> None:
        """Raise WireError unless the lane exists and can hold that many tokens."""
        if not 0 <= lane < self.num_lanes:
            raise WireError(f"lane {lane} of {self.num_lanes}")
        if num_tokens > self.max_tokens:
            raise WireError(f"{num_tokens} tokens in a lane of {self.max_tokens}")

    def check_page(self, chunk: int, page: int) -> None:
        """Raise WireError unless a lane has this chunk and this page."""
        most = num_chunks(self.max_tokens)
        if not (chunk < most and page < min(most, self.num_pages)):
            raise WireError(
                f"chunk {chunk}, page {page} of a lane of {most} chunks, {self.num_pages} pages"
            )

    def ring_bytes(self) -> tuple[int, int]:
        """Bytes of the rings to the stage and from it: two prefill chunks, and the largest payload
        of any other message.
        """
        plan = self._plan
        chunk = tensor_bytes(self.rows(1, plan.prefill_chunk_tokens))
        most_rows = plan.parallel * max(plan.verify_rows, default=1)
        passed = tensor_bytes(self.rows(1, most_rows))
        to = max(2 * chunk, 2 * passed, 2 * PIECE_BYTES)
        back = to
        if self.is_last:
            # An edit of each token a lane may have, and as many that were asked for; whole rows.
            to += plan.parallel * 2 * self.num_vocab * 5 * 8
            to += payload_bytes(self.masks(most_rows))
            back += 4 * self.num_vocab * 8 + most_rows * RANKED_BYTES
        return to + (1 << 20), back + (1 << 20)
