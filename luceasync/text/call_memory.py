"""What a model wrote as arguments of its calls, by the ids of the calls.

Clients read arguments and write them again, with other spaces; a prompt that holds them as the
model wrote them begins with tokens that were computed. Owns which are remembered. Any thread may
call it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from luceasync.request import ArgumentsPiece, CallPiece, Piece
from luceasync.text.answer.pieces import PieceMaker

MAX_CHARS_HELD = 4 << 20


class CallMemory:
    """The calls of one tenant. Beyond `max_chars_held` characters the oldest are forgotten."""

    def __init__(self, max_chars_held: int = MAX_CHARS_HELD) -> None:
        self._max_chars_held = max_chars_held
        self._lock = threading.Lock()
        self._written: OrderedDict[str, str] = OrderedDict()
        self._num_chars = 0

    def note(self, call_id: str, arguments: str) -> None:
        """`arguments` were written, whole, in the call `call_id`."""
        with self._lock:
            self._num_chars += len(arguments) - len(self._written.pop(call_id, ""))
            self._written[call_id] = arguments
            while self._num_chars > self._max_chars_held:
                self._num_chars -= len(self._written.popitem(last=False)[1])

    def recall(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages with arguments as they were written, where they say the same."""
        return [self._message(message) for message in messages]

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        calls = message.get("tool_calls")
        if not self._written or not isinstance(calls, list):
            return message
        return {**message, "tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: Any) -> Any:
        match call:
            case {"id": str(call_id), "function": {"arguments": str(given)}}:
                with self._lock:
                    written = self._written.get(call_id)
                if written is not None and written != given and _say_same(written, given):
                    return {**call, "function": {**call["function"], "arguments": written}}
        return call


class NotedCalls:
    """A PieceMaker that has the calls of an answer remembered, each when it is whole."""

    def __init__(self, maker: PieceMaker, memory: CallMemory) -> None:
        self._maker = maker
        self._memory = memory
        self._id: str | None = None
        self._arguments: list[str] = []

    def make(self, text: str, *, is_last: bool, is_cut: bool = False) -> tuple[Piece, ...]:
        """See PieceMaker."""
        pieces = self._maker.make(text, is_last=is_last, is_cut=is_cut)
        for piece in pieces:
            match piece:
                case CallPiece(_, call_id, _):
                    self._note()
                    self._id = call_id
                case ArgumentsPiece(_, written):
                    self._arguments.append(written)
        if is_last:
            self._note()
        return pieces

    def _note(self) -> None:
        if self._id is not None:
            self._memory.note(self._id, "".join(self._arguments))
            self._id = None
            self._arguments.clear()


def _say_same(one: str, other: str) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return False


# Calls of tools in a chat's history, in the form in which templates want them. Owns how a
# call's arguments are read. Knows no template and no API.


class Arguments(dict[str, Any]):
    """The arguments of a call by name; where a template writes them as text, or as JSON, they are
    `text`: the JSON that they were read from, which is what the model wrote, to the space.

    Some templates name arguments one by one, others put them between other texts: `+`, `~` and
    `{{ }}` must not write Python's form of a dict.
    """

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: str) -> str:
        return self.text + other

    def __radd__(self, other: str) -> str:
        return other + self.text


def with_parsed_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the arguments of calls as Arguments, where they are an object or the JSON
    of one; a message without such calls is the same object. Nothing that was given is changed.

    Clients send arguments as text; templates that name them one by one want a mapping.
    """
    return [_read_message(message) for message in messages]


def _read_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    read = [_read_call(call) for call in calls]
    is_same = all(new is old for new, old in zip(read, calls, strict=True))
    return message if is_same else {**message, "tool_calls": read}


def _read_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    given = function.get("arguments") if isinstance(function, Mapping) else None
    read = _read(given)
    if function is None or read is None:
        return call
    return {**call, "function": {**function, "arguments": read}}


def _read(given: Any) -> Arguments | None:
    """None for what is no object, or has been read."""
    try:
        if isinstance(given, Mapping) and not isinstance(given, Arguments):
            return Arguments(given, json.dumps(given, ensure_ascii=False))
        values = json.loads(given) if isinstance(given, str) else None
    except (ValueError, TypeError, RecursionError):  # not JSON, or nested too deeply to be read
        return None
    return Arguments(values, given) if isinstance(values, dict) else None
