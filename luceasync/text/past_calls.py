"""Tool calls in a conversation, in a form that any chat template accepts.

Models write calls that break off, and clients send them back unchanged. Owns how their arguments
are converted. Independent of call formats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any, Literal, NamedTuple

Message = Mapping[str, Any]
Call = Mapping[str, Any]

SEPARATOR = "\n\n"  # between a message's text and a call, and between the texts of two calls
SHORT_ID_CHARS = 9
# The ids of calls that a template accepts: any; nine letters or digits, as in Mistral's; or ids
# that contain the name of the function, which the template shows in no other way, as in Kimi's.
CallIds = Literal["any", "short", "named"]


class Arguments(dict[str, Any]):
    """The arguments of a call by name. As text and as JSON they are `text`, the JSON that they were
    parsed from, exactly as the model wrote it.

    Some templates list arguments one by one, others insert them into text: `+`, `~` and `{{ }}`
    must not write the repr of a Python dict.
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


NOTHING = Arguments({}, "{}")


class _ReadCalls(NamedTuple):
    """The calls of a message: those whose arguments are an object, and the text and id of the
    others.
    """

    whole: list[Call]
    broken: list[tuple[str, str]]


def with_parsed_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, with call arguments that are an object, or the JSON of one, as Arguments.
    Messages without such calls are returned as they are. Nothing is changed in place.

    Clients send arguments as text; templates that list them one by one require a mapping.
    """
    return [_with_parsed_calls(message) for message in messages]


def _with_parsed_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    parsed = [_with_parsed_call(call) for call in calls]
    is_same = all(new is old for new, old in zip(parsed, calls, strict=True))
    return message if is_same else {**message, "tool_calls": parsed}


def _with_parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    sent = function.get("arguments") if isinstance(function, Mapping) else None
    arguments = _parsed(sent)
    if function is None or arguments is None:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(sent: Any) -> Arguments | None:
    """The parsed arguments; None for anything but an object, and for Arguments."""
    try:
        if isinstance(sent, Mapping) and not isinstance(sent, Arguments):
            return Arguments(sent, json.dumps(sent, ensure_ascii=False))
        values = json.loads(sent) if isinstance(sent, str) else None
    except (ValueError, TypeError, RecursionError):  # not JSON, or nested too deeply
        return None
    return Arguments(values, sent) if isinstance(values, dict) else None


def with_whole_calls(messages: Sequence[Message], *, keep_broken: bool = False) -> list[Message]:
    """The messages with parsed arguments; empty ones and null become {}, and an empty list of calls
    is removed.

    A call whose arguments are not an object becomes text of its message, and its result a user's
    message. `keep_broken`: it stays a call, for templates that insert arguments unchanged.
    """
    fitted: list[Message] = []
    broken: set[str] = set()  # ids of calls that have become text
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            fitted += _results(list(group), broken)
            continue
        for message in group:
            if "tool_calls" not in message:
                fitted.append(message)
                continue
            calls = _read(message["tool_calls"] or (), keep_broken=keep_broken)
            broken = {call_id for _, call_id in calls.broken}
            fitted.append(_with_calls(message, calls))
    return fitted


def with_ids(messages: Sequence[Message], ids: CallIds) -> list[Message]:
    """The messages with ids of calls in the form that the template accepts, consistent between
    calls and results.
    """
    known: dict[str, str] = {}
    fitted: list[Message] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                old, name = str(call.get("id")), str(_function(call).get("name"))
                known[old] = f"functions.{name}:{len(known)}" if ids == "named" else short_id(old)
                calls.append({**call, "id": known[old]})
            message = {**message, "tool_calls": calls}
        elif "tool_call_id" in message:
            old = str(message["tool_call_id"])
            message = {**message, "tool_call_id": known.get(old) or short_id(old)}
        fitted.append(message)
    return fitted


def short_id(call_id: str) -> str:
    """Nine letters or digits for `call_id`, which is kept if it already consists of nine."""
    if len(call_id) == SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    digest = blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return digest[:SHORT_ID_CHARS]


def as_texts(messages: Sequence[Message], *, keep_results: bool = False) -> Iterator[Message]:
    """The messages as text only: calls become text of the model, results text of the user unless
    they are kept. Answers without text are left out.
    """
    for message in messages:
        if message["role"] == "tool":
            yield message if keep_results else _as_user(message)
            continue
        if "tool_calls" in message:
            texts = [(call_text(call), "") for call in message["tool_calls"] or ()]
            message = _with_calls(message, _ReadCalls([], texts))
        if message["role"] != "assistant" or message.get("content"):
            yield message


def one_by_one(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages with at most one call each: a message with several calls becomes several
    messages, each followed by the results of its call.
    """
    waiting: list[Message] = []  # calls whose results have not come yet
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            yield from _each_with_results(waiting, list(group))
            waiting = []
            continue
        for message in group:
            yield from waiting
            waiting = _split(message)
    yield from waiting


