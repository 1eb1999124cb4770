"""Which tools an answer must call, as OpenAI's endpoints say it.

Owns the words. How calls are forced is for the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from luceasync.server.checks import refuse

ToolChoice = str | dict[str, Any] | None
EXPECTED = "'none', 'auto', 'required', or one of the tools: {'type': 'function', ...}"


def must_call(choice: ToolChoice, tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The names of the `tools` of which calls must come, none where none must. Raises RequestError
    for a choice that is none, and for a tool that is not there.
    """
    if choice in (None, "none", "auto"):
        return ()
    names = tuple(tool["function"]["name"] for tool in tools)
    if choice == "required":
        return names or refuse("tool_choice", choice, "'tools' beside it")
    if not isinstance(choice, dict) or choice.get("type") != "function":
        refuse("tool_choice", choice, EXPECTED)
    function = choice.get("function", choice)  # the Responses API has the name beside the type
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        refuse("tool_choice", choice, "one of 'tools' by its name")
    return (str(name),)


def max_calls(choice: ToolChoice, parallel: bool | None) -> int | None:
    """How many calls may come: one of a tool that is named, or where there may not be more."""
    return 1 if parallel is False or isinstance(choice, dict) else None
