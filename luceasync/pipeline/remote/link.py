"""Calls to one backend's process: messages with tensors, each within its deadline.

Owns the words of a failure: what the channel says, and the last lines of the process. The process
may be another one after a failure. Knows no verb of a stage.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from torch import Tensor

from luceasync.errors import ChannelClosed, LuceasyncError, StageFailed
from luceasync.ipc.channel import Outgoing, Payload, Received, Traffic
from luceasync.ipc.packets import Message
from luceasync.ipc.supervised import Call, Life
from luceasync.pipeline.platform import Event
from luceasync.pipeline.remote.tensors import Spec, payload_bytes, put, put_soon, specs_of, take
from luceasync.pipeline.remote.wire import Done

A = TypeVar("A", bound=Message)

CALL_S = 300.0  # to take what it is told: before that it does all that it was told earlier
PING_S = 30.0  # of a sign of life: it may still run what nobody waits for, a chunk at the most
END_S = 10.0
OTHER = Call("other")


@dataclass(frozen=True, slots=True)
class _Unsent:
    """A message, and what a device still copies to its room until `is_there`."""

    message: Message
    room: Outgoing | None = None
    is_there: Event | None = None


class Link:
    """One process that was started, and is owned from now on. All methods raise StageFailed."""

    def __init__(self, life: Life, number: int) -> None:
        """`number`: of the stage in the chain."""
        self._number = number
        self._unsent: deque[_Unsent] = deque()
        self.go_on_with(life)

    def go_on_with(self, life: Life) -> None:
        """Another process takes the place of the one before, which has ended. It knows nothing of
        what was said so far.
        """
        self._forget_unsent()
        self._life, self._pace = life, life.pace
        self._started, self._channel = life.started, life.started.channel

    @property
    def is_open(self) -> bool:
        """Whether, as far as is known, the process lives and does what it is told."""
        return self._life.is_well

    @property
    def traffic(self) -> Traffic:
        """What has crossed so far."""
        return self._channel.traffic

    def tell(self, message: Message, tensors: Sequence[Tensor] = ()) -> int:
        """Send it; the number that answers to it name."""
        with self._door():
            self._send_unsent()
            if not tensors:
                return self._channel.send(message, deadline_s=CALL_S)
            room = self._channel.reserve(payload_bytes(specs_of(tensors)), CALL_S)
            put(room, tensors)
            return self._channel.send(message, room, deadline_s=CALL_S)

    def tell_soon(self, message: Message, tensor: Tensor | None = None) -> None:
        """Send what nobody answers, in its turn, once the tensor has come to the host: that may
        still be computed, and nobody waits for it. At the latest it is sent with the next tensor,
        or before anything that is answered.
        """
        with self._door():
            if tensor is not None:
                self._send_unsent()
                room = self._channel.reserve(payload_bytes(specs_of([tensor])), CALL_S)
                self._unsent.append(_Unsent(message, room, put_soon(room, tensor)))
            else:
                self._unsent.append(_Unsent(message))
            first = self._unsent[0].is_there
            if first is None or first.query():
                self._send_unsent()

    def forward(self, message: Message, payload: Payload) -> int:
        """Send it with what another process has given."""
        with self._door():
            self._send_unsent()
            return self._channel.forward(message, payload, deadline_s=CALL_S)

    def mention(self, message: Message) -> None:
        """Tell what a process that is gone need not hear."""
        if self.is_open:
            with suppress(StageFailed):  # the next call says so
                self.tell_soon(message)

    def answer(self, number: int, kind: type[A], call: Call = OTHER) -> Received[A]:
        """The answer to a message. `call`: what is waited for, whose like has taken its time."""
        began_s = time.monotonic()
        with self._door():
            got = self._channel.answer(number, kind, self._pace.deadline_s(call))
        self._pace.took(call, time.monotonic() - began_s)
        return got

    def ask(self, message: Message, kind: type[A], tensors: Sequence[Tensor] = ()) -> A:
        """Send it, and wait for an answer without a payload."""
        return self.answer(self.tell(message, tensors), kind, _call_of(message)).message

    def fetch(
        self, message: Message, specs: Sequence[Spec], tensors: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Send it, and wait for tensors, on the host."""
        return self.tensors(self.tell(message, tensors), specs, _call_of(message))

    def tensors(self, number: int, specs: Sequence[Spec], call: Call = OTHER) -> list[Tensor]:
        """Those that answer a message, on the host."""
        payload = self.payload(number, call)
        with self._door():
            return take(payload, specs)

    def said(
        self, number: int, kind: type[A], specs: Sequence[Spec], call: Call
    ) -> tuple[A, list[Tensor]]:
        """What answers a message, and the tensors with it, on the host."""
        got = self.answer(number, kind, call)
        if got.payload is None:
            self.fail("it answered without what it was asked for")
        with self._door():
            return got.message, take(got.payload, specs)

    def payload(self, number: int, call: Call = OTHER) -> Payload:
        """What answers a message, where it lies; whoever asks frees it."""
        got = self.answer(number, Done, call)
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

    def expect(self, number: int, call: Callable[[bool], None]) -> None:
        """See luceasync.ipc.channel.Started."""
        self._started.expect(number, call)

    def notice(self) -> None:
        """Raise if the process is known to be gone."""
        if not self.is_open:
            raise self.failure(self._channel.closed or "nobody is at the other end")

    def probe(self) -> None:
        """Raise if the process, which has nothing to do, has ended or gives no sign of life."""
        with self._door():
            self._send_unsent()
            self._channel.ping(PING_S)

    def fail(self, words: str) -> NoReturn:
        """Close the channel, and say why."""
        self._channel.close(words)
        raise self.failure(words)

    def failure(self, words: str) -> LuceasyncError:
        """What all methods raise."""
        return StageFailed(self._number, f"{words}; {self._started.last_words()}")

    def last_words(self) -> str:
        """Why the channel is closed, if it is, how the process has ended, and its last lines."""
        closed = self._channel.closed
        return f"{closed}; {self._started.last_words()}" if closed else self._started.last_words()

    def close(self) -> None:
        """End the process, which is given no time: it holds nothing that is missed. Idempotent."""
        self._forget_unsent()
        self._started.end(0.0, END_S)

    def _send_unsent(self) -> None:
        """All of it, waited for."""
        while self._unsent:
            each = self._unsent.popleft()
            if each.is_there is not None:
                each.is_there.synchronize()
            self._channel.send(each.message, each.room, deadline_s=CALL_S)

    def _forget_unsent(self) -> None:
        """Nobody is to hear it; a device no longer writes to its room."""
        while self._unsent:
            if (is_there := self._unsent.popleft().is_there) is not None:
                is_there.synchronize()

    @contextmanager
    def _door(self) -> Iterator[None]:
        try:
            yield
        except ChannelClosed as error:
            raise self.failure(str(error)) from None


def _call_of(message: Message) -> Call:
    return Call(type(message).__name__)
