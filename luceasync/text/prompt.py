"""A prompt in the model's tokens, the tenant that sent it, and the tool calls in its history.

Clients parse the arguments of calls and serialise them again with different whitespace. Restoring
the model's original text lets a prompt begin with tokens whose state was computed before.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from luceasync.request import ArgumentsPiece, CallPiece, Piece
from luceasync.text.answer.pieces import Before, PieceMaker, PlainText
from luceasync.text.history import History
from luceasync.text.shared_prefix import ReplayCheck

MAX_CHARS_HELD = 4 << 20


class PastCall(NamedTuple):
    """A call whose id is not known, with its arguments as the model wrote them."""

    name: str
    arguments: str


class _Noted(NamedTuple):
    """The arguments and the id of a call, as the model wrote them; "" for no id."""

    arguments: str
    own_id: str


class CallMemory:
    """The calls of one tenant by id, and calls of earlier runs by their content; beyond
    `max_chars_held` characters the oldest are dropped. Thread-safe.
    """

    def __init__(self, max_chars_held: int = MAX_CHARS_HELD) -> None:
        self._max_chars_held = max_chars_held
        self._lock = threading.Lock()
        self._written: OrderedDict[str, _Noted] = OrderedDict()
        self._num_chars = 0

    def note(self, call_id: str, arguments: str, own_id: str = "") -> None:
        """Remember the complete `arguments` of the call `call_id`, and the id that the model has
        given it.
        """
        self._hold(call_id, _Noted(arguments, own_id))

    def relearn(self, calls: Iterable[PastCall]) -> None:
        """Remember calls of an earlier run. Of calls with the same content, the last one counts."""
        for name, arguments in calls:
            said = _said(name, arguments)
            if said is not None:
                self._hold(said, _Noted(arguments, ""))

    def _hold(self, key: str, noted: _Noted) -> None:
        with self._lock:
            before = self._written.pop(key, _Noted("", ""))
            self._num_chars += len("".join(noted)) - len("".join(before))
            self._written[key] = noted
            while self._num_chars > self._max_chars_held:
                self._num_chars -= len("".join(self._written.popitem(last=False)[1]))

    def recall(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages, with arguments as the model wrote them wherever they are equal as JSON, and
        with the model's own ids of calls, except for those that it has given to several.
        """
        own_ids: dict[str, str] = {}  # by those that clients know
        recalled = [self._message(message, own_ids) for message in messages]
        return [_with_own_id(message, own_ids) for message in recalled] if own_ids else recalled

    def _message(self, message: Mapping[str, Any], own_ids: dict[str, str]) -> Mapping[str, Any]:
        calls = message.get("tool_calls")
        if not self._written or not isinstance(calls, list):
            return message
        return {**message, "tool_calls": [self._call(call, own_ids) for call in calls]}

    def _call(self, call: Any, own_ids: dict[str, str]) -> Any:
        match call:
            case {"id": str(call_id), "function": {"arguments": str(sent)} as function}:
                noted = self._of(call_id) or self._of(_said(function.get("name"), sent))
                if noted is None or not _are_equal_json(noted.arguments, sent):
                    return call
                if noted.own_id and noted.own_id not in own_ids.values():
                    own_ids[call_id] = noted.own_id
                own_id = own_ids.get(call_id, call_id)
                return {
                    **call,
                    "id": own_id,
                    "function": {**function, "arguments": noted.arguments},
                }
        return call

    def _of(self, key: str | None) -> _Noted | None:
        with self._lock:
            return None if key is None else self._written.get(key)


class CallRecorder:
    """A PieceMaker that adds the calls of an answer to a CallMemory, each once it is complete."""

    def __init__(self, maker: PieceMaker, memory: CallMemory) -> None:
        self._maker = maker
        self._memory = memory
        self._id: str | None = None
        self._own_id = ""
        self._arguments: list[str] = []

    def make(self, text: str, *, is_last: bool) -> tuple[Piece, ...]:
        pieces = self._maker.make(text, is_last=is_last)
        for piece in pieces:
            match piece:
                case CallPiece(_, call_id, _, own_id):
                    self._record()
                    self._id, self._own_id = call_id, own_id
                case ArgumentsPiece(_, written):
                    self._arguments.append(written)
        if is_last:
            self._record()
        return pieces

    def _record(self) -> None:
        if self._id is not None:
            self._memory.note(self._id, "".join(self._arguments), self._own_id)
            self._id = None
            self._arguments.clear()


def _with_own_id(message: Mapping[str, Any], own_ids: Mapping[str, str]) -> Mapping[str, Any]:
    own_id = own_ids.get(str(message.get("tool_call_id")))
    return message if own_id is None else {**message, "tool_call_id": own_id}


def _said(name: Any, arguments: str) -> str | None:
    """A key for the content of a call, however it is written, that is distinct from all ids of
    calls.
    """
    try:
        return json.dumps([name, json.loads(arguments)], sort_keys=True)
    except (ValueError, RecursionError):
        return None


def _are_equal_json(one: str, other: str) -> bool:
    try:
        return one == other or bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return False


@dataclass(frozen=True, slots=True)
class Tenant:
    """Clients that share cached prefixes, and the texts and calls generated for them.

    `key` is the hash key of their nodes, 32 bytes.
    """

    key: bytes = field(repr=False)
    history: History
    calls: CallMemory = field(default_factory=CallMemory, repr=False)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The prompt of one request as token ids.

    `text` is the rendered text, under which the answer is remembered; None if the prompt came as
    ids or is only to be cached. `boundaries` are the ends of turns.
    `answer_returns(generated_ids)`: whether a later prompt may begin with this one and that answer.
    `tools_end` is where prompts with the same tools and another system message diverge.
    `new_pieces` makes the parser of an answer. `before` is the kind of reasoning before the text of
    an answer. `marks` are the numbers of tokens before each cache mark of the client. `ends` are
    tokens that end the answer, in addition to those that end a text. `num_left_out` is the number
    of files that did not fit. `has_unknown_answers`: the prompt may contain answers whose ids are
    not in the history, since another server may have generated them.
    """

    tenant: Tenant
    text: str | None
    ids: array[int]
    boundaries: tuple[int, ...]
    answer_returns: ReplayCheck = field(default_factory=ReplayCheck.always)
    tools_end: int | None = None
    new_pieces: Callable[[], PieceMaker] = PlainText
    before: Before = "nothing"
    marks: tuple[int, ...] = ()
    ends: frozenset[int] = frozenset()
    num_left_out: int = 0
    has_unknown_answers: bool = False