def _split(message: Message) -> list[Message]:
    """The message with its first call, followed by a message for each other call."""
    calls = message.get("tool_calls") or ()
    if len(calls) < 2:
        return [message]
    first, *others = ([call] for call in calls)
    said = {"role": message["role"], "content": ""}
    return [{**message, "tool_calls": first}, *({**said, "tool_calls": each} for each in others)]


def _each_with_results(calls: Sequence[Message], results: list[Message]) -> Iterator[Message]:
    """The messages with a call, each followed by the results with its id; other results
    come last.
    """
    for i, message in enumerate(calls):
        yield message
        called = {call.get("id") for call in message.get("tool_calls") or ()}
        is_last = i == len(calls) - 1
        yield from (r for r in results if is_last or r.get("tool_call_id") in called)
        results = [r for r in results if r.get("tool_call_id") not in called]


def call_text(call: Call) -> str:
    """A call as text, with its arguments as they were sent."""
    function = _function(call)
    sent = function.get("arguments")
    arguments = str(sent) if isinstance(sent, str | Arguments) else _json(sent)
    name = json.dumps(function.get("name"), ensure_ascii=False)
    return f'{{"name": {name}, "arguments": {arguments}}}'


def _results(results: Sequence[Message], broken: set[str]) -> Iterator[Message]:
    """Messages in which results of calls come first, since templates expect them together."""
    yield from (each for each in results if each.get("tool_call_id") not in broken)
    yield from (_as_user(each) for each in results if each.get("tool_call_id") in broken)


def as_users(message: Message) -> Message:
    """The message; a result of a call as a user's."""
    return _as_user(message) if message["role"] == "tool" else message


def _as_user(message: Message) -> Message:
    return {"role": "user", "content": message.get("content") or ""}


def _read(calls: Sequence[Call], *, keep_broken: bool) -> _ReadCalls:
    read = _ReadCalls([], [])
    for call in calls:
        function = _function(call)
        arguments = parsed_arguments(function.get("arguments"))
        if arguments is not None:
            whole = {**function, "arguments": arguments}
            read.whole.append(whole if function is call else {**call, "function": whole})
        elif keep_broken:
            read.whole.append(call)
        else:
            read.broken.append((call_text(call), str(call.get("id"))))
    return read


def _function(call: Call) -> Mapping[str, Any]:
    """The function of a call; some clients put its fields into the call itself."""
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def _with_calls(message: Message, calls: _ReadCalls) -> Message:
    fitted = {name: value for name, value in message.items() if name != "tool_calls"}
    if calls.whole:
        fitted["tool_calls"] = calls.whole
    if calls.broken:
        texts = [message.get("content") or "", *(text for text, _ in calls.broken)]
        fitted["content"] = SEPARATOR.join(filter(None, texts))
    return fitted


def parsed_arguments(sent: Any) -> Arguments | None:
    """The arguments of a call that was sent as text or as an object; None if they are not an
    object.
    """
    if isinstance(sent, Arguments):
        return sent
    if sent is None or (isinstance(sent, str) and not sent.strip()):
        return NOTHING
    try:
        values = json.loads(sent) if isinstance(sent, str) else sent
        if values is None:
            return NOTHING
        if not isinstance(values, Mapping):
            return None
        text = sent if isinstance(sent, str) else _json(sent)
        return Arguments(_unicode(values) if "\\u" in text else values, text)
    except (ValueError, TypeError, RecursionError):  # not JSON, or nested too deeply
        return None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _unicode(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with U+FFFD for lone surrogates, which JSON can escape."""
    units = _json(values).encode("utf-16-le", "surrogatepass")
    cleaned: dict[str, Any] = json.loads(units.decode("utf-16-le", "replace"))
    return cleaned
