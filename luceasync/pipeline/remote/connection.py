"""Calls to one backend process: commands with tensors, each within its deadline.

Owns what is sent later, and the words of a failure: why the channel closed, and the last lines of
the process. After a failure another process may take its place. Knows no verb.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from luceasync.errors import ChannelClosed, LuceasyncError
from luceasync.ipc.channel import OutgoingPayload, Payload, Received, Traffic
from luceasync.ipc.packets import Message
from luceasync.ipc.supervised import CallKind, ProcessLife
from luceasync.pipeline.platform import Event
from luceasync.pipeline.remote.answers import Result
from luceasync.pipeline.remote.tensors import Spec, payload_bytes, put, put_soon, specs_of, take
from luceasync.pipeline.remote.wire import Command

A = TypeVar("A", bound=Message)

SEND_S = 300.0  # the process takes a command after it has done all earlier ones
PING_S = 30.0  # it may still run what was not waited for: one prefill chunk at most
END_S = 10.0


@dataclass(frozen=True, slots=True)
class _Unsent:
    """A command, and the payload that a device copies until `is_copied`."""

    command: Command
    room: OutgoingPayload | None = None
    is_copied: Event | None = None


class BackendConnection:
    """One process that was started, and is owned from now on.

    All methods raise `failure(words)` once the process is gone or not to be believed.
    """

    def __init__(
        self, life: ProcessLife, sizes: Any, failure: Callable[[str], LuceasyncError]
    ) -> None:
        """`sizes` are what commands compute payloads from: StageSizes or DraftSizes."""
        self._sizes = sizes
        self._failure = failure
        self._unsent: deque[_Unsent] = deque()
        self.continue_with(life)

    def continue_with(self, life: ProcessLife) -> None:
        """Let another process take the place of one that has ended. It knows nothing of what was
        said so far.
        """
        self._discard_unsent()
        self.life, self._deadlines = life, life.deadlines
        self._started, self._channel = life.started, life.started.channel

    @property
    def is_open(self) -> bool:
        """Whether the process lives and obeys, as far as is known."""
        return self.life.is_well

    @property
    def traffic(self) -> Traffic:
        """What has crossed so far."""
        return self._channel.traffic

    # --- commands ---------------------------------------------------------------------------------

    def send(self, command: Command, tensors: Sequence[Tensor] = ()) -> int:
        """Send it. Returns the number that its answers name."""
        with self._errors():
            self._send_unsent()
            if not tensors:
                return self._channel.send(command, deadline_s=SEND_S)
            room = self._channel.reserve(payload_bytes(specs_of(tensors)), SEND_S)
            put(room, tensors)
            return self._channel.send(command, room, deadline_s=SEND_S)

    def send_soon(self, command: Command, tensor: Tensor | None = None) -> None:
        """Send a command that has no answer, in its turn, once a device has copied the tensor to
        the host; the copy is not waited for. At the latest it is sent with the next tensor, or
        before a command that is answered.
        """
        with self._errors():
            if tensor is not None:
                self._send_unsent()
                room = self._channel.reserve(payload_bytes(specs_of([tensor])), SEND_S)
                self._unsent.append(_Unsent(command, room, put_soon(room, tensor)))
            else:
                self._unsent.append(_Unsent(command))
            first = self._unsent[0].is_copied
            if first is None or first.query():
                self._send_unsent()

    def send_if_open(self, command: Command) -> None:
        """Send a command that a process which is gone need not hear."""
        if self.is_open:
            with suppress(LuceasyncError):  # the next call raises it
                self.send_soon(command)

    def forward(self, command: Command, payload: Payload) -> int:
        """Send a command with a payload of another process."""
        with self._errors():
            self._send_unsent()
            return self._channel.forward(command, payload, deadline_s=SEND_S)

    def call(self, command: Command, tensors: Sequence[Tensor] = ()) -> list[Tensor]:
        """Send it, and wait for what it returns."""
        number = self.send(command, tensors)
        return self.result(number, command.returns(self._sizes), command.call_kind)

    def ask(self, command: Command, answer: type[A]) -> A:
        """Send it, and wait for an answer without a payload."""
        return self.answer(self.send(command), answer, command.call_kind).message

    # --- answers ----------------------------------------------------------------------------------

    def answer(self, number: int, kind: type[A], call: CallKind) -> Received[A]:
        """Wait for the answer to a command, as long as such calls may take."""
        began_s = time.monotonic()
        with self._errors():
            got = self._channel.answer(number, kind, self._deadlines.deadline_s(call))
        self._deadlines.took(call, time.monotonic() - began_s)
        return got

    def answer_with(
        self, number: int, kind: type[A], specs: Sequence[Spec], call: CallKind
    ) -> tuple[A, list[Tensor]]:
        """Wait for the answer to a command, and copy its tensors to the host."""
        got = self.answer(number, kind, call)
        if got.payload is None:
            if specs:
                self.fail("it answered without what it was asked for")
            return got.message, []
        with self._errors():
            return got.message, take(got.payload, specs)

    def result(self, number: int, specs: Sequence[Spec], call: CallKind) -> list[Tensor]:
        """Wait for the tensors that a command returns, which are copied to the host."""
        return self.answer_with(number, Result, specs, call)[1]

    def payload(self, number: int, spec: Spec, call: CallKind) -> tuple[Payload, memoryview]:
        """Wait for a tensor that a command returns, which stays where it lies until the caller
        frees it.
        """
        got = self.answer(number, Result, call)
        if got.payload is None:
            self.fail("it answered without what it was asked for")
        payload: Payload = got.payload
        with self._errors():
            return payload, payload.view(payload_bytes([spec]))

    def receive(self, deadline_s: float) -> Message:
        """The next message that answers no command."""
        with self._errors():
            message: Message = self._channel.receive(deadline_s).message
            return message

    def expect(self, ticket: int, call: Callable[[bool], None]) -> None:
        """Call when the process completes the ticket, or has ended; see
        luceasync.ipc.channel.StartedProcess.
        """
        self._started.expect(ticket, call)

    # --- the process ------------------------------------------------------------------------------

    def raise_if_failed(self) -> None:
        """Raise if the process is known to be gone."""
        if not self.is_open:
            raise self.failure(self._channel.closed or "the process has ended")

    def check_alive(self) -> None:
        """Raise if the process, which has nothing to do, has ended or gives no sign of life."""
        with self._errors():
            self._send_unsent()
            self._channel.ping(PING_S)

    def fail(self, words: str) -> NoReturn:
        """Close the channel, and raise why."""
        self._channel.close(words)
        raise self.failure(words)

    def failure(self, words: str) -> LuceasyncError:
        """The error that all methods raise."""
        return self._failure(f"{words}; {self._started.last_words()}")

    def last_words(self) -> str:
        """Why the channel is closed, if it is, how the process ended, and its last lines."""
        closed = self._channel.closed
        return f"{closed}; {self._started.last_words()}" if closed else self._started.last_words()

    def close(self) -> None:
        """Kill the process, which holds nothing that is missed. Idempotent."""
        self._discard_unsent()
        self._started.end(0.0, END_S)

    def _send_unsent(self) -> None:
        while self._unsent:
            unsent = self._unsent.popleft()
            if unsent.is_copied is not None:
                unsent.is_copied.synchronize()
            self._channel.send(unsent.command, unsent.room, deadline_s=SEND_S)

    def _discard_unsent(self) -> None:
        """Wait for devices that still write to the payloads, and send nothing."""
        while self._unsent:
            if (is_copied := self._unsent.popleft().is_copied) is not None:
                is_copied.synchronize()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except ChannelClosed as error:
            raise self.failure(str(error)) from None
