"""Whether a value matches a JSON schema, keyword by keyword: slow, plain, and independent.

Source: JSON Schema 2020-12, the keywords that our random schemas use. Any other keyword is a
ValueError: nothing passes unchecked.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
import uuid
from typing import Any

SILENT = {"$schema", "$defs", "definitions", "title", "description"}


def is_valid(value: Any, schema: Any, root: Any = None) -> bool:
    """Whether `value` matches `schema`, a part of `root`."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and not is_valid(value, _referred(schema["$ref"], root), root):
        return False
    return all(_holds(word, value, schema, root) for word in schema)


def _holds(word: str, value: Any, schema: dict[str, Any], root: Any) -> bool:
    said = schema[word]
    match word:
        case "$ref":
            return True
        case "type":
            return any(_is(name, value) for name in ([said] if isinstance(said, str) else said))
        case "const":
            return _same(value, said)
        case "enum":
            return any(_same(value, one) for one in said)
        case "anyOf":
            return any(is_valid(value, one, root) for one in said)
        case "oneOf":
            return sum(is_valid(value, one, root) for one in said) == 1
        case "allOf":
            return all(is_valid(value, one, root) for one in said)
    if word in SILENT:
        return True
    for kind, holds in ((str, _text), (dict, _object), (list, _array)):
        if isinstance(value, kind):
            return holds(word, value, schema, root)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number(word, value, said)
    return True  # words of another kind of value


def _text(word: str, value: str, schema: dict[str, Any], root: Any) -> bool:
    said = schema[word]
    match word:
        case "minLength":
            return len(value) >= said
        case "maxLength":
            return len(value) <= said
        case "pattern":
            return re.search(said, value) is not None
        case "format":
            return _formatted(said, value)
    return True


def _formatted(form: str, value: str) -> bool:
    try:
        match form:
            case "date":
                _day(value)
            case "date-time":
                return _moment(value)
            case "time":
                return _moment(f"2000-01-01T{value}")
            case "ipv4":
                ipaddress.IPv4Address(value)
            case "uuid":
                return str(uuid.UUID(value)) == value.lower()
            case "email":
                return re.fullmatch(r"[^@\s]+@[^@\s]+", value) is not None
            case _:
                raise NotImplementedError(form)
    except ValueError:
        return False
    return True


def _moment(value: str) -> bool:
    """RFC 3339, which has leap seconds and fractions of any length."""
    zone = r"(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
    time = rf"(?:[01]\d|2[0-3]):[0-5]\d:(?:[0-5]\d|60)(?:\.\d+)?{zone}"
    found = re.fullmatch(rf"(\d{{4}}-\d\d-\d\d)[Tt ]{time}", value, re.ASCII)
    return found is not None and bool(_day(found[1]))


def _day(value: str) -> datetime.date:
    """The year 0000 is a leap year; Python begins with year 1. Raises ValueError."""
    return datetime.date.fromisoformat(re.sub("^0000", "2000", value))


def _object(word: str, value: dict[str, Any], schema: dict[str, Any], root: Any) -> bool:
    said = schema[word]
    match word:
        case "properties":
            return all(is_valid(value[n], s, root) for n, s in said.items() if n in value)
        case "required":
            return all(name in value for name in said)
        case "patternProperties":
            pairs = [(p, n) for p in said for n in value if re.search(p, n)]
            return all(is_valid(value[name], said[pattern], root) for pattern, name in pairs)
        case "additionalProperties":
            patterns = schema.get("patternProperties", {})
            others = [
                n
                for n in value
                if n not in schema.get("properties", {})
                and not any(re.search(p, n) for p in patterns)
            ]
            return all(is_valid(value[name], said, root) for name in others)
    return True


def _array(word: str, value: list[Any], schema: dict[str, Any], root: Any) -> bool:
    said = schema[word]
    match word:
        case "minItems":
            return len(value) >= said
        case "maxItems":
            return len(value) <= said
        case "prefixItems":
            return all(is_valid(v, s, root) for v, s in zip(value, said, strict=False))
        case "items":
            rest = value[len(schema.get("prefixItems", [])) :]
            return all(is_valid(one, said, root) for one in rest)
    return True


def _number(word: str, value: float, said: Any) -> bool:
    match word:
        case "minimum":
            return bool(value >= said)
        case "maximum":
            return bool(value <= said)
        case "exclusiveMinimum":
            return bool(value > said)
        case "exclusiveMaximum":
            return bool(value < said)
        case "multipleOf":
            return value % said == 0
    return True


def _is(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    match name:
        case "integer":
            return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        case "number":
            return isinstance(value, int | float)
    kinds = {"string": str, "object": dict, "array": list, "null": type(None), "boolean": bool}
    return isinstance(value, kinds[name])


def _same(value: Any, other: Any) -> bool:
    """Equality in which 1 and True differ, unlike Python's."""
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_same(value[k], other[k]) for k in value)
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _referred(reference: str, root: Any) -> Any:
    for word in reference.removeprefix("#/").split("/"):
        root = root[word]
    return root
