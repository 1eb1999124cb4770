"""The tools of a request and the calls of earlier turns, before a chat template is given them.

Owns what a tool and a call must have. A template would write a malformed one into the prompt, or
fail in words that name no field. Knows nothing of what a tool does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from luceasync.errors import RequestError
from luceasync.server.checks import check_arguments


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError, which names the field, unless all are functions with a name."""
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.get("type") != "function":
            _refuse(f"{where}.type", "'function' (no other kind is served)")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            _refuse(f"{where}.function", "an object")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            _refuse(f"{where}.function.name", "a name")
        if not isinstance(function.get("description", ""), str | None):
            _refuse(f"{where}.function.description", "text")
        if not isinstance(function.get("parameters"), Mapping | None):
            _refuse(f"{where}.function.parameters", "an object, which is a JSON schema")
        check_arguments(f"{where}.function.parameters", function.get("parameters") or {})
        if not isinstance(function.get("strict", False), bool | None):
            _refuse(f"{where}.function.strict", "true or false")


def check_calls(where: str, calls: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError, which names the field below `where`, unless all call something by name,
    with arguments as text or as an object.
    """
    for i, call in enumerate(calls):
        function = call.get("function")
        if function is None:
            function = call  # as some templates have it: the name stands in the call itself
        if not isinstance(function, Mapping):
            _refuse(f"{where}[{i}].function", "an object")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            _refuse(f"{where}[{i}].function.name", "a name")
        if not isinstance(function.get("arguments"), str | Mapping | None):
            _refuse(f"{where}[{i}].function.arguments", "text, or an object")


def _refuse(param: str, expected: str) -> NoReturn:
    """Without the value, which may be long."""
    raise RequestError(f"Invalid value for '{param}': expected {expected}.", param=param)
