"""Grammars of tool calls, for models that must call a tool or must follow its schema.

In the Lark syntax of llguidance. Owns the conversion of call formats and tools' schemas to rules.
Independent of vocabularies and models; luceasync.text.answer.call_formats parses such calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from luceasync.errors import RequestError
from luceasync.text.answer.argument_types import (
    TEXT_FORMATS,
    UnkeptKeyword,
    alternatives,
    has_no_text,
    lengths_of,
    text_regex,
    types_of,
)

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
DEFINITIONS = ("$defs", "definitions")
ROOT = "root"  # the definition that holds a whole schema, for references to it
# Keywords that cannot be enforced on an object whose members are written one by one.
UNKEPT_OF_OBJECTS = (
    "patternProperties", "minProperties", "maxProperties", "propertyNames", "not", "if",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
)  # fmt: skip
# Keywords that say nothing about a value.
NOTES = {"title", "description", "default", "examples"}
_ESCAPED = re.compile(r"['\\\x00-\x1f]")  # in a string between apostrophes
# Placeholders for ids in the text of a call.
ID, NUMBER = "\x00", "\x01"
ID_REGEX = {ID: "/[A-Za-z0-9]{9}/", NUMBER: "/[0-9]{1,3}/"}
# Keywords that may allow arguments besides those in "properties".
OPEN_KEYWORDS = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ArgumentsSchema:
    """A JSON schema that rules refer to by name. `param` is its request field; `strict`: every
    keyword must be enforced.
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
    """A tool: its name, the schema of its arguments, and the request field it comes from."""

    name: str
    parameters: Schema
    strict: bool
    param: str

    @classmethod
    def of(cls, tool: Mapping[str, Any], param: str) -> ToolFunction:
        """Convert a validated OpenAI tool. By default, only named arguments are allowed."""
        function = tool["function"]
        schema = {**(function.get("parameters") or NO_ARGUMENTS), "type": "object"}
        is_open = any(keyword in schema for keyword in OPEN_KEYWORDS) or _requires_others(schema)
        parameters = schema if is_open else {"additionalProperties": False, **schema}
        strict = function.get("strict") is True
        return cls(function["name"], parameters, strict, param)

    def subschema(self, schema: Schema, *names: str) -> ArgumentsSchema:
        """`schema`, a part of the parameters at the path `names`, made self-contained by adding the
        definitions that it may refer to.
        """
        place = "".join(f".{name}" for name in names)
        shared = {w: self.parameters[w] for w in DEFINITIONS if w in self.parameters}
        if names and not all(_is_shared(each) for each in _references([schema, shared])):
            shared = {"$defs": {ROOT: _rooted(self.parameters)}}
            schema = _rooted(schema)
        return ArgumentsSchema({**shared, **schema}, self.strict, self.param + place)

    def refuse(self, keyword: str, *names: str) -> NoReturn:
        """Raise RequestError for a keyword of the part at the path `names`."""
        place = self.param + "".join(f".{name}" for name in names)
        raise RequestError(
            f"Invalid value for '{place}': '{keyword}' cannot be enforced in the notation of this "
            "model's calls; leave it out, or 'strict'.",
            param=place,
        )


def _is_shared(reference: str) -> bool:
    return reference.startswith(tuple(f"#/{word}/" for word in DEFINITIONS))


def _references(part: Any) -> Iterator[str]:
    """The references to the same document in `part`."""
    if isinstance(part, Mapping):
        if isinstance(reference := part.get("$ref"), str) and reference.startswith("#"):
            yield reference
        part = list(part.values())
    for each in part if isinstance(part, list) else ():
        yield from _references(each)


