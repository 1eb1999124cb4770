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
from luceasync.pipeline.platform import Event
from luceasync.pipeline.sizes import Spec, payload_bytes
from luceasync.pipeline.transfer import queue_copy

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
