"""Tool calls in a conversation, in a form that any chat template takes.

Models write calls that break off, and clients send them back as they are. Owns what becomes of
their arguments. Knows no format of calls.
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
# Which ids of calls a template takes: any; nine letters or digits, as Mistral's; or those that name
# the function, which it shows in no other way, as Kimi's.
CallIds = Literal["any", "short", "named"]


class Arguments(dict[str, Any]):
    """The arguments of a call by name. As text, or as JSON, they are `text`: the JSON they were
    parsed from, as the model wrote it to the space.

    Some templates list arguments one by one, others insert them into text: `+`, `~` and `{{ }}`
    must not write a Python dict's repr.
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
    """The calls of a message: those with an object, and the text and id of each other one."""

    whole: list[Call]
    broken: list[tuple[str, str]]


def with_parsed_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, with call arguments that are an object, or the JSON of one, as Arguments. A
    message without such calls is the same object. Nothing is changed in place.

    Clients send arguments as text; templates that list them one by one want a mapping.
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
    """None for anything but an object, and for what is parsed already."""
    try:
        if isinstance(sent, Mapping) and not isinstance(sent, Arguments):
            return Arguments(sent, json.dumps(sent, ensure_ascii=False))
        values = json.loads(sent) if isinstance(sent, str) else None
    except (ValueError, TypeError, RecursionError):  # not JSON, or nested too deeply
        return None
    return Arguments(values, sent) if isinstance(values, dict) else None


def with_whole_calls(messages: Sequence[Message], *, keep_broken: bool = False) -> list[Message]:
    """The messages with parsed arguments; empty ones and null are {}, and no calls are no field.

    A call whose arguments are no object becomes text of its message, and its result a user's
    message; `keep_broken`: it stays a call, for templates that insert arguments as they are.
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
    """The messages with ids of calls as the template takes them, the same for calls and results."""
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
    """Nine letters or digits for `call_id`, which stays if it consists of as many."""
    if len(call_id) == SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    digest = blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return digest[:SHORT_ID_CHARS]


def as_texts(messages: Sequence[Message], *, keep_results: bool = False) -> Iterator[Message]:
    """The messages as text alone: calls become text of the model, results text of the user unless
    they are kept. Answers that say nothing are left out.
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
    """The messages with one call each: a message with several becomes as many, each followed by
    the results of its call.
    """
    waiting: list[Message] = []  # calls whose results are still to come
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
    """The message with its first call, and one for each other call."""
    calls = message.get("tool_calls") or ()
    if len(calls) < 2:
        return [message]
    first, *others = ([call] for call in calls)
    said = {"role": message["role"], "content": ""}
    return [{**message, "tool_calls": first}, *({**said, "tool_calls": each} for each in others)]


def _each_with_results(calls: Sequence[Message], results: list[Message]) -> Iterator[Message]:
    """The messages with a call, each before the results of its id; the others come last."""
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
    """Results of calls first, since templates want them together."""
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
    """Some clients put the name into the call itself."""
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
    """The arguments of a call that was sent as text or as an object; None for what is no object."""
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
    """The values with U+FFFD for halves of surrogate pairs, which JSON can escape."""
    units = _json(values).encode("utf-16-le", "surrogatepass")
    cleaned: dict[str, Any] = json.loads(units.decode("utf-16-le", "replace"))
    return cleaned