def _rooted(part: Any) -> Any:
    """`part` with its references adapted to a document that has become the definition ROOT."""
    if isinstance(part, list):
        return [_rooted(each) for each in part]
    if not isinstance(part, Mapping):
        return part
    moved = {word: _rooted(value) for word, value in part.items()}
    if isinstance(reference := part.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{ROOT}{reference[1:]}"
    return moved


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
    """The grammar of an answer: `begin`, calls of `functions` separated by `between`, `end`."""
    grammar = CallGrammar()
    call = _any(grammar, write, functions)
    more = "" if max_calls == 1 else f" ({text(between)} {call})*"
    grammar.rules.append(f"start: {_part(begin)}{call}{more}{_part(end)}")
    return grammar


def _part(written: str) -> str:
    """`written` as a part of a rule; "" if empty."""
    return f" {text(written)} " if written else ""


@dataclass(frozen=True, slots=True)
class Notation:
    """The words around calls, between them, and those with which they may begin."""

    openings: Sequence[str]
    between: str
    begin: str = ""
    end: str = ""


def may_call(
    write: WriteCall,
    notation: Notation,
    functions: Sequence[ToolFunction],
    max_calls: int | None,
    anchor: str = "",
) -> CallGrammar:
    """The grammar of an answer with any text and calls, each valid from its opening on. `anchor`:
    the beginning of every call instead of the openings, which are then ignored.
    """
    grammar = CallGrammar()
    opening = anchor or notation.openings[0]
    begin, end = ("", "") if anchor else (notation.begin, notation.end)
    call = _any(grammar, write, functions, "" if begin else opening)
    if begin:
        more = "" if max_calls == 1 else f" ({text(notation.between)} {call})*"
        rest = _part(begin[len(opening) :])
        call = grammar.rule("calls", f"{rest}{call}{more}{_part(end)}")
    others = [each for each in notation.openings if each != opening and anchor == ""]
    said = grammar.rule("SAID", without(others))
    before = grammar.rule("before", said, f"[suffix={text(opening)}]")
    last = grammar.rule("LAST", without([*others, opening]))
    if max_calls == 1:  # whatever follows it is text
        grammar.rules.append(f"start: {last} | {before} {call} /(?s:.*)/")
    else:
        grammar.rules.append(f"start: ({before} {call})* {last}")
    return grammar


def may_be_calls(
    write: WriteCall,
    notation: Notation,
    functions: Sequence[ToolFunction],
    max_calls: int | None,
    looks: str,
) -> CallGrammar:
    """The grammar of an answer that consists of valid calls, or of any text that does not match
    `looks`, a regular expression for text that is read as calls.
    """
    grammar = CallGrammar()
    written = [write(grammar, function) for function in functions]
    call = grammar.rule("call", " | ".join(written))
    more = "" if max_calls == 1 else f" ({text(notation.between)} {call})*"
    # One literal up to the name: a shorter one would also be a prefix of other text.
    first = " | ".join(text(notation.begin)[:-1] + each[1:] for each in written)
    calls = grammar.rule("calls", f"({first}){more}{_part(notation.end)}")
    said = grammar.rule("SAID", f"/(?s:.*)/ & ~/{looks}/")
    grammar.rules.append(f"start: {calls} | {said}")
    return grammar


def without(words: Sequence[str]) -> str:
    """A terminal for text that contains none of `words`."""
    listed = "|".join(quoted(word) for word in words)
    return f"/(?s:.*)/ & ~/(?s:.*)({listed})(?s:.*)/" if words else "/(?s:.*)/"


def quoted(word: str) -> str:
    """A Lark regular expression that matches only `word`."""
    return re.escape(word).replace("/", "\\/").replace("\\\n", "\\n")


def _any(
    grammar: CallGrammar, write: WriteCall, functions: Sequence[ToolFunction], written: str = ""
) -> str:
    """A call of any of the functions, without the part that is already `written`."""
    calls = [write(grammar, function) for function in functions]
    assert all(call.startswith(text(written)[:-1]) for call in calls), "calls begin alike"
    rest = [f'"{call[len(text(written)) - 1 :]}' for call in calls]
    return grammar.rule("call", " | ".join(rest))


def json_object(
    lead: str, name: str, arguments: str, tail: str, numbered: str = "", last: str = ""
) -> WriteCall:
    """Writes `lead`, {"name": "f", "arguments": {...}} with these member names, and `tail`. First
    may be a member `numbered` with a number as a string, and `last` one with an id.
    """
    end = f', {text(last)}: "{ID}"' if last else ""

    def write(grammar: CallGrammar, function: ToolFunction) -> str:
        begin = f"{lead}{{"
        if numbered:
            begin += f'{text(numbered)}: "{NUMBER}", '
        begin += f"{text(name)}: {text(function.name)}, {text(arguments)}: "
        return f"{_with_ids(begin)} {_object(grammar, function)} {_with_ids(end + '}' + tail)}"

    return write


def named_json(lead: str, tail: str) -> WriteCall:
    """Writes `lead`, with a name for %s and an id for ID, the object of arguments, and `tail`."""

    def write(grammar: CallGrammar, function: ToolFunction) -> str:
        call = f"{_with_ids(lead % function.name)} {_object(grammar, function)}"
        return f"{call}{_part(tail)}".rstrip()

    return write


def _with_ids(written: str) -> str:
    """`written` as Lark strings, with expressions for ID and NUMBER."""
    parts = re.split(f"([{ID}{NUMBER}])", written)
    return " ".join(ID_REGEX.get(part) or text(part) for part in parts)


def tagged(
    lead: str, parameter: tuple[str, str, str], tail: str, json_lead: str | None = None
) -> WriteCall:
    """Writes `lead`, with %s replaced by the function's name, then each parameter, then `tail`. A
    parameter is written as its lead, with %s replaced by its name, its value, its end, and the
    separator from the next one. `json_lead` is the lead of JSON values, if it differs.
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


def keywords(
    lead: str, colon: str, tail: str, quote: str = "", *, apostrophes: bool = False
) -> WriteCall:
    """Writes `lead`, with %s replaced by the function's name, then the name, `colon` and JSON of
    each argument, separated by commas, then `tail`. With a `quote`, as Gemma's templates do:
    strings stand between two, arguments are sorted, and no space follows a comma; arguments of
    which something cannot be enforced in that notation are one JSON object, which is read too.
    `apostrophes`: strings stand between these if nothing in them has to be escaped.
    """

    def write(grammar: CallGrammar, function: ToolFunction) -> str:
        def member(name: str, schema: Schema) -> str:
            is_text = types_of(schema, function.parameters) == {"string"}
            if quote and is_text:
                value = _value(grammar, function, name, schema, quote)
                return f"{text(name + colon + quote)} {value}"
            value = _between_apostrophes(grammar, schema) if apostrophes and is_text else ""
            value = value or grammar.json(function.subschema(schema, "properties", name))
            return f"{text(name + colon)} {value}"

        def listed(parameters: Schema) -> str:
            members = {name: member(name, each) for name, each in _properties(parameters).items()}
            if not quote:
                return _listed(grammar, parameters, members)
            ordered = sorted(members.items(), key=lambda named: named[0].lower())
            return _listed(grammar, parameters, dict(ordered), ",")

        try:
            arguments = _any_of([listed(each) for each in _objects(function)])
        except RequestError:
            if not quote:
                raise
            whole = _object(grammar, function)  # instead of the brackets too
            return f"{text(lead[:-1] % function.name)} {whole} {text(tail[1:])}"
        return f"{text(lead % function.name)} {arguments} {text(tail)}"

    return write


def _listed(
    grammar: CallGrammar, parameters: Schema, members: Mapping[str, str], comma: str = ", "
) -> str:
    """A selection of the members in order, with all required ones, between commas."""
    required = set(parameters.get("required") or ())
    rest = ""  # what may follow an earlier member, built from the last one on
    first: list[str] = []
    for name, member in reversed(list(members.items())):
        first.insert(0, f"{member} {rest}".strip())
        if name in required:
            rest, first = f"{text(comma)} {member} {rest}".strip(), first[:1]
        else:
            rest = grammar.rule("more", f"{text(comma)} {member} {rest} | {rest or chr(34) * 2}")
    is_empty = not required & set(members)
    options = [*first, '""'] if is_empty else first
    return f"({' | '.join(options)})"


def _between_apostrophes(grammar: CallGrammar, schema: Schema) -> str:
    """A string as JSON if something in it has to be escaped, otherwise between apostrophes; "" if
    the schema says more than which values it may have, so that only JSON can follow it.
    """
    keys = schema.keys() - NOTES
    if keys == {"type"}:
        escaped = r"""/"([^"\\\x00-\x1f]|\\["\\bfnrt]|\\u[0-9a-fA-F]{4})*"/ & /(?s:.*['\\].*)/"""
        return rf"(/'[^'\\\x00-\x1f]*'/ | {grammar.rule('TEXT', escaped)})"
    if keys - {"type"} not in ({"enum"}, {"const"}):
        return ""
    options = schema.get("enum", [schema.get("const")])
    return _any_of([text(_literal(each)) for each in options if isinstance(each, str)])


def _literal(value: str) -> str:
    return json.dumps(value) if _ESCAPED.search(value) else f"'{value}'"


def _any_of(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _objects(function: ToolFunction) -> list[Schema]:
    """The objects that the arguments may be, each with its properties. Raises RequestError if the
    tool is strict and its schema has keywords that cannot be enforced.
    """
    own = function.parameters
    try:
        found: list[Schema] = [*alternatives(own, own, strict=function.strict)]
    except UnkeptKeyword as error:
        if function.strict:
            function.refuse(str(error))
        return [own]
    for each in found if function.strict else ():
        if unkept := next((word for word in UNKEPT_OF_OBJECTS if word in each), None):
            function.refuse(unkept)
        if _requires_others(each):
            function.refuse("required")
    return found or [own]


def _properties(parameters: Schema) -> Mapping[str, Schema]:
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {n: each if isinstance(each, Mapping) else {} for n, each in properties.items()}


def _object(grammar: CallGrammar, function: ToolFunction) -> str:
    return grammar.json(function.subschema(function.parameters))


def _arguments(function: ToolFunction, write: Callable[[str, Schema], str]) -> str:
    """The required arguments and any optional ones, in the order of the schema."""

    def listed(parameters: Schema) -> str:
        required = parameters.get("required")
        needed = set(required) if isinstance(required, list) else set()
        written = {name: write(name, each) for name, each in _properties(parameters).items()}
        return " ".join(f"({part}){'' if n in needed else '?'}" for n, part in written.items())

    return _any_of([listed(each) or '""' for each in _objects(function)])


def _value(
    grammar: CallGrammar, function: ToolFunction, name: str, schema: Schema, end: str
) -> str:
    """A value followed by `end`: a string without quotes, anything else as JSON."""
    place = ("properties", name)
    types = types_of(schema, function.parameters)
    try:
        found = alternatives(schema, function.parameters, strict=function.strict)
    except UnkeptKeyword as error:
        if function.strict and (not types or "string" in types):
            function.refuse(str(error), *place)
        found = [{}]
    # A schema that no value satisfies is refused by its compilation, which names its place.
    is_json = bool(types) and "string" not in types
    if is_json or not found or all(has_no_text(each) for each in found):
        return f"{grammar.json(function.subschema(schema, *place))} {text(end)}"
    parts = []
    for each in found:
        kinds = types_of(each, {})
        if kinds and "string" not in kinds:
            parts.append(f"{grammar.json(function.subschema(each, *place))} {text(end)}")
        elif options := _options(each):
            parts.append(f"({' | '.join(text(option) for option in options)}) {text(end)}")
        elif not has_no_text(each):
            body = grammar.rule("TEXT", _text_of(function, each, end, *place))
            parts.append(grammar.rule("value", body, f"[suffix={text(end)}]"))
    return f"({' | '.join(parts)})"


def _options(schema: Schema) -> list[str]:
    """The values of `enum` or `const` as text, if any; values other than strings as JSON."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [])
    values = listed if isinstance(listed, list) else []
    return [value if isinstance(value, str) else text(value) for value in values]


def _text_of(function: ToolFunction, schema: Schema, end: str, *names: str) -> str:
    """A terminal for a string that matches `schema` and ends at the first `end`. For strict tools,
    patterns and formats are included; keywords that cannot be enforced are refused.
    """
    minimum, maximum = lengths_of(schema)
    is_bounded = schema.get("type") == "string" and (minimum, maximum) != (None, None)
    bounds = f"{{{minimum or 0},{'' if maximum is None else maximum}}}" if is_bounded else "*"
    terms = [f"/(?s:.{bounds})/"]
    for word in ("pattern", "format"):
        if function.strict and word in schema:
            regex = (
                text_regex(schema[word]) if word == "pattern" else TEXT_FORMATS.get(schema[word])
            )
            if regex is None:
                function.refuse(word, *names)
            terms.append(f"/{regex.replace('/', chr(92) + '/')}/")
    if minimum or len(terms) > 1:  # otherwise the shortest text before `end` matches anyway
        terms.append(without([end]))
    return " & ".join(terms)


def text(written: Any) -> str:
    """`written` as JSON; for text this is a Lark string."""
    return json.dumps(written, ensure_ascii=False)
