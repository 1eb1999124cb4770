"""The fields by which a body says what its answer has to be: OpenAI's own, and those of vLLM,
SGLang and llama.cpp.

Owns their names, and that one of them is enough. Whether what they hold compiles is for the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec

from luceasync.constraint import Constraint
from luceasync.errors import RequestError
from luceasync.server.checks import at_most, refuse
from luceasync.server.openai.unserved import UnservedBody

MAX_SOURCE_BYTES = 256 << 10  # of a schema
MAX_GRAMMAR_CHARS = 32 << 10  # of an expression or a grammar
MAX_CHOICES = 1024
NOTHING = (b"", b"null")
TYPES = "'text', 'json_object' or 'json_schema'"


class JsonSchema(msgspec.Struct):
    """`schema` as it was sent; OpenAI lets it be absent."""

    name: str | None = None
    schema: msgspec.Raw = msgspec.Raw()
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """`schema` beside "json_object" is llama.cpp's way."""

    type: str
    json_schema: JsonSchema | None = None
    schema: msgspec.Raw = msgspec.Raw()


class StructuredOutputs(msgspec.Struct):
    """vLLM's."""

    json: msgspec.Raw = msgspec.Raw()
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: msgspec.Raw = msgspec.Raw()


class ConstraintBody(UnservedBody):
    """The fields; null is the same as absent."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = msgspec.Raw()
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: msgspec.Raw = msgspec.Raw()
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None


def constraint_of(body: ConstraintBody) -> Constraint | None:
    """What the answer has to be; None: any text. Raises RequestError for two that were asked for at
    once, and for one that cannot be.
    """
    found = [*_of_format(body.response_format), *_of_fields(body)]
    found += _of_outputs(body.structured_outputs)
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        words = f"'{first}' and '{second}' both say what the answer has to be: leave one out."
        raise RequestError(words, param=second)
    return found[0] if found else None


def schema_constraint(schema: msgspec.Raw, param: str, *, strict: bool) -> Constraint:
    """An answer by a JSON schema, or by the JSON of one in a string, as some clients send it."""
    source = bytes(schema)
    if len(source) > MAX_SOURCE_BYTES:
        words = f"'{param}' has {len(source)} bytes; at most {MAX_SOURCE_BYTES} may be."
        raise RequestError(words, param=param)
    if source.startswith(b'"'):
        source = msgspec.json.decode(source, type=str).strip().encode()
    if not source.startswith(b"{"):
        raise RequestError(f"Invalid value for '{param}': expected a JSON schema.", param=param)
    return Constraint("json_schema", source.decode(), param, strict)


def _of_format(form: ResponseFormat | None) -> Iterator[Constraint]:
    if form is None or form.type == "text":
        return
    if form.type == "json_schema":
        where, given = "response_format.json_schema", form.json_schema or JsonSchema()
        if bytes(given.schema) in NOTHING:
            raise RequestError(f"'{where}.schema' is missing.", param=f"{where}.schema")
        yield schema_constraint(given.schema, f"{where}.schema", strict=given.strict is True)
    elif form.type == "json_object" and bytes(form.schema) not in NOTHING:
        yield schema_constraint(form.schema, "response_format.schema", strict=False)
    elif form.type == "json_object":
        yield Constraint("json_object", "", "response_format")
    else:
        refuse("response_format.type", form.type, TYPES)


def _of_fields(body: ConstraintBody) -> Iterator[Constraint]:
    for param in ("guided_json", "json_schema"):
        if bytes(schema := getattr(body, param)) not in (*NOTHING, b"{}", b'""', b"false", b"0"):
            yield schema_constraint(schema, param, strict=True)
    named = ("guided_regex", "guided_grammar", "guided_choice")
    yield from _named(named, body.guided_regex, body.guided_grammar, body.guided_choice)
    yield from _named(("regex", "grammar", ""), body.regex, body.grammar)
    yield from _named(("", "ebnf", ""), None, body.ebnf)


def _of_outputs(asked: StructuredOutputs | None) -> Iterator[Constraint]:
    if asked is None:
        return
    where = "structured_outputs"
    if bytes(asked.structural_tag) not in NOTHING:
        words = f"'{where}.structural_tag' is not served here: leave it out."
        raise RequestError(words, param=f"{where}.structural_tag")
    if bytes(asked.json) not in NOTHING:
        yield schema_constraint(asked.json, f"{where}.json", strict=True)
    if asked.json_object:
        yield Constraint("json_object", "", f"{where}.json_object")
    named = (f"{where}.regex", f"{where}.grammar", f"{where}.choice")
    yield from _named(named, asked.regex, asked.grammar, asked.choice)


def _named(
    params: tuple[str, str, str],
    regex: str | None,
    grammar: str | None,
    choice: list[str] | None = None,
) -> Iterator[Constraint]:
    """Those that are there, by the names of their fields."""
    if regex:
        yield Constraint("regex", _bounded(params[0], regex), params[0])
    if grammar:
        yield Constraint("grammar", _bounded(params[1], grammar), params[1])
    if choice:
        at_most(params[2], choice, MAX_CHOICES, "texts")
        yield Constraint("choice", _bounded(params[2], json.dumps(choice)), params[2])


def _bounded(param: str, text: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        words = f"'{param}' has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} may be."
        raise RequestError(words, param=param)
    return text
