"""Request fields: their defaults, ranges and names, and those that are not served."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch

from luceasync.engine.sampling.row import RowSampling, TokenCounts
from luceasync.errors import RequestError
from luceasync.ranking.local import LocalLogits
from luceasync.ranking.logits import NO_TOKEN
from luceasync.request import Constraint, ModelCard, Request, Sampling
from luceasync.server.http.auth import Caller
from luceasync.server.openai.chat_body import parse_chat
from luceasync.server.openai.request_body import (
    MAX_GRAMMAR_CHARS,
    MAX_SCHEMA_BYTES,
    SamplingBody,
    num_choices_of,
    sampling_of,
    stops_of,
)
from luceasync.server.unserved import NEUTRAL, UNSERVED_FIELDS
from tests.chosen import choose
from tests.server.scripted import ScriptedEngine, answer

VOCAB = 100


def test_absent_fields_are_openais_defaults():
    body = SamplingBody()
    assert sampling_of(body) == Sampling(temperature=1.0)
    assert (stops_of(body), num_choices_of(body)) == ((), 1)


def test_every_field_arrives():
    fields = {
        "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
        "frequency_penalty": -2.0, "presence_penalty": 2.0, "seed": -7,
    }  # fmt: skip
    sampling = sampling_of(SamplingBody(**fields, logit_bias={"17": -100.0}))
    assert sampling == Sampling(**fields, logit_bias={17: -100.0})


def test_top_k_minus_one_is_off():
    assert sampling_of(SamplingBody(top_k=-1)).top_k == 0


@pytest.mark.parametrize(("stop", "stops"), [("a", ("a",)), (["a", "b"], ("a", "b"))])
def test_a_single_stop_string_needs_no_list(stop, stops):
    assert stops_of(SamplingBody(stop=stop)) == stops


@pytest.mark.parametrize(
    "body",
    [
        SamplingBody(temperature=2.1),
        SamplingBody(top_p=1.0000001),
        SamplingBody(repetition_penalty=0.0),
        SamplingBody(repetition_penalty=1e-40),
        SamplingBody(repetition_penalty=100.1),
        SamplingBody(seed=2**63),
        SamplingBody(logit_bias={"x": 1.0}),
        SamplingBody(logit_bias={"5": 101.0}),
    ],
)
def test_a_value_out_of_range_is_refused(body):
    with pytest.raises(RequestError, match="expected"):
        sampling_of(body)


RANGES = {
    "temperature": (0.0, 5e-324, 2.0),
    "top_k": (-1, 0, 1, 2**31 - 1),
    "top_p": (0.0, 5e-324, 1.0),
    "min_p": (0.0, 5e-324, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "logit_bias": ({str(i): -100.0 for i in range(VOCAB)}, {"3": 100.0}),
}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(RANGES, 2)))
def test_all_allowed_parameters_can_be_sampled(one, other):
    """Pairs of parameters at the ends of their ranges, after many tokens."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 1000.0
    counts = TokenCounts(range(VOCAB // 2))
    for _ in range(300):
        counts.add(3)
    for this, that in itertools.product(RANGES[one], RANGES[other]):
        sampling = sampling_of(SamplingBody(**{one: this, other: that}))
        [token] = choose(LocalLogits(logits), [RowSampling(sampling, 1, 2, counts)]).token_ids
        assert token != NO_TOKEN, sampling


ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
}


@pytest.mark.parametrize("route", ROUTES)
async def test_min_tokens_reach_the_engine(in_memory, route):
    engine = ScriptedEngine(answer("Hi"))
    async with in_memory(engine) as client:
        for given, expected in ((5, 5), (0, 0), (None, 0)):
            body = {**ROUTES[route], "min_tokens": given, "max_tokens": 9}
            assert (await client.post(route, json=body)).status_code == 200
            assert engine.requests[-1].min_tokens == expected


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("wrong", [10, -1, 2**63, "5", [1], 1.5])
async def test_invalid_min_tokens_are_a_400(in_memory, route, wrong):
    engine = ScriptedEngine(answer("Hi"))
    async with in_memory(engine) as client:
        body = {**ROUTES[route], "min_tokens": wrong, "max_tokens": 9}
        told = await client.post(route, json=body)
    assert told.status_code == 400 and told.json()["error"]["param"] == "min_tokens"
    assert not engine.requests


CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.covered(1)
@pytest.mark.parametrize("name", UNSERVED_FIELDS)
@pytest.mark.parametrize("value", [{"type": "object"}, "x" * 5000, True, 0.7, ["a"]])
async def test_an_unserved_field_is_a_400_that_names_it_without_its_value(in_memory, name, value):
    engine = ScriptedEngine()
    async with in_memory(engine) as client:
        response = await client.post(CHAT, json=BODY | {name: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    assert len(response.content) < 200
    assert engine.requests == []


@pytest.mark.parametrize("name", sorted(NEUTRAL.keys() & set(UNSERVED_FIELDS)))
async def test_the_value_that_changes_nothing_is_no_use(in_memory, name):
    async with in_memory(ScriptedEngine()) as client:
        for value in NEUTRAL[name]:
            response = await client.post(CHAT, json=BODY | {name: json.loads(value)})
            assert response.status_code == 200


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, ["text"]])
async def test_unused_and_unknown_fields_are_ignored(in_memory, value):
    named = dict.fromkeys(UNSERVED_FIELDS, value) | {"function_call": "none"}
    async with in_memory(ScriptedEngine()) as client:
        response = await client.post(CHAT, json=BODY | named | {"parallel_tool_calls": True})
    assert response.status_code == 200


CARD = ModelCard("m", 0, 100, 1, "qwen3")
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}}
    for name in ("f", "g")
]


def request(**fields: Any) -> Request:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return parse_chat(json.dumps(body).encode(), CARD, Caller("", "")).request


def constraint(**fields: Any) -> Constraint | None:
    return request(**fields).constraint


def test_an_answer_is_unconstrained_by_default():
    assert constraint() is None
    assert constraint(response_format={"type": "text"}) is None
    assert constraint(response_format=None, guided_json=None, grammar=None) is None


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
def test_a_schema_is_passed_on_as_it_was_sent(fields, param, strict):
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
def test_other_constraints(fields, kind, source):
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
        ({"guided_json": ""}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": " \n"}, "guided_grammar"),
        ({"grammar": ""}, "grammar"),
        ({"ebnf": ""}, "ebnf"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
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
def test_an_invalid_constraint_is_refused_by_its_name(fields, param):
    with pytest.raises(RequestError) as caught:
        request(**fields)
    assert caught.value.param == param
    assert len(str(caught.value)) < 500


def test_calls_of_all_tools_or_of_one_can_be_forced():
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
def test_the_reasoning_budget(fields, most):
    asked = request(**fields)
    assert asked.most_reasoning_tokens == most
    told = asked.prompt.template_kwargs
    assert told.get("reasoning_effort") == fields.get("reasoning_effort")
    assert ("enable_thinking" in told) == (fields.get("reasoning_effort") == "none")
