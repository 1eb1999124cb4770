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
        is_open = any(keyword in schema for keyword in OPEN_KEYWORDS)
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


WriteCall = Callable[[CallGrammar, ToolFunction], str]  # an expression for one call of a tool


def must_call(
    write: WriteCall, between: str, functions: Sequence[ToolFunction], max_calls: int | None
) -> CallGrammar:
    """An answer that consists of one or more calls of `functions`, separated by `between`."""
    grammar = CallGrammar()
    call = _any(grammar, write, functions)
    more = "" if max_calls == 1 else f" ({text(between)} {call})*"
    grammar.rules.append(f"start: {call}{more}")
    return grammar


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


def json_in_tags(grammar: CallGrammar, function: ToolFunction) -> str:
    """<tool_call> {"name": "f", "arguments": {...}} </tool_call>, on three lines."""
    lead = f'<tool_call>\n{{"name": {_json(function.name)}, "arguments": '
    arguments = grammar.json(function.subschema(function.parameters))
    return f"{text(lead)} {arguments} {text(chr(125) + chr(10) + '</tool_call>')}"


def bare_json(grammar: CallGrammar, function: ToolFunction) -> str:
    """{"name": "f", "parameters": {...}}."""
    lead = f'{{"name": {_json(function.name)}, "parameters": '
    return f"{text(lead)} {grammar.json(function.subschema(function.parameters))} {text(chr(125))}"


def parameters_in_tags(grammar: CallGrammar, function: ToolFunction) -> str:
    """<function=f> containing <parameter=a>, each value on lines of its own."""

    def argument(name: str, schema: Schema) -> str:
        lead, end = f"<parameter={name}>\n", "\n</parameter>"
        return f"{text(lead)} {_value(grammar, function, name, schema, end)} {text(chr(10))}"

    lead = f"<tool_call>\n<function={function.name}>\n"
    end = "</function>\n</tool_call>"
    return f"{text(lead)} {_arguments(function, argument)} {text(end)}"


def keys_and_values(grammar: CallGrammar, function: ToolFunction) -> str:
    """f, then <arg_key>a</arg_key> and <arg_value>value</arg_value>, each on a line."""

    def argument(name: str, schema: Schema) -> str:
        lead, end = f"<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>"
        return f"{text(lead)} {_value(grammar, function, name, schema, end)} {text(chr(10))}"

    lead = f"<tool_call>{function.name}\n"
    return f"{text(lead)} {_arguments(function, argument)} {text('</tool_call>')}"


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
    if types and "string" not in types:
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
    minimum, maximum = schema.get("minLength"), schema.get("maxLength")
    if not isinstance(minimum, int) and not isinstance(maximum, int):
        return "(?s:.*)"
    return f"(?s:.{{{minimum or 0},{'' if maximum is None else maximum}}})"


def text(written: str) -> str:
    """`written` as a Lark string."""
    return json.dumps(written, ensure_ascii=False)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
