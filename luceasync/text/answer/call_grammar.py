"""Grammars of tool calls, for models that must call a tool or must follow its schema.

In Lark syntax, as llguidance reads it. Owns how a call format and the tools' schemas become rules.
Knows no vocabulary and no model; luceasync.text.answer.call_formats parses such calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from luceasync.text.answer.argument_types import types_of

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# Keywords that may allow arguments besides those in "properties".
OPEN_KEYWORDS = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ArgumentsSchema:
    """A JSON schema that rules refer to by name. `param`: the request field it comes from;
    `strict`: every keyword must be enforced.
    """

    schema: Schema
    strict: bool
    param: str


@dataclass(slots=True)
class CallGrammar:
    """Rules, of which `start` matches a whole answer, and the schemas that they refer to."""

    rules: list[str] = field(default_factory=list)
    schemas: dict[str, ArgumentsSchema] = field(default_factory=dict)

    @property
    def lark(self) -> str:
        return "\n".join(self.rules)

    def json(self, schema: ArgumentsSchema) -> str:
        """An expression for a JSON value that matches `schema`."""
        name = f"json_{len(self.schemas)}"
        self.schemas[name] = schema
        return f"@{name}"

    def rule(self, kind: str, body: str, attributes: str = "") -> str:
        """Add a rule and return its name."""
        name = f"{kind}_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A tool: its name, the object schema of its arguments, and the request field it comes from."""

    name: str
    parameters: Schema
    strict: bool
    param: str

    @classmethod
    def of(cls, tool: Mapping[str, Any], param: str) -> ToolFunction:
        """From a validated OpenAI tool. By default a schema allows no arguments besides those that
        it names.
        """
        function = tool["function"]
        schema = {**(function.get("parameters") or NO_ARGUMENTS), "type": "object"}
        is_open = any(keyword in schema for keyword in OPEN_KEYWORDS) or _requires_others(schema)
        parameters = schema if is_open else {"additionalProperties": False, **schema}
        strict = function.get("strict") is True
        return cls(function["name"], parameters, strict, param)

    def subschema(self, schema: Schema, *names: str) -> ArgumentsSchema:
        """`schema`, a part of the parameters, made self-contained with the definitions that it may
        refer to. `names`: its path in them.
        """
        shared = {w: self.parameters[w] for w in ("$defs", "definitions") if w in self.parameters}
        place = "".join(f".{name}" for name in names)
        return ArgumentsSchema({**shared, **schema}, self.strict, self.param + place)


def _requires_others(schema: Schema) -> bool:
    """Whether "required" names arguments that "properties" does not."""
    properties, required = schema.get("properties"), schema.get("required")
    known = properties if isinstance(properties, Mapping) else {}
    return isinstance(required, list) and any(name not in known for name in required)


WriteCall = Callable[[CallGrammar, ToolFunction], str]  # an expression for one call of a tool


def must_call(
    write: WriteCall,
    between: str,
    functions: Sequence[ToolFunction],
    max_calls: int | None,
    begin: str = "",
    end: str = "",
) -> CallGrammar:
    """An answer that consists of `begin`, one or more calls of `functions`, separated by `between`,
    and `end`.
    """
    grammar = CallGrammar()
    call = _any(grammar, write, functions)
    more = "" if max_calls == 1 else f" ({text(between)} {call})*"
    grammar.rules.append(f"start: {_part(begin)}{call}{more}{_part(end)}")
    return grammar


def _part(written: str) -> str:
    """`written` as a part of a rule; "" for nothing."""
    return f" {text(written)} " if written else ""


def may_call(
    write: WriteCall, opening: str, functions: Sequence[ToolFunction], max_calls: int | None
) -> CallGrammar:
    """An answer of any text with calls in it, each of which is valid from `opening` on."""
    grammar = CallGrammar()
    call = _any(grammar, write, functions, opening)
    before = grammar.rule("before", "/(?s:.*)/", f"[suffix={text(opening)}]")
    times = "?" if max_calls == 1 else "*"
    grammar.rules.append(f"start: ({before} {call}){times} /(?s:.*)/")
    return grammar


def _any(
    grammar: CallGrammar, write: WriteCall, functions: Sequence[ToolFunction], written: str = ""
) -> str:
    """A call of any of the functions, without the part that is already `written`."""
    calls = [write(grammar, function) for function in functions]
    assert all(call.startswith(text(written)[:-1]) for call in calls), "calls begin alike"
    rest = [f'"{call[len(text(written)) - 1 :]}' for call in calls]
    return grammar.rule("call", " | ".join(rest))


def json_object(lead: str, name: str, arguments: str, tail: str) -> WriteCall:
    """Writes `lead`, {"name": "f", "arguments": {...}} with these names of the members, `tail`."""

    def write(grammar: CallGrammar, function: ToolFunction) -> str:
        begin = f"{lead}{{{_json(name)}: {_json(function.name)}, {_json(arguments)}: "
        return f"{text(begin)} {_object(grammar, function)} {text('}' + tail)}"

    return write


