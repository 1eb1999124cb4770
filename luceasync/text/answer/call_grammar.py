"""How calls are written, as a grammar: what a model is held to that must call, or call right.

Source: Lark, as llguidance reads it. Owns how a format and the schemas of tools become rules. Knows
no vocabulary and no model; luceasync.text.answer.formats reads what is written so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from luceasync.text.answer.argument_types import types_of

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
WORDS_OF_OTHERS = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")  # name arguments too

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """A JSON schema that rules refer to by name; `param`: the field that has it. `strict`: each of
    its words has to be enforced.
    """

    schema: Schema
    strict: bool
    param: str


@dataclass(slots=True)
class CallGrammar:
    """`rules`, of which `start` is all of an answer, and the schemas that they name."""

    rules: list[str] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def lark(self) -> str:
        return "\n".join(self.rules)

    def json(self, part: Part) -> str:
        """A JSON value that is as `part` says, as an expression."""
        name = f"json_{len(self.parts)}"
        self.parts[name] = part
        return f"@{name}"

    def rule(self, kind: str, body: str, attributes: str = "") -> str:
        """A rule of its own, by the name that is given back."""
        name = f"{kind}_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name


@dataclass(frozen=True, slots=True)
class Function:
    """A tool: its name, the schema of its arguments, an object, and where it was given."""

    name: str
    parameters: Schema
    strict: bool
    param: str

    @classmethod
    def of(cls, tool: Mapping[str, Any], param: str) -> Function:
        """Of a checked tool, as OpenAI writes it. Where a schema names arguments, there are no
        others.
        """
        function = tool["function"]
        given = {**(function.get("parameters") or NO_ARGUMENTS), "type": "object"}
        is_open = any(word in given for word in WORDS_OF_OTHERS)
        parameters = given if is_open else {"additionalProperties": False, **given}
        strict = function.get("strict") is True
        return cls(function["name"], parameters, strict, param)

    def part(self, schema: Schema, *names: str) -> Part:
        """What `schema`, a part of the parameters, means by itself: with what it refers to."""
        shared = {w: self.parameters[w] for w in ("$defs", "definitions") if w in self.parameters}
        place = "".join(f".{name}" for name in names)
        return Part({**shared, **schema}, self.strict, self.param + place)


WriteCall = Callable[[CallGrammar, Function], str]  # one call of it, as an expression


def must_call(
    write: WriteCall, between: str, functions: Sequence[Function], max_calls: int | None
) -> CallGrammar:
    """An answer that is calls of `functions`, one or more, `between` two of them that text."""
    grammar = CallGrammar()
    call = _any(grammar, write, functions)
    more = "" if max_calls == 1 else f" ({text(between)} {call})*"
    grammar.rules.append(f"start: {call}{more}")
    return grammar


def may_call(
    write: WriteCall, opening: str, functions: Sequence[Function], max_calls: int | None
) -> CallGrammar:
    """An answer that is any text with calls in it, each of which is right from `opening` on."""
    grammar = CallGrammar()
    call = _any(grammar, write, functions, opening)
    before = grammar.rule("before", "/(?s:.*)/", f"[suffix={text(opening)}]")
    times = "?" if max_calls == 1 else "*"
    grammar.rules.append(f"start: ({before} {call}){times} /(?s:.*)/")
    return grammar


def _any(
    grammar: CallGrammar, write: WriteCall, functions: Sequence[Function], written: str = ""
) -> str:
    """A call of any of the functions, but for what of it is `written`."""
    calls = [write(grammar, function) for function in functions]
    assert all(call.startswith(text(written)[:-1]) for call in calls), "calls begin alike"
    rest = [f'"{call[len(text(written)) - 1 :]}' for call in calls]
    return grammar.rule("call", " | ".join(rest))


def json_in_tags(grammar: CallGrammar, function: Function) -> str:
    """<tool_call> {"name": "f", "arguments": {...}} </tool_call>, on three lines."""
    lead = f'<tool_call>\n{{"name": {_json(function.name)}, "arguments": '
    arguments = grammar.json(function.part(function.parameters))
    return f"{text(lead)} {arguments} {text(chr(125) + chr(10) + '</tool_call>')}"


def bare_json(grammar: CallGrammar, function: Function) -> str:
    """{"name": "f", "parameters": {...}}."""
    lead = f'{{"name": {_json(function.name)}, "parameters": '
    return f"{text(lead)} {grammar.json(function.part(function.parameters))} {text(chr(125))}"


def parameters_in_tags(grammar: CallGrammar, function: Function) -> str:
    """<function=f> with <parameter=a> in it, each value on lines of its own."""

    def argument(name: str, schema: Schema) -> str:
        lead, end = f"<parameter={name}>\n", "\n</parameter>"
        return f"{text(lead)} {_value(grammar, function, name, schema, end)} {text(chr(10))}"

    lead = f"<tool_call>\n<function={function.name}>\n"
    end = "</function>\n</tool_call>"
    return f"{text(lead)} {_arguments(function, argument)} {text(end)}"


def keys_and_values(grammar: CallGrammar, function: Function) -> str:
    """f, and then <arg_key>a</arg_key> and <arg_value>value</arg_value>, each on a line."""

    def argument(name: str, schema: Schema) -> str:
        lead, end = f"<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>"
        return f"{text(lead)} {_value(grammar, function, name, schema, end)} {text(chr(10))}"

    lead = f"<tool_call>{function.name}\n"
    return f"{text(lead)} {_arguments(function, argument)} {text('</tool_call>')}"


def _arguments(function: Function, write: Callable[[str, Schema], str]) -> str:
    """All that must be there and any others, in the order of the schema."""
    properties = function.parameters.get("properties")
    listed = function.parameters.get("required")
    required = set(listed) if isinstance(listed, list) else set()
    parts = []
    for name, schema in (properties if isinstance(properties, Mapping) else {}).items():
        part = write(name, schema if isinstance(schema, Mapping) else {})
        parts.append(f"({part})" if name in required else f"({part})?")
    return " ".join(parts)


def _value(grammar: CallGrammar, function: Function, name: str, schema: Schema, end: str) -> str:
    """A value up to and with `end`: text is written without quotes, all else as JSON."""
    types = types_of(schema, function.parameters)
    if types and "string" not in types:
        part = function.part(schema, "properties", name)
        return f"{grammar.json(part)} {text(end)}"
    if options := _options(schema):
        return f"({' | '.join(text(option) for option in options)}) {text(end)}"
    pattern = _pattern(schema) if types == {"string"} else "(?s:.*)"
    return grammar.rule("value", f"/{pattern}/", f"[suffix={text(end)}]")


def _options(schema: Schema) -> list[str]:
    """The texts that it lists, where it lists some; other values as JSON."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [])
    values = listed if isinstance(listed, list) else []
    return [value if isinstance(value, str) else _json(value) for value in values]


def _pattern(schema: Schema) -> str:
    """Any text of a length that it allows. What else it says of a text is not enforced."""
    least, most = (schema.get(word) for word in ("minLength", "maxLength"))
    if not isinstance(least, int) and not isinstance(most, int):
        return "(?s:.*)"
    return f"(?s:.{{{least or 0},{'' if most is None else most}}})"


def text(written: str) -> str:
    """`written` as Lark writes it."""
    return json.dumps(written, ensure_ascii=False)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
