"""What a tool's schema says of its arguments, for models that write them without quotes.

Owns how a text becomes a value. A text that fits no other type is a string: nothing is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Schema = Mapping[str, Any]
Tool = Mapping[str, Any]

LITERALS = {"True": "true", "False": "false", "None": "null"}  # as models trained on Python write


@dataclass(frozen=True, slots=True)
class ToolSchemas:
    """The tools that a request names: each has a name, and perhaps a JSON schema of its
    arguments.
    """

    by_name: Mapping[str, Schema] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Iterable[Tool]) -> ToolSchemas:
        """Of checked tools, as OpenAI writes them: {"type": "function", "function": {...}}."""
        functions = [tool["function"] for tool in tools]
        return cls({each["name"]: each.get("parameters") or {} for each in functions})

    def value(self, tool: str, argument: str, text: str) -> Any:
        """What `text` means for `argument` of `tool`, a JSON value."""
        root = self.by_name.get(tool, {})
        properties = root.get("properties")
        own = properties.get(argument) if isinstance(properties, Mapping) else None
        return _value(text, types_of(own, root))


def _value(text: str, types: frozenset[str]) -> Any:
    if not types or types == {"string"}:
        return text
    stripped = text.strip()
    try:
        value = json.loads(LITERALS.get(stripped, stripped))
    except (ValueError, RecursionError):
        return text
    return value if types & _types_of(value) else text


def _types_of(value: Any) -> frozenset[str]:
    """The words of JSON schema for what `value` is."""
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
            return frozenset()  # a string in quotes stays as it was written


def types_of(schema: Any, root: Schema) -> frozenset[str]:
    """The types that `schema`, a part of `root`, allows; none where it does not say. Each part is
    looked at once, however often parts name each other.
    """
    found: set[str] = set()
    waiting, seen = [schema], {id(schema)}
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        found |= _own_types(part)
        for inner in _parts(part, root):
            if id(inner) not in seen:
                seen.add(id(inner))
                waiting.append(inner)
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
    """What a schema is made of, by its words and by reference."""
    for word in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(word)
        if isinstance(parts, list):
            yield from parts
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield _referred(reference, root)


def _types_of_values(schema: Schema) -> set[str]:
    """The types of the values that `enum` or `const` names."""
    listed = schema.get("enum")
    values = list(listed) if isinstance(listed, list) else []
    if "const" in schema:
        values.append(schema["const"])
    found: set[str] = set()
    for value in values:
        found.update({"string"} if isinstance(value, str) else _types_of(value))
    return found


def _referred(reference: str, root: Schema) -> Any:
    """What "#/$defs/name" stands for; None where it is not in `root`."""
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
