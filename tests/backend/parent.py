"""The parent's end of a channel, for handlers: it sends commands with payloads of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from luceasync.backend.dispatch import Dispatcher, handlers_of
from luceasync.errors import ChannelClosed
from luceasync.ipc.channel import Received
from luceasync.ipc.packets import Message
from luceasync.pipeline.remote.tensors import payload_bytes, put, specs_of


class Outgoing:
    """Room for an answer."""

    def __init__(self, num_bytes: int) -> None:
        self.view = memoryview(bytearray(num_bytes))


class SentPayload:
    """See Payload: bytes whose size is checked against what the receiver has computed."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.num_bytes = len(content)
        self.is_freed = False

    def view(self, num_bytes: int) -> memoryview:
        if num_bytes != self.num_bytes:
            raise ChannelClosed("a payload of another size")
        return memoryview(bytearray(self._content))

    def into(self, target: memoryview) -> None:
        target.cast("B")[:] = self.view(target.nbytes)

    def free(self) -> None:
        self.is_freed = True


class FakeChannel:
    """See Channel: keeps the answers."""

    def __init__(self) -> None:
        self.answers: list[Message] = []
        self.closed: str | None = None

    def reserve(self, num_bytes: int, deadline_s: float) -> Outgoing:
        return Outgoing(num_bytes)

    def send(self, message: Message, payload: Any = None, **options: Any) -> int:
        self.answers.append(message)
        return 0

    def close(self, words: str) -> None:
        self.closed = words


class Parent:
    """Sends commands to handlers, and has their answers."""

    def __init__(self, sizes: Any, *handlers: object) -> None:
        self.channel = FakeChannel()
        self.dispatcher = Dispatcher(self.channel)  # type: ignore[arg-type]
        self.dispatcher.sizes = sizes
        for each in handlers:
            self.dispatcher.handlers |= handlers_of(each)

    def send(self, command: Message, tensors: Sequence[Tensor] = ()) -> list[Message]:
        """Have it run. Returns the answers; raises ChannelClosed if it is refused."""
        payload = SentPayload(content_of(tensors)) if tensors else None
        self.channel.answers.clear()
        self.dispatcher.dispatch(Received(command, payload, 1, 0))
        return self.channel.answers


def content_of(tensors: Sequence[Tensor]) -> bytes:
    """The bytes of a payload."""
    room = Outgoing(payload_bytes(specs_of(tensors)))
    put(room, [torch.as_tensor(tensor) for tensor in tensors])
    return bytes(room.view)