def named_json(lead: str, tail: str) -> WriteCall:
    """Writes `lead`, with the function's name for %s, the object of its arguments, and `tail`."""

    def write(grammar: CallGrammar, function: ToolFunction) -> str:
        call = f"{text(lead % function.name)} {_object(grammar, function)}"
        return f"{call}{_part(tail)}".rstrip()

    return write


def tagged(
    lead: str, parameter: tuple[str, str, str], tail: str, json_lead: str | None = None
) -> WriteCall:
    """Writes `lead`, with the function's name for %s, then each parameter, then `tail`. A parameter
    is written as its lead, with its name for %s, its value, its end, and what parts it from the
    next. `json_lead`: the lead of a value that is JSON, if that is another.
    """

    def write(grammar: CallGrammar, function: ToolFunction) -> str:
        def argument(name: str, schema: Schema) -> str:
            begin, end, space = parameter
            types = types_of(schema, function.parameters)
            if json_lead is not None and types and "string" not in types:
                begin = json_lead
            value = _value(grammar, function, name, schema, end)
            return f"{text(begin % name)} {value}{_part(space)}".rstrip()

        return f"{text(lead % function.name)} {_arguments(function, argument)} {text(tail)}"

    return write


def keywords(lead: str, colon: str, tail: str) -> WriteCall:
    """Writes `lead`, with the function's name for %s, name, `colon` and JSON of each argument,
    parted by commas, then `tail`.
    """

    def write(grammar: CallGrammar, function: ToolFunction) -> str:
        members = []

        def argument(name: str, schema: Schema) -> str:
            own = function.subschema(schema, "properties", name)
            members.append(f"{text(name + colon)} {grammar.json(own)}")
            return members[-1]

        _arguments(function, argument)
        return f"{text(lead % function.name)} {_listed(grammar, function, members)} {text(tail)}"

    return write


def _listed(grammar: CallGrammar, function: ToolFunction, members: Sequence[str]) -> str:
    """Some of the members in order, all that are required among them, parted by commas."""
    names = list(function.parameters.get("properties") or ())
    required = set(function.parameters.get("required") or ())
    rest = ""  # what may follow an earlier member, from the last on
    first: list[str] = []
    for name, member in reversed(list(zip(names, members, strict=True))):
        first.insert(0, f"{member} {rest}".strip())
        if name in required:
            rest, first = f'", " {member} {rest}'.strip(), first[:1]
        else:
            rest = grammar.rule("more", f'", " {member} {rest} | {rest or chr(34) * 2}')
    is_empty = not required & set(names)
    options = [*first, '""'] if is_empty else first
    return f"({' | '.join(options)})"


def _object(grammar: CallGrammar, function: ToolFunction) -> str:
    return grammar.json(function.subschema(function.parameters))


def _arguments(function: ToolFunction, write: Callable[[str, Schema], str]) -> str:
    """The required arguments and any optional ones, in the order of the schema."""
    properties = function.parameters.get("properties")
    listed = function.parameters.get("required")
    required = set(listed) if isinstance(listed, list) else set()
    parts = []
    for name, schema in (properties if isinstance(properties, Mapping) else {}).items():
        part = write(name, schema if isinstance(schema, Mapping) else {})
        parts.append(f"({part})" if name in required else f"({part})?")
    return " ".join(parts)


def _value(
    grammar: CallGrammar, function: ToolFunction, name: str, schema: Schema, end: str
) -> str:
    """A value followed by `end`: a string without quotes, anything else as JSON."""
    types = types_of(schema, function.parameters)
    # A schema that nothing satisfies is refused as one, which names its place.
    if types and ("string" not in types or (types == {"string"} and _has_no_text(schema))):
        own = function.subschema(schema, "properties", name)
        return f"{grammar.json(own)} {text(end)}"
    if options := _options(schema):
        return f"({' | '.join(text(option) for option in options)}) {text(end)}"
    pattern = _pattern(schema) if types == {"string"} else "(?s:.*)"
    return grammar.rule("value", f"/{pattern}/", f"[suffix={text(end)}]")


def _options(schema: Schema) -> list[str]:
    """The values of `enum` or `const` as text, if any; values other than strings as JSON."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [])
    values = listed if isinstance(listed, list) else []
    return [value if isinstance(value, str) else _json(value) for value in values]


def _pattern(schema: Schema) -> str:
    """Any text of an allowed length. Other constraints on strings are not enforced."""
    minimum, maximum = _lengths(schema)
    if minimum is None and maximum is None:
        return "(?s:.*)"
    return f"(?s:.{{{minimum or 0},{'' if maximum is None else maximum}}})"


def _lengths(schema: Schema) -> tuple[int | None, int | None]:
    """The least and the greatest length of a string, as far as they are integers."""
    found = (schema.get("minLength"), schema.get("maxLength"))
    minimum, maximum = (value if type(value) is int else None for value in found)
    return minimum, maximum


def _has_no_text(schema: Schema) -> bool:
    """Whether no string has an allowed length."""
    minimum, maximum = _lengths(schema)
    least = 0 if minimum is None else minimum
    return least < 0 or (maximum is not None and maximum < least)


def text(written: str) -> str:
    """`written` as a Lark string."""
    return json.dumps(written, ensure_ascii=False)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
