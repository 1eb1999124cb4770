"""Runs the commands of the parent process, in order of arrival: checks each, runs it and answers
it.

Owns the channel, and decides when payloads are freed. Does not know any command. Every error ends
the process: the parent sees that at once, and has its last log lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from luceasync.errors import ChannelClosed, LuceasyncError
from luceasync.ipc.channel import Channel, Payload, Received
from luceasync.ipc.packets import Message, WireError
from luceasync.pipeline.platform import Event
from luceasync.pipeline.remote.answers import CommandFailure, LoadProgress, Result
from luceasync.pipeline.remote.tensors import Spec, lend, payload_bytes, put, specs_of, take
from luceasync.pipeline.remote.wire import Command

CALL_S = 300.0
POLL_S = 60.0
EVENT_POLL_S = 1e-3  # how often to check whether a device has read a payload
PROGRESS_BYTES = 32 << 20  # bytes of weights read, between two progress messages

C = TypeVar("C", bound=Command)

Answers = Iterable[tuple[Message, Sequence[Tensor]]]
Handler = Callable[[Any, list[Tensor]], Answers | None]
Method = Callable[[Any, C, list[Tensor]], Answers | None]


def handles(*commands: type[C]) -> Callable[[Method[C]], Method[C]]:
    """Mark the method that runs commands. It receives the command and its tensors, and returns or
    yields the answers, if there are any."""

    def mark(method: Method[C]) -> Method[C]:
        vars(method)["commands"] = commands
        return method

    return mark


def handlers_of(owner: object) -> dict[type[Command], Handler]:
    """The handlers among the methods of an object."""
    return {
        command: getattr(owner, name)
        for name, method in vars(type(owner)).items()
        for command in getattr(method, "commands", ())
    }


def result(*tensors: Tensor) -> Answers:
    """The answer to a finished command, with its return value."""
    return [(Result(), tensors)]


class Dispatcher:
    """Runs commands, each by its handler."""

    def __init__(self, channel: Channel[Any]) -> None:
        self.handlers: dict[type[Command], Handler] = {}
        self.sizes: Any = None  # sizes of payloads, once a model is loaded
        self._channel = channel
        self._in_place: Payload | None = None  # payload of the current command
        self._lent: deque[tuple[Event, Payload]] = deque()  # payloads that a device may still read

    def serve(self) -> NoReturn:
        """Run commands until the parent is gone, which raises ChannelClosed."""
        while True:
            if (got := self.next()) is not None:
                self.dispatch(got)

    def next(self) -> Received[Any] | None:
        """The next command, or None if none arrives for a while."""
        self._free_read()
        while self._lent and not self._channel.poll(EVENT_POLL_S):
            self._free_read()
        return self._channel.receive(CALL_S) if self._channel.poll(POLL_S) else None

    def dispatch(self, got: Received[Any]) -> None:
        """Run one command. A command that is not allowed closes the channel."""
        command = got.message
        handler = self.handlers.get(type(command))
        try:
            if handler is None:
                raise WireError(f"{type(command).__name__} came before a model was loaded")
            command.check(self.sizes)
            tensors = self.received(got, command.payload(self.sizes))
            for message, returned in handler(command, tensors) or ():
                self.answer(got, message, returned)
        except WireError as error:
            self._channel.close(str(error))
            raise ChannelClosed(str(error)) from None

    def received(self, got: Received[Any], specs: Sequence[Spec]) -> list[Tensor]:
        """The tensors of a command. Raises WireError if they differ from those that the command
        should have, and ChannelClosed."""
        name = type(got.message).__name__
        if got.payload is None:
            if specs:
                raise WireError(f"{name} came without its payload")
            return []
        if not specs:
            raise WireError(f"{name} came with a payload")
        if not got.message.is_read_in_place:
            return take(got.payload, specs)
        self._in_place = got.payload
        return lend(got.payload, specs)

    def free_after(self, event: Event) -> None:
        """Free the payload of the current command, which is read in place, once a device has
        reached the event."""
        assert self._in_place is not None
        self._lent.append((event, self._in_place))
        self._in_place = None

    def answer(self, got: Received[Any], message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """Answer a command, with tensors from any device."""
        room = None
        if tensors:
            room = self._channel.reserve(payload_bytes(specs_of(tensors)), CALL_S)
            put(room, tensors)
        while self._lent:  # after an answer the parent may reuse their memory
            event, payload = self._lent.popleft()
            if not event.query():
                event.synchronize()
            payload.free()
        self._channel.send(message, room, answers=got.number, deadline_s=CALL_S)

    def say(self, message: Message) -> None:
        """Send a message that is not the answer to a command."""
        self._channel.send(message, deadline_s=CALL_S)

    def load(self, load: Callable[[Callable[[int], None]], None]) -> None:
        """Load a model, and report the progress to the parent, and whether the model could be
        loaded. `load` receives a callback for the number of bytes read."""
        progress = _Progress(self)
        try:
            load(progress.advance)
        except torch.OutOfMemoryError as error:
            words = ". ".join(str(error).split(". ")[:3])
            self.say(CommandFailure(f"a device of a backend ran out of memory: {words}"))
        except ChannelClosed:
            raise
        except LuceasyncError as error:
            self.say(CommandFailure(str(error)))
        else:
            progress.tell()
            self.say(Result())

    def _free_read(self) -> None:
        while self._lent and self._lent[0][0].query():
            self._lent.popleft()[1].free()


class _Progress:
    """Reports how many bytes of weights were read, but not for every tensor."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._num_bytes = 0

    def advance(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes >= PROGRESS_BYTES:
            self.tell()

    def tell(self) -> None:
        self._dispatcher.say(LoadProgress(self._num_bytes))
        self._num_bytes = 0
