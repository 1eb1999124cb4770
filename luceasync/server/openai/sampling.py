"""The fields by which OpenAI's endpoints say how tokens are chosen and when they end.

Owns their ranges and what an absent one means. Knows nothing of prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import msgspec

from luceasync.errors import RequestError
from luceasync.request import Constraint, Sampling
from luceasync.server.fields import at_most, in_range, in_range_or, refuse
from luceasync.server.openai.common import UnservedBody

# The fields by which a body says what its answer has to be: OpenAI's own, and those of vLLM,
# SGLang and llama.cpp. Owns their names, and that one of them is enough. Whether what they hold
# compiles is for the engine.


MAX_SOURCE_BYTES = 256 << 10  # of a schema
MAX_GRAMMAR_CHARS = 32 << 10  # of an expression or a grammar
MAX_CHOICE_TEXTS = 1024
NOTHING = (b"", b"null")
TYPES = "'text', 'json_object' or 'json_schema'"


class JsonSchema(msgspec.Struct):
    """`schema` as it was sent; OpenAI lets it be absent."""

    name: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """`schema` beside "json_object" is llama.cpp's way."""

    type: str
    json_schema: JsonSchema | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class StructuredOutputs(msgspec.Struct):
    """vLLM's."""

    json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


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
        at_most(params[2], choice, MAX_CHOICE_TEXTS, "texts")
        yield Constraint("choice", _bounded(params[2], json.dumps(choice)), params[2])


def _bounded(param: str, text: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        words = f"'{param}' has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} may be."
        raise RequestError(words, param=param)
    return text


MAX_CHOICES = 16
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_BIASES = 1024
MAX_PRIORITY = 1000


class SamplingBody(ConstraintBody):
    """The fields that are read; null is the same as absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    min_tokens: int | None = None


def sampling_of(body: SamplingBody) -> Sampling:
    """Absent fields mean what OpenAI says they mean, so an absent temperature is 1."""
    top_p = in_range_or(1.0, "top_p", body.top_p, 0.0, 1.0)
    if top_p == 0:
        refuse("top_p", top_p, "a number above 0, at most 1")
    return Sampling(
        temperature=in_range_or(1.0, "temperature", body.temperature, 0.0, 2.0),
        top_k=max(0, in_range_or(0, "top_k", body.top_k, -1, 2**31 - 1)),
        top_p=top_p,
        min_p=in_range_or(0.0, "min_p", body.min_p, 0.0, 1.0),
        repetition_penalty=in_range_or(
            1.0, "repetition_penalty", body.repetition_penalty, 0.01, 100.0
        ),
        frequency_penalty=in_range_or(0.0, "frequency_penalty", body.frequency_penalty, -2.0, 2.0),
        presence_penalty=in_range_or(0.0, "presence_penalty", body.presence_penalty, -2.0, 2.0),
        logit_bias=_logit_bias(body),
        seed=None if body.seed is None else in_range("seed", body.seed, -(2**63), 2**63 - 1),
    )


def stops_of(body: SamplingBody) -> tuple[str, ...]:
    """The stop strings."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    at_most("stop", stops, MAX_STOPS, "strings")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            refuse("stop", stop, f"a string of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def min_tokens_of(body: SamplingBody, max_tokens: int | None) -> int:
    """Before which no end comes, as vLLM has it."""
    least = in_range_or(0, "min_tokens", body.min_tokens, 0, 2**31 - 1)
    if max_tokens is not None and least > max_tokens:
        refuse("min_tokens", least, f"at most {max_tokens}, as many as may come")
    return least


def priority_of(priority: int | None) -> int:
    """Which of one client's requests comes first: the lowest."""
    return in_range_or(0, "priority", priority, -MAX_PRIORITY, MAX_PRIORITY)


def num_choices_of(body: SamplingBody) -> int:
    """How many answers one prompt gets."""
    return in_range_or(1, "n", body.n, 1, MAX_CHOICES)


def _logit_bias(body: SamplingBody) -> dict[int, float]:
    biases: dict[int, float] = {}
    at_most("logit_bias", body.logit_bias or (), MAX_BIASES, "tokens")
    for key, bias in (body.logit_bias or {}).items():
        param = f"logit_bias.{key}"
        if re.fullmatch(r"[0-9]{1,9}", key) is None:
            refuse(param, key, "a token id, a whole number from 0 on")
        biases[int(key)] = in_range(param, bias, -100.0, 100.0)
    return biases
