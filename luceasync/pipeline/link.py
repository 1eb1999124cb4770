"""Calls to one backend's process: messages with tensors, each within its deadline.

Owns the words of a failure: what the channel says, and the last lines of the process. Knows no
verb of a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from luceasync.errors import ChannelClosed, GroupFailed, LuceasyncError
from luceasync.ipc.channel import Payload, Received, Started, Traffic
from luceasync.ipc.packets import Message
from luceasync.pipeline.crossing import put, specs_of, take
from luceasync.pipeline.sizes import Spec, payload_bytes
from luceasync.pipeline.wire import Done

A = TypeVar("A", bound=Message)

# Of a call. The first pass of a GPU compiles kernels; a chunk of a large model on a CPU takes long.
CALL_S = 300.0
PING_S = 30.0  # of a sign of life: it may still run what nobody waits for, a chunk at the most
END_S = 10.0


class Link:
    """One process that was started, and is owned from now on. All methods raise GroupFailed."""

    def __init__(self, started: Started[Any], number: int) -> None:
        """`number`: of the group in the chain."""
        self._started = started
        self._channel = started.channel
        self._number = number
        self.call_s = CALL_S  # the deadline of each call

    @property
    def traffic(self) -> Traffic:
        """What has crossed so far."""
        return self._channel.traffic

    def tell(self, message: Message, tensors: Sequence[Tensor] = ()) -> int:
        """Send it; the number that answers to it name."""
        with self._door():
            if not tensors:
                return self._channel.send(message, deadline_s=self.call_s)
            room = self._channel.reserve(payload_bytes(specs_of(tensors)), self.call_s)
            put(room, tensors)
            return self._channel.send(message, room, deadline_s=self.call_s)

    def forward(self, message: Message, payload: Payload) -> int:
        """Send it with what another process has given."""
        with self._door():
            return self._channel.forward(message, payload, deadline_s=self.call_s)

    def answer(self, number: int, kind: type[A]) -> Received[A]:
        """The answer to a message."""
        with self._door():
            return self._channel.answer(number, kind, self.call_s)

    def ask(self, message: Message, kind: type[A], tensors: Sequence[Tensor] = ()) -> A:
        """Send it, and wait for an answer without a payload."""
        return self.answer(self.tell(message, tensors), kind).message

    def fetch(
        self, message: Message, specs: Sequence[Spec], tensors: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Send it, and wait for tensors, on the host."""
        return self.tensors(self.tell(message, tensors), specs)

    def tensors(self, number: int, specs: Sequence[Spec]) -> list[Tensor]:
        """Those that answer a message, on the host."""
        payload = self.payload(number)
        with self._door():
            return take(payload, specs)

    def said(self, number: int, kind: type[A], specs: Sequence[Spec]) -> tuple[A, list[Tensor]]:
        """What answers a message, and the tensors with it, on the host."""
        got = self.answer(number, kind)
        if got.payload is None:
            self.fail("it answered without what it was asked for")
        with self._door():
            return got.message, take(got.payload, specs)

    def payload(self, number: int) -> Payload:
        """What answers a message, where it lies; whoever asks frees it."""
        got = self.answer(number, Done)
        if got.payload is None:
            self.fail("it answered without what it was asked for")
        payload: Payload = got.payload
        return payload

    def view(self, payload: Payload, spec: Spec) -> memoryview:
        """The bytes of a payload, of exactly this size, until it is freed."""
        with self._door():
            return payload.view(payload_bytes([spec]))

    def receive(self, deadline_s: float) -> Message:
        """The next message that nobody asked for."""
        with self._door():
            message: Message = self._channel.receive(deadline_s).message
            return message

    def probe(self) -> None:
        """Raise if the process, which has nothing to do, has ended or gives no sign of life."""
        with self._door():
            self._channel.ping(PING_S)

    def fail(self, words: str) -> NoReturn:
        """Close the channel, and say why."""
        self._channel.close(words)
        raise self.failure(words)

    def failure(self, words: str) -> LuceasyncError:
        """What all methods raise."""
        return GroupFailed(self._number, f"{words}; {self._started.last_words()}")

    def close(self) -> None:
        """End the process, which is given no time: it holds nothing that is missed. Idempotent."""
        self._started.end(0.0, END_S)

    @contextmanager
    def _door(self) -> Iterator[None]:
        try:
            yield
        except ChannelClosed as error:
            raise self.failure(str(error)) from None
