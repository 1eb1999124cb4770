"""The request fields that OpenAI's endpoints share, with their ranges and defaults.

Includes fields of vLLM, SGLang and llama.cpp that clients send too. Whether a constraint compiles
is checked by the engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.datastructures import Headers

from luceasync.errors import RequestError
from luceasync.request import Constraint, Prompt, Request, Sampling
from luceasync.server.fields import (
    MAX_INT,
    at_most,
    conversation_id_of,
    in_range,
    in_range_or,
    pins_of,
    refuse,
    temperature_of,
    top_p_of,
)
from luceasync.server.http.auth import Caller
from luceasync.server.unserved import ABSENT, UnservedBody

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_TOKENS = 64
NO_LIMIT = -1  # of tokens, as LM Studio and llama.cpp write it
MAX_STOP_CHARS = 256
MAX_BIASES = 1024
MAX_PRIORITY = 1000
MAX_SCHEMA_BYTES = 256 << 10
MAX_GRAMMAR_CHARS = 32 << 10  # of a regular expression or a grammar
MAX_CHOICE_TEXTS = 1024
TOOL_CHOICES = "'none', 'auto', 'required', or one of the tools: {'type': 'function', ...}"
FORMATS = "'text', 'json_object' or 'json_schema'"
ToolChoice = str | dict[str, Any]


class JsonSchema(msgspec.Struct):
    """`schema` is kept undecoded; OpenAI allows it to be absent."""

    name: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """`schema` beside the type "json_object" comes from llama.cpp."""

    type: str
    json_schema: JsonSchema | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class StructuredOutputs(msgspec.Struct):
    """vLLM's field of that name."""

    json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class ConstraintBody(UnservedBody, kw_only=True):
    """Fields that constrain the answer's text: OpenAI's, vLLM's, SGLang's and llama.cpp's."""

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


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(ConstraintBody, kw_only=True):
    """The fields that chat and text completions share."""

    priority: int | None = None
    prompt_cache_key: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    n_predict: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None


def request_of(
    body: SamplingBody, prompt: Prompt, max_tokens: int | None, caller: Caller, headers: Headers
) -> Request:
    """The Request that follows from the shared fields. Raises RequestError."""
    return Request(
        prompt,
        sampling=sampling_of(body),
        max_tokens=max_tokens,
        min_tokens=min_tokens_of(body, max_tokens),
        stop=stops_of(body),
        stop_token_ids=_stop_tokens(body),
        ignore_eos=bool(body.ignore_eos),
        num_choices=num_choices_of(body),
        pins=pins_of(body),
        constraint=constraint_of(body),
        priority=priority_of(body.priority),
        tenant=caller.tenant(body.cache_salt),
        client=caller.client,
        conversation=conversation_id_of(headers, body.prompt_cache_key),
    )


def sampling_of(body: SamplingBody) -> Sampling:
    """How tokens are sampled. Absent fields have OpenAI's defaults: the temperature is 1."""
    return Sampling(
        temperature=temperature_of(body),
        top_k=max(0, in_range_or(0, "top_k", body.top_k, -1, MAX_INT)),
        top_p=top_p_of(body),
        min_p=in_range_or(0.0, "min_p", body.min_p, 0.0, 1.0),
        repetition_penalty=_repetition_penalty(body),
        frequency_penalty=in_range_or(0.0, "frequency_penalty", body.frequency_penalty, -2.0, 2.0),
        presence_penalty=in_range_or(0.0, "presence_penalty", body.presence_penalty, -2.0, 2.0),
        logit_bias=_logit_bias(body),
        seed=None if body.seed is None else in_range("seed", body.seed, -(2**63), 2**63 - 1),
    )


def _repetition_penalty(body: SamplingBody) -> float:
    """The repetition penalty, under vLLM's name for it or under llama.cpp's and Ollama's."""
    for param in ("repetition_penalty", "repeat_penalty"):
        penalty: float | None = getattr(body, param)
        if penalty is not None:
            return in_range(param, penalty, 0.01, 100.0)
    return 1.0


