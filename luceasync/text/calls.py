"""Calls of tools in a chat's history, in the form in which templates want them.

Owns how a call's arguments are read. Knows no template and no API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


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
