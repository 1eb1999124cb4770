"""The parser of a format parses what its grammar generates: calls that match the schemas."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from luceasync.errors import RequestError
from luceasync.grammar.compiler import Compiler, GrammarVocabulary
from luceasync.grammar.guide import Guide
from luceasync.grammar.matcher import Matcher
from luceasync.grammar.program import compose
from luceasync.request import ArgumentsPiece, CallPiece, TextPiece
from luceasync.text.answer.argument_types import ToolSchemas
from luceasync.text.answer.call_formats import FORMATS
from luceasync.text.answer.call_grammar import ToolFunction
from luceasync.text.tokenizer import Tokenizer
from tests import tiny
from tests.text.answer.written import new_maker

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 8},
                    "unit": {"enum": ["C", "F"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 99},
                    "where": {"$ref": "#/$defs/place"},
                    "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
                },
                "required": ["city", "days"],
                "$defs": {
                    "place": {
                        "type": "object",
                        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
                        "required": ["x"],
                        "additionalProperties": False,
                    }
                },
            },
        },
    },
    {"type": "function", "function": {"name": 'say"so', "parameters": {}}},
]
TAGGED = [TOOLS[0], {"type": "function", "function": {"name": "stop"}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tiny.save(tiny.build("qwen3", 1), tmp_path_factory.mktemp("calls")))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(GrammarVocabulary(tokenizer, tiny.VOCAB_SIZE))


def written(tokenizer: Tokenizer, matcher: Matcher, rng: random.Random, most: int = 4000) -> str:
    """A random text that the grammar of the matcher allows."""
    end = min(tokenizer.eos_ids)
    guide = Guide(matcher.copy(), None, tiny.VOCAB_SIZE // 32)
    ids: list[int] = []
    while not guide.is_over and len(ids) < most:
        bits = np.unpackbits(guide.mask().view(np.uint8), bitorder="little")
        if bits[end] and rng.random() < 0.5:
            break
        guide.consume(token := rng.choice(np.flatnonzero(bits).tolist()))
        ids.append(token)
    assert guide.failure is None and len(ids) < most
    return b"".join(map(tokenizer.token_bytes, ids)).decode().removesuffix("<|im_end|>")


def read(name: str, tools: list[dict[str, Any]], text: str) -> tuple[list[tuple[str, Any]], str]:
    maker = new_maker(name, schemas=ToolSchemas.of(tools))
    names, arguments, said = [], {}, ""
    for piece in maker.make(text, is_last=True):
        match piece:
            case CallPiece(index, _, called):
                names.append(called)
                arguments[index] = ""
            case ArgumentsPiece(index, part):
                arguments[index] += part
            case TextPiece(words):
                said += words
    return [(n, json.loads(arguments[i])) for i, n in enumerate(names)], said


def check(calls: list[tuple[str, Any]]) -> None:
    for name, arguments in calls:
        if name != "get_weather":
            assert arguments == {}
            continue
        assert {"city", "days"} <= arguments.keys() <= {"city", "unit", "days", "where", "tags"}
        assert isinstance(arguments["city"], str) and len(arguments["city"]) <= 8
        assert arguments.get("unit", "C") in ("C", "F")
        assert 1 <= arguments["days"] <= 99
        assert 0 <= arguments.get("where", {"x": 0})["x"] <= 9
        assert len(arguments.get("tags", [])) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("max_calls", [1, None])
def test_forced_calls_are_parsed_as_generated(tokenizer, compiler, name, max_calls):
    has_quoted_names = {'"name"', '"tool_name"'} & set(FORMATS[name].signs)
    tools = TOOLS if has_quoted_names else TAGGED
    names = [tool["function"]["name"] for tool in tools]
    seen = set()
    matcher = compiler._compile(compose(calls=FORMATS[name].must_call(tools, names, max_calls)))
    for seed in range(12):
        if seed >= 6 and seen == set(names):
            break
        text = written(tokenizer, matcher, random.Random(seed))
        calls, said = read(name, tools, text)
        assert calls and not said
        assert max_calls is None or len(calls) == 1
        check(calls)
        seen |= {called for called, _ in calls}
    assert seen == set(names)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_only_named_tools_can_be_called(tokenizer, compiler, name):
    matcher = compiler._compile(compose(calls=FORMATS[name].must_call(TAGGED, ["stop"], 1)))
    calls, said = read(name, TAGGED, written(tokenizer, matcher, random.Random(0)))
    assert (calls, said) == ([("stop", {})], "")


def finished(tokenizer: Tokenizer, grammar, lead: str, seed: int = 1) -> str | None:
    """`lead`, and what the grammar demands after it; None if it does not allow `lead`."""
    compiler = Compiler(GrammarVocabulary(tokenizer, tiny.VOCAB_SIZE))
    guide = Guide(compiler._compile(compose(calls=grammar)), None, tiny.VOCAB_SIZE // 32)
    for token in tokenizer.encode(lead, special=False):
        if not guide.allows(token):
            return None
        guide.consume(token)
    rng, ids = random.Random(seed), []
    while not guide.is_over and len(ids) < 600:
        bits = np.unpackbits(guide.mask().view(np.uint8), bitorder="little")
        if bits[min(tokenizer.eos_ids)]:
            break
        guide.consume(token := rng.choice(np.flatnonzero(bits).tolist()))
        ids.append(token)
    assert len(ids) < 600
    return lead + b"".join(map(tokenizer.token_bytes, ids)).decode()


def opening_of(name: str) -> str:
    """What a call of a tool begins with."""
    row = FORMATS[name]
    if row.looks:
        quoted = '{"name": "get_weather"'
        return "[get_weather(" if name == "pythonic" else row.begin + quoted
    section = row.begin if row.begin != row.anchor else ""
    return (section + row.anchor) or row.openings[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("max_calls", [1, None])
def test_a_voluntary_call_of_a_strict_tool_is_valid(tokenizer, name, max_calls):
    grammar = FORMATS[name].may_call(TAGGED, max_calls)
    lead = "" if FORMATS[name].only_first else "to be <or> "
    text = finished(tokenizer, grammar, lead + opening_of(name))
    calls, said = read(name, TAGGED, text)
    assert calls and lead.strip() == said.strip()
    assert max_calls is None or len(calls) == 1  # else a list may go on
    check(calls)
    assert finished(tokenizer, grammar, "to be {or} not") == "to be {or} not"


def test_an_answer_in_json_is_no_call_of_a_strict_tool(tokenizer):
    for name in ("llama-json", "json-list"):
        grammar = FORMATS[name].may_call(TAGGED, None)
        for text in ('{"title": "a", "of": [1]}', '[{"name": "Ada", "age": 36}]'):
            assert finished(tokenizer, grammar, text) == text
        assert finished(tokenizer, grammar, '[{"x": 1, "name": "get_weather"') is None
    grammar = FORMATS["pythonic"].may_call(TAGGED, None)
    assert finished(tokenizer, grammar, "[other(1)]") == "[other(1)]"


COLOR = {"enum": ["red", "green"]}
# Schemas of one argument, values that they allow, and values that they do not.
VALUES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"$ref": "#/$defs/color"}, ["red"], ["blue", "null"]),
    ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]}, ["green", "null"], ["blue"]),
    ({"type": ["string", "null"], "maxLength": 3}, ["abc", "null"], ["abcd"]),
    ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]}, ["ab", "1234"], ["abc"]),
    ({"allOf": [{"type": "string"}, {"maxLength": 3}, {"minLength": 2}]}, ["ab"], ["a", "abcd"]),
    ({"allOf": [{"$ref": "#/$defs/color"}, {"enum": ["red", "blue"]}]}, ["red"], ["blue", "green"]),
    ({"$ref": "#/properties/b"}, ["red"], ["blue"]),
    ({"$ref": "#"}, ['{"b": "red"}'], ['{"b": "blue"}', "red"]),
    ({"type": "array", "items": {"$ref": "#/properties/b"}}, ['["red"]'], ['["blue"]']),
    ({"type": "string", "pattern": "^[a-z]+/$"}, ["ab/"], ["ab", "aB/"]),
    ({"type": "string", "pattern": "[0-9]"}, ["a1b"], ["ab"]),
    ({"type": "string", "format": "date"}, ["2026-11-27"], ["tomorrow"]),
    ({"oneOf": [{"type": "boolean"}, COLOR]}, ["true", "red"], ["blue"]),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen-xml", "minimax-m2"])
@pytest.mark.parametrize("schema", [each[0] for each in VALUES], ids=str)
def test_a_strict_schema_holds_for_values_without_quotes(tokenizer, name, schema):
    parameters = {
        "properties": {"a": schema, "b": COLOR},
        "$defs": {"color": COLOR},
        "required": ["b"],
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    grammar = FORMATS[name].must_call(
        [{**tool, "function": {**tool["function"], "strict": True}}], ["f"], 1
    )
    lead, end = {
        "qwen-xml": ("<tool_call>\n<function=f>\n<parameter=a>\n", "\n</parameter>\n"),
        "minimax-m2": (
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">',
            "</parameter>\n",
        ),
    }[name]
    [(allowed, refused)] = [(good, bad) for known, good, bad in VALUES if known is schema]
    for value in allowed:
        assert finished(tokenizer, grammar, lead + value + end) is not None, value
    for value in refused:
        assert finished(tokenizer, grammar, lead + value + end) is None, value


def a_tool(strict: bool, **parameters: Any) -> dict[str, Any]:
    function = {"name": "f", "strict": strict, "parameters": parameters}
    return {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("pattern", "values"),
    [
        ("^(?:a|b)$", {"a", "b"}),
        ("^(x|yy)z$", {"xz", "yyz"}),
        (r"^a[\]|]$", {"a]", "a|"}),
        (r"^(?:\\/|/)$", {"\\/", "/"}),
    ],
)
def test_a_pattern_with_choices_in_a_group_is_kept_as_text(tokenizer, compiler, pattern, values):
    tools = [a_tool(True, properties={"a": {"type": "string", "pattern": pattern}}, required=["a"])]
    grammar, seen = FORMATS["qwen-xml"].must_call(tools, ["f"], 1), set()
    matcher = compiler._compile(compose(calls=grammar))
    for seed in range(8):
        calls, _ = read("qwen-xml", tools, written(tokenizer, matcher, random.Random(seed)))
        seen.add(calls[0][1]["a"])
    assert seen == values


@pytest.mark.parametrize("name", ["qwen-xml", "gemma4"])
def test_a_strict_tool_whose_arguments_are_one_of_several_objects(tokenizer, compiler, name):
    either = {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    tools = [a_tool(True, properties={"a": {"const": 1}, "b": {"const": 2}}, **either)]
    matcher = compiler._compile(compose(calls=FORMATS[name].must_call(tools, ["f"], 1)))
    seen = set()
    for seed in range(6):
        text = written(tokenizer, matcher, random.Random(seed))
        calls, _ = read(name, tools, text)
        seen.add(tuple(sorted(calls[0][1])))
    assert seen <= {("a",), ("b",), ("a", "b")} and len(seen) > 1


@pytest.mark.parametrize(
    ("parameters", "valid"),
    [
        (
            {"properties": {"a": {"type": "string", "pattern": "^x$|^yy$"}}, "required": ["a"]},
            lambda arguments: arguments["a"] in ("x", "yy"),
        ),
        (
            {"patternProperties": {"^k[0-9]$": {"const": True}}, "minProperties": 1},
            lambda arguments: arguments and all(re.match(r"k\d$", key) for key in arguments),
        ),
    ],
)
def test_arguments_of_gemma_are_json_where_its_notation_cannot_keep_the_schema(
    tokenizer, compiler, parameters, valid
):
    tools = [a_tool(True, additionalProperties=False, **parameters)]
    compiler._compile(compose(calls=FORMATS["gemma4"].may_call(tools, 1)))
    forced = compiler._compile(compose(calls=FORMATS["gemma4"].must_call(tools, ["f"], 1)))
    for seed in range(4):
        calls, _ = read("gemma4", tools, written(tokenizer, forced, random.Random(seed)))
        assert valid(calls[0][1])


@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "'if'"),
        ({"dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"required": ["c"]}, "'required'"),
        ({"properties": {"a": {"type": "string", "format": "json-pointer"}}}, "a'.*'format'"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, "a'.*'pattern'"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "a'.*'\\$ref'"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {"maxLength": 2}]}}}, "a'.*'oneOf'"),
    ],
)
def test_strict_refuses_what_tags_cannot_keep(parameters, word):
    where = "tools[0].function.parameters"
    schema = {"properties": {"a": {}, "b": {}}, **parameters}
    with pytest.raises(RequestError, match=word) as refused:
        FORMATS["qwen-xml"].must_call([a_tool(True, **schema)], ["f"], 1)
    assert str(refused.value.param).startswith(where)
    assert FORMATS["qwen-xml"].must_call([a_tool(False, **schema)], ["f"], 1).rules


def test_without_a_strict_tool_calls_are_unconstrained():
    loose = [{"type": "function", "function": {"name": "f"}}]
    assert all(row.may_call(loose, None) is None for row in FORMATS.values())


def test_arguments_that_are_required_but_not_described_are_allowed():
    def closed(parameters: dict[str, Any]) -> bool:
        tool = {"function": {"name": "f", "parameters": {"type": "object", **parameters}}}
        return ToolFunction.of(tool, "tools[0]").parameters.get("additionalProperties") is False

    properties = {"a": {"type": "string"}}
    assert closed({"properties": properties, "required": ["a"]}) and closed({})
    assert not closed({"properties": properties, "required": ["a", "b"]})
    assert not closed({"required": ["b"]})
