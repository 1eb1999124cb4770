"""Whatever a field is called that says what an answer has to be, the engine is told the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from luceasync.errors import RequestError
from luceasync.request import Constraint, ModelCard, Request
from luceasync.server.http.auth import Caller
from luceasync.server.openai.chat_body import parse_chat
from luceasync.server.openai.request_body import MAX_GRAMMAR_CHARS, MAX_SCHEMA_BYTES

CARD = ModelCard("m", 0, 100, 1, "qwen3")
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")
]


def request(**fields: Any) -> Request:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return parse_chat(json.dumps(body).encode(), CARD, Caller("", "")).request


def constraint(**fields: Any) -> Constraint | None:
    return request(**fields).constraint


def test_an_answer_is_free_where_nothing_is_asked():
    assert constraint() is None
    assert constraint(response_format={"type": "text"}) is None
    assert constraint(response_format=None, guided_json=None, grammar="", guided_choice=[]) is None


@pytest.mark.parametrize(
    ("fields", "param", "strict"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema.schema",
            False,
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            "response_format.json_schema.schema",
            True,
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "response_format.schema",
            False,
        ),
        ({"guided_json": SCHEMA}, "guided_json", True),
        ({"guided_json": json.dumps(SCHEMA)}, "guided_json", True),
        ({"json_schema": SCHEMA}, "json_schema", True),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", True),
    ],
)
def test_a_schema_goes_as_it_was_sent(fields, param, strict):
    found = constraint(**fields)
    assert (found.kind, found.param, found.strict) == ("json_schema", param, strict)
    assert json.loads(found.source) == SCHEMA
    assert list(json.loads(found.source)["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        ({"guided_choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a", "b"]'),
    ],
)
def test_what_is_no_schema(fields, kind, source):
    found = constraint(**fields)
    assert (found.kind, found.source) == (kind, source)
    assert found.param.split(".")[0] in fields


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": "nonsense"}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "grammar": "x"}, "grammar"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "guided_regex"),
        ({"guided_json": {"enum": ["a" * MAX_SCHEMA_BYTES]}}, "guided_json"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"thinking_budget": -1}, "thinking_budget"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(fields, param):
    with pytest.raises(RequestError) as caught:
        request(**fields)
    assert caught.value.param == param
    assert len(str(caught.value)) < 500


def test_calls_are_forced_of_all_tools_or_of_one():
    free = request(tools=TOOLS, tool_choice="auto").prompt
    assert (free.must_call, free.max_calls) == ((), None)
    any_one = request(tools=TOOLS, tool_choice="required").prompt
    assert (any_one.must_call, any_one.max_calls, any_one.tools) == (("f", "g"), None, TOOLS)
    alone = request(tools=TOOLS, tool_choice="required", parallel_tool_calls=False).prompt
    assert alone.max_calls == 1
    choice = {"type": "function", "function": {"name": "g"}}
    named = request(tools=TOOLS, tool_choice=choice).prompt
    assert (named.must_call, named.max_calls, named.tools) == (("g",), 1, TOOLS)


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, None),
        ({"reasoning_effort": "low"}, 2048),
        ({"reasoning_effort": "high"}, None),
        ({"thinking_budget": 100}, 100),
        ({"reasoning_effort": "low", "thinking_token_budget": 5}, 5),
        ({"reasoning_effort": "none"}, 0),
    ],
)
def test_how_long_it_may_think(fields, most):
    asked = request(**fields)
    assert asked.most_reasoning_tokens == most
    told = asked.prompt.template_kwargs
    assert told.get("reasoning_effort") == fields.get("reasoning_effort")
    assert ("enable_thinking" in told) == (fields.get("reasoning_effort") == "none")