def _logit_bias(body: SamplingBody) -> dict[int, float]:
    biases: dict[int, float] = {}
    at_most("logit_bias", body.logit_bias or (), MAX_BIASES, "tokens")
    for key, bias in (body.logit_bias or {}).items():
        param = f"logit_bias.{key}"
        if re.fullmatch(r"[0-9]{1,9}", key) is None:
            refuse(param, key, "a token id, a whole number from 0")
        biases[int(key)] = in_range(param, bias, -100.0, 100.0)
    return biases


def stops_of(body: SamplingBody) -> tuple[str, ...]:
    """The stop strings. Raises RequestError."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    at_most("stop", stops, MAX_STOPS, "strings")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            refuse("stop", stop, f"a string of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _stop_tokens(body: SamplingBody) -> tuple[int, ...]:
    ids = body.stop_token_ids or []
    at_most("stop_token_ids", ids, MAX_STOP_TOKENS, "tokens")
    for i, token_id in enumerate(ids):
        in_range(f"stop_token_ids[{i}]", token_id, 0, MAX_INT)
    return tuple(ids)


def max_tokens_of(body: SamplingBody, *names: str, least: int = 1) -> int | None:
    """The maximum number of tokens in the answer: the first of the fields `names` and `max_tokens`
    that is present, but at most `n_predict`; None: no limit. Raises RequestError below `least`.
    """
    named = next((one for one in (*names, "max_tokens") if getattr(body, one) is not None), None)
    limits: list[int] = []
    for param in filter(None, (named, "n_predict")):
        most: int | None = getattr(body, param)
        if most is not None and most != NO_LIMIT:
            limits.append(in_range(param, most, least, MAX_INT))
    return min(limits, default=None)


def min_tokens_of(body: SamplingBody, max_tokens: int | None) -> int:
    """The number of tokens before which the answer may not end, as in vLLM."""
    least = in_range_or(0, "min_tokens", body.min_tokens, 0, MAX_INT)
    if max_tokens is not None and least > max_tokens:
        refuse("min_tokens", least, f"at most {max_tokens}, the maximum of tokens")
    return least


def priority_of(priority: int | None) -> int:
    """The rank among the requests of one client, lowest first."""
    return in_range_or(0, "priority", priority, -MAX_PRIORITY, MAX_PRIORITY)


def num_choices_of(body: SamplingBody) -> int:
    """The number of answers to each prompt."""
    return in_range_or(1, "n", body.n, 1, MAX_CHOICES)


def must_call(choice: ToolChoice | None, tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The names of the `tools` whose calls the answer must consist of; empty: the model chooses.

    Raises RequestError for an invalid choice, and for a tool that is not in `tools`.
    """
    if choice in (None, "none", "auto"):
        return ()
    names = tuple(tool["function"]["name"] for tool in tools)
    if choice == "required":
        return names or refuse("tool_choice", choice, "'tools' in the same request")
    if not isinstance(choice, dict) or choice.get("type") != "function":
        refuse("tool_choice", choice, TOOL_CHOICES)
    function = choice.get("function", choice)  # the Responses API has the name at this level
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        refuse("tool_choice", choice, "the name of one of 'tools'")
    return (str(name),)


def allowed_tools(choice: ToolChoice | None) -> tuple[ToolChoice | None, list[Any] | None]:
    """The choice, and the tools that it is restricted to, which OpenAI's type "allowed_tools"
    lists; None: all tools. Raises RequestError.
    """
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return choice, None
    inner = choice.get("allowed_tools", choice)  # the Responses API has both at this level
    mode, tools = (inner.get("mode"), inner.get("tools")) if isinstance(inner, dict) else ("", ())
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        refuse("tool_choice", choice, "a 'mode', 'auto' or 'required', and a list of 'tools'")
    return mode, [_named_tool(tool) if isinstance(tool, dict) else tool for tool in tools]


def _named_tool(tool: dict[str, Any]) -> Any:
    """The object that holds the name of a listed tool: the chat API nests it one level deeper."""
    return tool.get("function", tool.get("custom", tool))


def name_of(tool: Any) -> object:
    """The name of a tool in a choice's list."""
    return tool.get("name") if isinstance(tool, dict) else None


def max_calls(choice: ToolChoice | None, parallel: bool | None) -> int | None:
    """The maximum number of calls in an answer: one if a tool is named or calls may not be
    parallel; None: unlimited.
    """
    return 1 if parallel is False or isinstance(choice, dict) else None


