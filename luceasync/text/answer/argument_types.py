"""Converts tool arguments that a model writes without quotes, by the types in the tool's schema.

A text that fits no other type is a string: nothing is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

Schema = Mapping[str, Any]
Tool = Mapping[str, Any]

_SURROGATE = re.compile("[\ud800-\udfff]")
LITERALS = {"True": "true", "False": "false", "None": "null"}  # from models trained on Python


@dataclass(frozen=True, slots=True)
class ToolSchemas:
    """The JSON schemas of a request's tools, by tool name; {}: any arguments."""

    by_name: Mapping[str, Schema] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Iterable[Tool]) -> ToolSchemas:
        """The schemas of validated OpenAI tools: {"type": "function", "function": {...}}."""
        functions = [tool["function"] for tool in tools]
        return cls({each["name"]: each.get("parameters") or {} for each in functions})

    def value(self, tool: str, argument: str, text: str) -> Any:
        """The JSON value that `text` means as `argument` of `tool`."""
        root = self.by_name.get(tool, {})
        properties = root.get("properties")
        own = properties.get(argument) if isinstance(properties, Mapping) else None
        return _value(text, types_of(own, root))


def parsed_json(text: str, *, strict: bool = True) -> Any:
    """The JSON value of `text`; `strict` as for json.loads. Raises ValueError for what is no JSON,
    such as NaN, and RecursionError.
    """
    return json.loads(text, parse_constant=_refuse, strict=strict)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def json_text(value: Any) -> str:
    """The JSON of `value`, with what UTF-8 cannot carry escaped. Raises ValueError for a number
    that JSON has no text for.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if _SURROGATE.search(text) else text


def _value(text: str, types: frozenset[str]) -> Any:
    if not types or types == {"string"}:
        return text
    stripped = text.strip()
    try:
        value = parsed_json(LITERALS.get(stripped, stripped))
        json_text(value)
    except (ValueError, RecursionError):
        return text
    return value if types & _types_of(value) else text


def _types_of(value: Any) -> frozenset[str]:
    """The JSON schema types of `value`."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"} if value.is_integer() else {"number"})
        case list():
            return frozenset({"array"})
        case dict():
            return frozenset({"object"})
        case _:
            return frozenset()  # a quoted string stays as written


def types_of(schema: Any, root: Schema) -> frozenset[str]:
    """The types that `schema`, a part of `root`, allows; empty if it does not say. Each part is
    visited once, so references may be circular.
    """
    found: set[str] = set()
    stack, seen = [schema], {id(schema)}
    while stack:
        part = stack.pop()
        if not isinstance(part, Mapping):
            continue
        found |= _own_types(part)
        for inner in _parts(part, root):
            if id(inner) not in seen:
                seen.add(id(inner))
                stack.append(inner)
    return frozenset(found)


def _own_types(schema: Schema) -> set[str]:
    match schema.get("type"):
        case str(name):
            return {name}
        case list(names):
            return {name for name in names if isinstance(name, str)}
        case _:
            return _types_of_values(schema)


def _parts(schema: Schema, root: Schema) -> Iterator[Any]:
    """The schemas that `schema` combines or refers to."""
    for word in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(word)
        if isinstance(parts, list):
            yield from parts
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield _referred(reference, root)


def _types_of_values(schema: Schema) -> set[str]:
    """The types of the values listed by `enum` or `const`."""
    listed = schema.get("enum")
    values = list(listed) if isinstance(listed, list) else []
    if "const" in schema:
        values.append(schema["const"])
    found: set[str] = set()
    for value in values:
        found.update({"string"} if isinstance(value, str) else _types_of(value))
    return found


def _referred(reference: str, root: Schema) -> Any:
    """The schema at "#/$defs/name"; None if it is not in `root`."""
    if not reference.startswith("#/"):
        return None
    found: Any = root
    for word in reference[2:].split("/"):
        found = (
            found.get(word.replace("~1", "/").replace("~0", "~"))
            if isinstance(found, Mapping)
            else None
        )
    return found
