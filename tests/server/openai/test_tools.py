"""A tool is a function with a name, or the refusal names what is wrong with it."""

from __future__ import annotations

import pytest

from luceasync.errors import RequestError
from luceasync.server.openai.chat_body import check_calls, check_tools
from tests.server.scripted import ScriptedEngine

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
def test_what_openai_takes_is_taken(tool):
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