def constraint_of(body: ConstraintBody) -> Constraint | None:
    """The constraint on the answer's text, if any. Raises RequestError for more than one, and for a
    malformed one.
    """
    found = [*_of_response_format(body.response_format), *_of_fields(body)]
    found += _of_structured_outputs(body.structured_outputs)
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        message = f"'{first}' and '{second}' both constrain the answer: leave one out."
        raise RequestError(message, param=second)
    return found[0] if found else None


def schema_constraint(schema: msgspec.Raw, param: str, *, strict: bool) -> Constraint:
    """A constraint to a JSON schema, which some clients send as a string of JSON."""
    source = bytes(schema)
    if len(source) > MAX_SCHEMA_BYTES:
        message = f"'{param}' has {len(source)} bytes; at most {MAX_SCHEMA_BYTES} are allowed."
        raise RequestError(message, param=param)
    if source.startswith(b'"'):
        source = msgspec.json.decode(source, type=str).strip().encode()
    if not source.startswith(b"{"):
        raise RequestError(f"Invalid value for '{param}': expected a JSON schema.", param=param)
    return Constraint("json_schema", source.decode(), param, strict)


def _of_response_format(response_format: ResponseFormat | None) -> Iterator[Constraint]:
    if response_format is None or response_format.type == "text":
        return
    if response_format.type == "json_schema":
        where = "response_format.json_schema"
        wrapped = response_format.json_schema or JsonSchema()
        if bytes(wrapped.schema) in ABSENT:
            raise RequestError(f"'{where}.schema' is missing.", param=f"{where}.schema")
        yield schema_constraint(wrapped.schema, f"{where}.schema", strict=wrapped.strict is True)
    elif response_format.type == "json_object" and bytes(response_format.schema) not in ABSENT:
        yield schema_constraint(response_format.schema, "response_format.schema", strict=False)
    elif response_format.type == "json_object":
        yield Constraint("json_object", "", "response_format")
    else:
        refuse("response_format.type", response_format.type, FORMATS)


def _of_fields(body: ConstraintBody) -> Iterator[Constraint]:
    for param in ("guided_json", "json_schema"):
        if bytes(schema := getattr(body, param)) not in ABSENT:
            yield schema_constraint(schema, param, strict=True)
    named = ("guided_regex", "guided_grammar", "guided_choice")
    yield from _named(named, body.guided_regex, body.guided_grammar, body.guided_choice)
    yield from _named(("regex", "grammar", ""), body.regex, body.grammar)
    yield from _named(("", "ebnf", ""), None, body.ebnf)


def _of_structured_outputs(outputs: StructuredOutputs | None) -> Iterator[Constraint]:
    if outputs is None:
        return
    where = "structured_outputs"
    if bytes(outputs.structural_tag) not in ABSENT:
        message = f"'{where}.structural_tag' is not served here: leave it out."
        raise RequestError(message, param=f"{where}.structural_tag")
    if bytes(outputs.json) not in ABSENT:
        yield schema_constraint(outputs.json, f"{where}.json", strict=True)
    if outputs.json_object:
        yield Constraint("json_object", "", f"{where}.json_object")
    named = (f"{where}.regex", f"{where}.grammar", f"{where}.choice")
    yield from _named(named, outputs.regex, outputs.grammar, outputs.choice)


def _named(
    params: tuple[str, str, str],
    regex: str | None,
    grammar: str | None,
    choice: list[str] | None = None,
) -> Iterator[Constraint]:
    """The constraints that are present; `params` are the names of the three fields."""
    if regex is not None:
        yield Constraint("regex", _bounded(params[0], regex), params[0])
    if grammar is not None:
        yield Constraint("grammar", _bounded(params[1], grammar), params[1])
    if choice is not None:
        if not choice:
            refuse(params[2], choice, "at least one text")
        at_most(params[2], choice, MAX_CHOICE_TEXTS, "texts")
        yield Constraint("choice", _bounded(params[2], json.dumps(choice)), params[2])


def _bounded(param: str, text: str) -> str:
    """Return `text` unless it is empty or too long: an answer without the requested constraint is
    worse than none.
    """
    if not text.strip():
        refuse(param, text, "a text that is not empty, or no such field")
    if len(text) > MAX_GRAMMAR_CHARS:
        message = f"'{param}' has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are allowed."
        raise RequestError(message, param=param)
    return text
