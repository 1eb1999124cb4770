"""A chat body becomes a Request, or a refusal that names the field."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.errors import RequestError
from luceasync.request import ChatPrompt, ModelCard, Request, Sampling
from luceasync.server.failures import describe
from luceasync.server.fields import MAX_VALUES
from luceasync.server.http.auth import Caller
from luceasync.server.openai.chat_body import (
    ChatBody,
    ParsedChat,
    check_calls,
    check_tools,
    parse_chat,
)
from tests.server.scripted import ScriptedEngine

USER = {"role": "user", "content": "Hi"}
TINY = ModelCard("tiny", 0, 4096, 1, "qwen3", aliases=("small",))
NO_PARAMETERS = {"type": "object", "properties": {}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": NO_PARAMETERS},
}
TRUSTED = Caller("key", may_salt=True)


def parse(**fields: Any) -> ParsedChat:
    return parse_chat(json.dumps({"messages": [USER]} | fields).encode(), TINY, TRUSTED)


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    return caught.value


def test_absent_and_null_fields_mean_openais_defaults():
    names = ("temperature", "top_p", "max_tokens", "stop", "n", "seed", "tools", "cache_salt")
    expected = Request(
        ChatPrompt([USER]), sampling=Sampling(temperature=1.0), tenant="key", client="key"
    )
    assert parse().request == parse(**dict.fromkeys(names)).request == expected


def test_every_sampling_field_reaches_the_request():
    fields = {
        "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
        "frequency_penalty": -2, "presence_penalty": 2, "seed": -7,
    }  # fmt: skip
    sampling = parse(**fields, logit_bias={"17": -100}).request.sampling
    assert sampling == Sampling(**fields, logit_bias={17: -100.0})


def test_the_other_fields_reach_the_request():
    request = parse(
        n=2, stop="a", max_tokens=5, ignore_eos=True, tools=[TOOL], logprobs=True, top_logprobs=3,
        chat_template_kwargs={"enable_thinking": False},
    ).request  # fmt: skip
    assert (request.num_choices, request.stop, request.max_tokens) == (2, ("a",), 5)
    assert (request.ignore_eos, request.prompt.tools, request.top_logprobs) == (True, [TOOL], 3)
    assert request.prompt.template_kwargs == {"enable_thinking": False}


def test_max_completion_tokens_wins_over_its_old_name():
    assert parse(max_tokens=5, max_completion_tokens=9).request.max_tokens == 9


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_prompt_may_be_kept_without_an_answer(name):
    request = parse(keep_prefix=True, **{name: 0}).request
    assert (request.keep_prefix, request.max_tokens) == (True, 0)
    assert refusal(keep_prefix=False, **{name: 0}).param == name


def test_tools_alone_can_be_kept():
    tools = [TOOL]
    request = parse(messages=[], tools=tools, keep_prefix=True, max_tokens=0).request
    assert (request.prompt.messages, request.prompt.tools) == ([], tools)
    assert refusal(messages=[], tools=tools).param == "messages"
    assert refusal(messages=[], keep_prefix=True, max_tokens=0).param == "messages"


def test_a_salt_narrows_the_tenant():
    assert parse().request.tenant == "key"
    assert parse(cache_salt="a").request.tenant not in ("key", parse(cache_salt="b").request.tenant)


def test_logprobs_alone_ask_for_the_chosen_tokens():
    assert parse(logprobs=True).request.top_logprobs == 0
    assert parse(logprobs=False).request.top_logprobs is None


def test_stream_options_are_read():
    options = {"include_usage": True, "continuous_usage_stats": True}
    call = parse(stream=True, stream_options=options)
    assert (call.stream, call.include_usage, call.continuous_usage) == (True, True, True)


def test_unknown_fields_are_ignored():
    assert parse(safety_identifier="x", store=False, metadata={"a": [1]}) == parse()


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    assert parse(messages=[{"role": "user", "content": parts}]).request.prompt.messages == [
        {"role": "user", "content": "a\nb"}
    ]


def test_every_role_is_accepted_and_developer_means_system():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be brief"},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    expected = [
        {"role": "system", "content": "Be brief"},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        messages[3],
    ]
    assert parse(messages=messages).request.prompt.messages == expected


def test_tool_choice_none_removes_the_tools():
    tools = [TOOL]
    assert parse(tools=tools, tool_choice="none").request.prompt.tools is None
    assert parse(tools=tools, tool_choice="auto").request.prompt.tools == tools


@pytest.mark.parametrize(
    ("param", "values"),
    [
        ("temperature", [-0.1, 2.1, "1", [], True]),
        ("top_p", [-1, 1.1]),
        ("top_k", [-2, 1.5]),
        ("min_p", [-0.1, 1.1]),
        ("repetition_penalty", [0, -1]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("presence_penalty", [-2.1, 2.1]),
        ("seed", [2**63, 1.5, "7"]),
        ("n", [0, 17]),
        ("max_tokens", [0, -2, "many"]),
        ("max_completion_tokens", [0]),
        ("top_logprobs", [1]),
        ("stop", [["a"] * 17, [""], 3]),
        ("stream", ["yes", 1]),
        ("stream_options.include_usage", [3]),
        ("logit_bias", [[]]),
        ("tool_choice", ["required", "any", {"type": "function"}]),
        ("response_format.type", ["json", "xml"]),
        ("messages", [[], None, "Hi", {}]),
        ("cache_salt", ["", "x" * 257, 7]),
        ("keep_prefix", ["yes", 1]),
    ],
)
def test_a_wrong_value_is_refused_under_its_name(param, values):
    for value in values:
        name, _, inner = param.partition(".")
        error = refusal(**{name: {inner: value} if inner else value})
        assert (error.param, error.status) == (param, 400), value


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "Hi"}, "messages[1]"),
        ({"role": "function", "content": "Hi"}, "messages[1].role"),
        ({"role": "user", "content": 3}, "messages[1].content"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": ["Hi"]}, "messages[1].content[0]"),
        ("Hi", "messages[1]"),
    ],
)
def test_a_wrong_message_is_refused_with_its_path(message, param):
    assert refusal(messages=[USER, message]).param == param


@pytest.mark.parametrize(("key", "bias"), [("x", 1), ("-1", 1), ("1.5", 1), ("5", 101)])
def test_logit_bias_names_the_key(key, bias):
    assert refusal(logit_bias={key: bias}).param == f"logit_bias.{key}"


def test_top_logprobs_is_bounded():
    assert refusal(logprobs=True, top_logprobs=21).param == "top_logprobs"


def test_another_model_is_not_found():
    error = refusal(model="gpt-4o")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert str(error).endswith("This server serves `tiny` or `small`.")
    assert len(str(refusal(model="x" * 10_000))) < 300
    assert parse(model="tiny").request == parse(model="small").request == parse().request


def test_a_star_among_the_aliases_matches_every_name():
    card = replace(TINY, aliases=("*", "small"))
    body = json.dumps({"messages": [USER], "model": "gpt-4o"}).encode()
    assert parse_chat(body, card, TRUSTED) == parse()
    assert card.names == ("tiny", "small")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"\xff", b'{"messages": "\\ud800"}', b'{"messages": ["\xff"]}',
        b'{"x":' + b"[" * 100_000, b'{"messages": [], "seed": ' + b"9" * 5000 + b"}",
        b'{"messages": [], "top_p": 1e999}',
    ],
)  # fmt: skip
def test_what_is_not_a_json_object_is_refused(body):
    with pytest.raises(RequestError) as caught:
        parse_chat(body, TINY, TRUSTED)
    assert caught.value.status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [*ChatBody.__struct_fields__]
MESSAGES = st.lists(
    st.fixed_dictionaries({}, optional={"role": st.sampled_from(["user", "tool"]), "content": JSON})
)


@pytest.mark.slow
@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON), st.none() | MESSAGES)
def test_any_json_is_a_request_or_a_refusal(fields, messages):
    try:
        call = parse_chat(json.dumps({"messages": messages} | fields).encode(), TINY, TRUSTED)
    except RequestError as error:
        assert error.status in (400, 404)
    else:
        assert call.request.prompt.messages


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_are_a_request_or_a_refusal(body):
    with pytest.raises(RequestError):
        parse_chat(body, TINY, TRUSTED)


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "most", "make"),
    [
        ("messages", 8192, lambda n: [USER] * n),
        ("tools", 1024, lambda n: [TOOL] * n),
        ("logit_bias", 1024, lambda n: {str(i): 1 for i in range(n)}),
        ("stop", 16, lambda n: ["a"] * n),
        ("stop", 256, lambda n: "a" * n),
    ],
)
def test_fields_are_bounded(field, most, make):
    parse(**{field: make(most)})
    assert refusal(**{field: make(most + 1)}).param == field


@pytest.mark.parametrize(
    ("name", "most"), [("content", 8192), ("tool_calls", 1024)], ids=["parts", "calls"]
)
def test_messages_are_bounded(name, most):
    def said(num: int) -> dict[str, Any]:
        item = {"type": "text", "text": "a"} if name == "content" else {"function": {"name": "a"}}
        return {"role": "assistant", name: [item] * num}

    parse(messages=[said(most)])
    assert refusal(messages=[said(most + 1)]).param == f"messages[0].{name}"


def test_a_body_with_too_many_values_is_refused_before_decoding():
    body = b'{"messages": [' + b"{}," * MAX_VALUES
    with pytest.raises(RequestError, match="too many values; at most 131072"):
        parse_chat(body, TINY, TRUSTED)


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "fields",
    [
        {"model": LONG},
        {"stop": LONG},
        {"messages": [{"role": LONG}]},
        {"messages": [{"role": "user", "content": [{"type": LONG}]}]},
        {"logit_bias": {LONG: 1}},
        {"tool_choice": LONG},
        {"tool_choice": {LONG: [LONG] * 9}},
        {"response_format": {"type": LONG}},
        {"cache_salt": LONG},
        {"top_k": 10**400},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_refusal_repeats_only_the_beginning_of_a_wrong_value(fields):
    failure = describe(refusal(**fields))
    assert len(failure.message) + len(failure.param or "") < 1000


CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
GOOD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}


def function(**fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "add"} | fields}


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({}, "type"),
        ({"type": "web_search"}, "type"),
        ({"type": "function"}, "function"),
        ({"type": "function", "function": "add"}, "function"),
        (function(name=""), "function.name"),
        (function(name=7), "function.name"),
        (function(name=None), "function.name"),
        (function(parameters="x" * 5000), "function.parameters"),
        (function(parameters=[]), "function.parameters"),
        (function(parameters={"type": "array"}), "function.parameters.type"),
        (function(parameters={"type": ["string", "null"]}), "function.parameters.type"),
        (function(parameters={"type": {}}), "function.parameters.type"),
        (function(description={}), "function.description"),
        ({**GOOD, "function": {**GOOD["function"], "description": "other"}}, "function.name"),
        ({"type": "custom", "custom": {"name": GOOD["function"]["name"]}}, "custom.name"),
    ],
)
def test_a_malformed_tool_is_named(tool, param):
    with pytest.raises(RequestError) as caught:
        check_tools([GOOD, tool])
    assert caught.value.param == f"tools[1].{param}"
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "tool",
    [
        GOOD,
        function(),
        function(parameters=None, description=None),
        function(parameters={"type": ["object", "null"]}),
        function(parameters={"$ref": "#/$defs/a", "$defs": {"a": {}}}),
    ],
)
def test_valid_tools_are_accepted(tool):
    check_tools([tool])


async def test_a_request_with_a_malformed_tool_is_a_400(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        response = await client.post(CHAT, json=BODY | {"tools": [{}]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools[0].type")


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ({}, "function.name"),
        ({"function": None}, "function.name"),
        ({"function": []}, "function"),
        ({"function": "add"}, "function"),
        ({"function": {"name": None}}, "function.name"),
        ({"function": {"name": ["add"]}}, "function.name"),
        ({"function": {"name": "add", "arguments": [1]}}, "function.arguments"),
        ({"function": {"name": "add", "arguments": 1}}, "function.arguments"),
    ],
)
def test_a_malformed_call_of_an_earlier_turn_is_named(call, param):
    good = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    with pytest.raises(RequestError) as caught:
        check_calls("messages[3].tool_calls", [good, call])
    assert caught.value.param == f"messages[3].tool_calls[1].{param}"


@pytest.mark.parametrize("arguments", ["{}", "", {}, {"a": 1}, None])
def test_arguments_are_text_or_an_object(arguments):
    check_calls("calls", [{"function": {"name": "add", "arguments": arguments}}])
    check_calls("calls", [{"name": "add", "arguments": arguments}])


async def test_a_request_with_a_malformed_call_is_a_400(in_memory):
    messages = [*BODY["messages"], {"role": "assistant", "tool_calls": [{"function": None}]}]
    async with in_memory(ScriptedEngine()) as client:
        response = await client.post(CHAT, json={"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[1].tool_calls[0].function.name"
