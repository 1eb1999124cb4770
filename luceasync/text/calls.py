"""Calls of tools in a chat's history, in the form in which templates want them.

Owns how a call's arguments are read. Knows no template and no API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


class Arguments(dict[str, Any]):
    """The arguments of a call by name; `text` is the JSON that they were read from.

    A template that writes them as JSON gets that text: it is what the model wrote, to the space.
    """

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text


def with_parsed_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the arguments of calls as objects, where they are the JSON of one; a
    message without such calls is the same object. Nothing that was given is changed.

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
    text = function.get("arguments") if isinstance(function, Mapping) else None
    if function is None or not isinstance(text, str):
        return call
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, or nested too deeply to be read
        return call
    if not isinstance(values, dict):
        return call
    return {**call, "function": {**function, "arguments": Arguments(values, text)}}
