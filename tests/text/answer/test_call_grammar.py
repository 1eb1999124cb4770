"""The parser of a format parses what its grammar generates: calls that match the schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from luceasync.grammar.compiler import Compiler, GrammarVocabulary
from luceasync.grammar.guide import Guide
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


def written(tokenizer: Tokenizer, grammar, rng: random.Random, most: int = 4000) -> str:
    """A random text that the grammar allows."""
    end = min(tokenizer.eos_ids)
    compiler = Compiler(GrammarVocabulary(tokenizer, tiny.VOCAB_SIZE))
    guide = Guide(compiler._compile(compose(calls=grammar)), None, tiny.VOCAB_SIZE // 32)
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


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("max_calls", [1, None])
def test_forced_calls_are_parsed_as_generated(tokenizer, name, max_calls):
    has_quoted_names = {'"name"', '"tool_name"'} & set(FORMATS[name].signs)
    tools = TOOLS if has_quoted_names else TAGGED
    names = [tool["function"]["name"] for tool in tools]
    seen = set()
    for seed in range(12):
        grammar = FORMATS[name].must_call(tools, names, max_calls)
        text = written(tokenizer, grammar, random.Random(seed))
        calls, said = read(name, tools, text)
        assert calls and not said
        assert max_calls is None or len(calls) == 1
        check(calls)
        seen |= {called for called, _ in calls}
    assert seen == set(names)


@pytest.mark.parametrize("name", FORMATS)
def test_only_named_tools_can_be_called(tokenizer, name):
    grammar = FORMATS[name].must_call(TAGGED, ["stop"], 1)
    calls, said = read(name, TAGGED, written(tokenizer, grammar, random.Random(0)))
    assert (calls, said) == ([("stop", {})], "")


@pytest.mark.parametrize("name", ["qwen-json", "qwen-xml", "glm-xml"])
def test_a_call_of_a_strict_tool_within_text_is_valid(tokenizer, name):
    grammar = FORMATS[name].may_call(TAGGED, 1)
    compiler = Compiler(GrammarVocabulary(tokenizer, tiny.VOCAB_SIZE))
    guide = Guide(compiler._compile(compose(calls=grammar)), None, tiny.VOCAB_SIZE // 32)
    for token in tokenizer.encode("to be <or> <tool_call>"):
        guide.consume(token)
    rng, ids = random.Random(1), []
    while not guide.is_over and len(ids) < 400:
        bits = np.unpackbits(guide.mask().view(np.uint8), bitorder="little")
        if bits[min(tokenizer.eos_ids)]:
            break
        guide.consume(token := rng.choice(np.flatnonzero(bits).tolist()))
        ids.append(token)
    text = "to be <or> <tool_call>" + b"".join(map(tokenizer.token_bytes, ids)).decode()
    calls, said = read(name, TAGGED, text)
    assert said.strip() == "to be <or>" and len(calls) == 1
    check(calls)


def test_without_a_strict_tool_calls_are_unconstrained():
    loose = [{"type": "function", "function": {"name": "f"}}]
    assert FORMATS["qwen-json"].may_call(loose, None) is None
    assert FORMATS["llama-json"].may_call(TOOLS, None) is None


def test_arguments_that_are_required_but_not_described_are_allowed():
    def closed(parameters: dict[str, Any]) -> bool:
        tool = {"function": {"name": "f", "parameters": {"type": "object", **parameters}}}
        return ToolFunction.of(tool, "tools[0]").parameters.get("additionalProperties") is False

    properties = {"a": {"type": "string"}}
    assert closed({"properties": properties, "required": ["a"]}) and closed({})
    assert not closed({"properties": properties, "required": ["a", "b"]})
    assert not closed({"required": ["b"]})
