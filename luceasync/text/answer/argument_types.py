"""Converts tool arguments that a model writes without quotes, by the types in the tool's schema.

Text that fits no other type is a string: nothing is refused. Owns which schemas regular expressions
for such text can keep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NoReturn

from luceasync.text.answer.growing_text import GrowingText, Reading, WrittenCall

Schema = Mapping[str, Any]
Tool = Mapping[str, Any]

_SURROGATE = re.compile("[\ud800-\udfff]")
# As far as regular expressions can check them (RFC 3339, RFC 4122 and others).
_DATE, _TIME = r"\d{4}-[01]\d-[0-3]\d", r"[0-2]\d:[0-5]\d:[0-6]\d(\.\d+)?(Z|[+-][0-2]\d:[0-5]\d)"
TEXT_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": r"[^\s@]+@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*",
    "hostname": r"[A-Za-z0-9][A-Za-z0-9-]*(\.[A-Za-z0-9][A-Za-z0-9-]*)*",
    "ipv4": r"((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[^\s<>]+",
}
_ODD_PATTERN = re.compile(r"\(\?(?!:|[ims-]+:)|\\[1-9bBkpP]")  # not supported by all dialects
LITERALS = {"True": "true", "False": "false", "None": "null"}  # from models trained on Python


@dataclass(frozen=True, slots=True)
class ToolSchemas:
    """The JSON schemas of a request's tools, by tool name; {}: any arguments. `strict` has the
    names of the tools whose schemas are enforced.
    """

    by_name: Mapping[str, Schema] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tools: Iterable[Tool]) -> ToolSchemas:
        """The schemas of validated OpenAI tools: {"type": "function", "function": {...}}."""
        functions = [tool["function"] for tool in tools]
        return cls(
            {each["name"]: each.get("parameters") or {} for each in functions},
            frozenset(each["name"] for each in functions if each.get("strict") is True),
        )

    def fits(self, tool: str, arguments: Mapping[str, Any]) -> bool:
        """Whether the tool exists and its schema allows the arguments. Keywords that are not
        understood are ignored, except for a strict tool.
        """
        root = self.by_name.get(tool)
        if root is None:
            return False
        is_strict = tool in self.strict
        try:
            return _Fit(root, strict=is_strict).matches(arguments, root)
        except (UnkeptKeyword, RecursionError):
            return not is_strict

    def value(self, tool: str, argument: str, text: str) -> Any:
        """The JSON value that `text` represents as `argument` of `tool`."""
        root = self.by_name.get(tool, {})
        properties = root.get("properties")
        own = properties.get(argument) if isinstance(properties, Mapping) else None
        return _value(text, types_of(own, root))


class _Fit:
    """Whether values match parts of a schema, each of which is analysed once. `strict`: a keyword
    that is not checked raises UnkeptKeyword.
    """

    def __init__(self, root: Schema, *, strict: bool) -> None:
        self._root = root
        self._strict = strict
        self._found: dict[int, list[dict[str, Any]]] = {}  # by the identity of a part of the root

    def matches(self, value: Any, schema: Any) -> bool:
        """Whether `value` matches `schema`, a part of the root."""
        if id(schema) not in self._found:
            self._found[id(schema)] = alternatives(schema, self._root, strict=self._strict)
        return any(
            all(self._keeps(value, word, each) for word in each) for each in self._found[id(schema)]
        )

    def _keeps(self, value: Any, word: str, schema: Schema) -> bool:
        """Whether `value` satisfies one keyword of a schema without references or combinations."""
        match word, schema[word], value:
            case "type", str(kind), _:
                return kind == "string" if isinstance(value, str) else kind in _types_of(value)
            case "enum", list(listed), _:
                return json_text(value) in map(json_text, listed)
            case "const", wanted, _:
                return json_text(value) == json_text(wanted)
            case "required", list(names), dict():
                return all(name in value for name in names)
            case "properties", Mapping() as parts, dict():
                return all(self.matches(value[n], part) for n, part in parts.items() if n in value)
            case "additionalProperties", bool() | Mapping() as part, dict():
                named = schema.get("properties") or {}
                return all(self.matches(v, part) for n, v in value.items() if n not in named)
            case "items", bool() | Mapping() as part, list():
                return all(self.matches(each, part) for each in value)
            case _ if self._strict and word not in _SILENT | _OF_KINDS:
                raise UnkeptKeyword(word)
        return True


CallReader = Callable[[GrowingText, ToolSchemas], Reading[list[WrittenCall]]]


def parsed_json(text: str, *, strict: bool = True) -> Any:
    """The JSON value of `text`; `strict` as for json.loads. Raises ValueError for invalid JSON,
    including NaN, and RecursionError.
    """
    return json.loads(text, parse_constant=_refuse, strict=strict)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def json_text(value: Any) -> str:
    """The JSON of `value`, with characters that UTF-8 cannot encode escaped. Raises ValueError for
    a number that JSON cannot represent.
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
    """The types that `schema`, a part of `root`, allows; empty if it does not restrict them. Each
    part is visited once, so references may be circular.
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


class UnkeptKeyword(Exception):
    """A schema cannot be written as alternatives because of one keyword, the argument."""


MAX_ALTERNATIVES = 64
_COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf", "$defs", "definitions"})
# Keywords of objects and lists; they do not restrict other values.
_OF_KINDS = frozenset({"required", "properties", "additionalProperties", "items"})
_SILENT = frozenset({"description", "title", "default", "examples", "deprecated", "$comment"})
_GREATER = frozenset({"minLength", "minimum", "exclusiveMinimum", "minItems", "minProperties"})
_LESS = frozenset({"maxLength", "maximum", "exclusiveMaximum", "maxItems", "maxProperties"})


def alternatives(schema: Any, root: Schema, *, strict: bool) -> list[dict[str, Any]]:
    """Schemas of at most one type each, without references or combinations, one of which a value
    must match; empty if no value can match. Raises UnkeptKeyword; if `strict`, also for a "oneOf"
    whose parts may overlap.
    """
    return _alternatives(schema, root, strict, frozenset())


def _alternatives(
    schema: Any, root: Schema, strict: bool, seen: frozenset[int]
) -> list[dict[str, Any]]:
    if not isinstance(schema, Mapping):
        return [] if schema is False else [{}]
    if id(schema) in seen:
        raise UnkeptKeyword("$ref")
    seen |= {id(schema)}
    found = [{word: value for word, value in schema.items() if word not in _COMBINING}]
    if strict and isinstance(schema.get("$ref"), str) and _referred(schema["$ref"], root) is None:
        raise UnkeptKeyword("$ref")
    for parts in _combined(schema, root):
        options = [
            (i, each)
            for i, part in enumerate(parts)
            for each in _alternatives(part, root, strict, seen)
        ]
        if strict and parts is schema.get("oneOf") and _overlap(options):
            raise UnkeptKeyword("oneOf")
        merged = (_merged(one, other) for one in found for _, other in options)
        found = [each for each in merged if each is not None]
        if len(found) > MAX_ALTERNATIVES:
            raise UnkeptKeyword("anyOf")
    return [each for one in found for each in _by_type(one)]


def _combined(schema: Schema, root: Schema) -> Iterator[list[Any]]:
    """Lists of schemas; a value matches at least one of each list."""
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield [_referred(reference, root)]
    parts = schema.get("allOf")
    for part in parts if isinstance(parts, list) else ():
        yield [part]
    for word in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(word), list):
            yield options


def _overlap(options: list[tuple[int, dict[str, Any]]]) -> bool:
    """Whether a value may match alternatives from two parts."""
    kinds: dict[str, int] = {}
    for i, each in options:
        for kind in types_of(each, {}) or ("",):
            kind = "number" if kind == "integer" else kind
            if kinds.setdefault(kind, i) != i or ("" in kinds and len(kinds) > 1):
                return True
    return False


def _by_type(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    kinds = schema.get("type")
    if not isinstance(kinds, list):
        yield schema
        return
    for kind in kinds:
        yield {**schema, "type": kind}


def _merged(one: Schema, other: Schema) -> dict[str, Any] | None:
    """The schema of the values that match both; None if there are none. Raises UnkeptKeyword."""
    merged = dict(one)
    for word, value in other.items():
        own = merged.get(word, value)
        if own == value or word in _SILENT:
            merged.setdefault(word, value)
        elif word == "type":
            both = _kinds(own) & _kinds(value)
            if not both:
                return None
            merged[word] = sorted(both)
        else:
            merged[word] = _both(word, own, value)
    return merged


def _both(word: str, own: Any, value: Any) -> Any:
    """The value of a keyword that has the effect of both values. Raises UnkeptKeyword."""
    match own, value:
        case ((int() | float()), (int() | float())) if word in _GREATER | _LESS:
            return max(own, value) if word in _GREATER else min(own, value)
        case list(), list() if word == "enum":
            return [each for each in own if each in value]
        case list(), list() if word == "required":
            return [*own, *(each for each in value if each not in own)]
        case Mapping(), Mapping() if word == "properties":
            shared = {n: {"allOf": [own[n], v]} for n, v in value.items() if n in own}
            return {**own, **value, **shared}
    raise UnkeptKeyword(word)


def _kinds(listed: Any) -> set[str]:
    """The types listed by the keyword "type"; "number" includes "integer"."""
    kinds = {listed} if isinstance(listed, str) else set(listed)
    return kinds | ({"integer"} if "number" in kinds else set())


def _referred(reference: str, root: Schema) -> Any:
    """The schema at "#" or "#/$defs/name"; None if it is not in `root`."""
    if reference == "#":
        return root
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


def text_regex(pattern: str) -> str | None:
    """An expression for texts that contain a match of `pattern`; None if it has parts that not all
    dialects support.
    """
    body = pattern.removeprefix("^")
    has_end = body.endswith("$") and not body.endswith("\\$")
    body = body.removesuffix("$") if has_end else body
    outside = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", body)
    if _ODD_PATTERN.search(body) or "^" in outside or "$" in outside:
        return None
    begin, end = ("" if pattern.startswith("^") else ".*"), ("" if has_end else ".*")
    depths = accumulate((char == "(") - (char == ")") for char in outside)
    if ("|", 0) in zip(outside, depths, strict=True) and not (begin and end):
        return None  # an anchor belongs to only one alternative
    body = re.sub(r"\\(.)", lambda found: "/" if found[1] == "/" else found[0], body)
    return f"(?s:{begin})(?:{body})(?s:{end})"


def lengths_of(schema: Schema) -> tuple[int | None, int | None]:
    """The minimum and maximum length of a string, as far as they are integers."""
    found = (schema.get("minLength"), schema.get("maxLength"))
    minimum, maximum = (value if type(value) is int else None for value in found)
    return minimum, maximum


def has_no_text(schema: Schema) -> bool:
    """Whether no string has an allowed length."""
    minimum, maximum = lengths_of(schema)
    least = 0 if minimum is None else minimum
    return least < 0 or (maximum is not None and maximum < least)
