"""Items become the messages that they are parts of."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from luceasync.errors import RequestError
from luceasync.request import ChatPrompt
from luceasync.server.openai.responses_body import (
    OfferedTools,
    ResponsesBody,
    placed_items,
    prompt_of,
)
from luceasync.server.openai.responses_items import ResponseStore

HI = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
SAID = {"role": "user", "content": "Hi"}


def prompt(given: Any, **fields: Any) -> ChatPrompt:
    body = msgspec.convert({"input": given, **fields}, ResponsesBody)
    tools = OfferedTools.of(body.tools or (), body.tool_choice, body.parallel_tool_calls)
    return prompt_of(body, tools, placed_items(body, "", ResponseStore()))


def test_a_string_and_a_message_of_any_form_are_the_same() -> None:
    assert prompt("Hi").messages == prompt([HI]).messages == prompt([SAID]).messages == [SAID]


def test_developer_messages_and_instructions_are_system_messages() -> None:
    developer = {"type": "message", "role": "developer", "content": "D"}
    said = prompt([developer, developer, HI], instructions="I").messages
    assert [(m["role"], m["content"]) for m in said] == [
        ("system", "I"), ("system", "D"), ("system", "D"), ("user", "Hi"),
    ]  # fmt: skip


def test_a_turn_of_the_model_is_one_message() -> None:
    thought = {
        "type": "reasoning", "id": "r", "content": None, "encrypted_content": None,
        "summary": [{"type": "summary_text", "text": "why"}],
    }  # fmt: skip
    text = {
        "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "look", "annotations": []}],
    }  # fmt: skip
    call = {
        "type": "function_call",
        "call_id": "c1",
        "name": "f",
        "arguments": '{"a":1}',
        "id": "x",
    }
    result = {"type": "function_call_output", "call_id": "c1", "output": "one"}
    parts = {
        "type": "function_call_output",
        "call_id": "c2",
        "output": [{"type": "input_text", "text": "two"}],
    }
    said = prompt(
        [HI, thought, text, call, {**call, "call_id": "c2"}, result, parts, text, HI]
    ).messages
    function = {"name": "f", "arguments": '{"a":1}'}
    assert said == [
        SAID,
        {
            "role": "assistant", "content": "look", "reasoning_content": "why",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": function},
                {"id": "c2", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "assistant", "content": "look"},
        SAID,
    ]  # fmt: skip


def test_functions_are_kept_and_tools_of_openais_servers_left_out() -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    others = [{"type": "file_search"}, {"type": "web_search"}]
    schema = {"type": "object", "properties": {}}
    assert prompt("Hi", tools=[function, *others]).tools == [
        {"type": "function", "function": {"name": "f", "description": "", "parameters": schema}}
    ]
    assert prompt("Hi", tools=others).tools is None
    places = prompt("Hi", tools=[*others, function]).schema_places
    assert places == ("tools[2].parameters",)
    assert prompt("Hi", tools=[function], tool_choice="none").tools is None


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([], "input"),
        ([{"type": "item_reference", "id": "x"}], "input[0].id"),
        ([{"type": "custom_tool_call", "call_id": "c"}], "input[0].name"),
        ([{"type": "custom_tool_call_output", "output": "x"}], "input[0].call_id"),
        ([{"type": "telepathy"}], "input[0].type"),
        ([{"type": "message", "content": "x"}], "input[0].role"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"type": "function_call", "name": "f"}], "input[0].call_id"),
        ([{"type": "function_call_output", "output": "x"}], "input[0].call_id"),
    ],
)
def test_a_wrong_field_is_named(given: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        prompt(given)
    assert caught.value.param == param


def test_a_schema_of_arguments_must_allow_an_object() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "string"}}
    with pytest.raises(RequestError) as caught:
        prompt("Hi", tools=[tool])
    assert caught.value.param == "tools[0].parameters.type"


def test_two_tools_of_one_name_are_refused_unless_they_are_the_same() -> None:
    """Also in namespaces, whose tools are offered under longer names."""
    tool = {"type": "function", "name": "f", "parameters": {}}
    assert len(prompt("Hi", tools=[tool, tool]).tools or ()) == 1
    spaces = [{"type": "namespace", "name": name, "tools": [tool]} for name in ("a", "b")]
    assert len(prompt("Hi", tools=[tool, *spaces]).tools or ()) == 3
    with pytest.raises(RequestError) as caught:
        prompt("Hi", tools=[tool, {**tool, "description": "other"}])
    assert caught.value.param == "tools[1].name"


def test_what_a_model_and_openais_servers_did_stays_in_the_conversation() -> None:
    said = prompt(
        [
            HI,
            {"type": "web_search_call", "id": "w", "status": "completed", "action": {"query": "q"}},
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** x"},
            {"type": "local_shell_call", "id": "l", "call_id": "d", "action": {"command": ["ls"]}},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
            {"type": "function_call_output", "call_id": "d", "output": {"files": ["a"]}},
            {"type": "shell_call_output", "call_id": "e", "output": [{"stdout": "b"}]},
            {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
        ]
    ).messages
    calls = [
        ("c", "patch", '{"input": "*** x"}'),
        ("d", "local_shell", '{"command": ["ls"]}'),
    ]
    assert said[1:] == [
        {
            "role": "assistant",
            "content": '[web_search_call {"action": {"query": "q"}}]',
            "tool_calls": [
                {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, name, arguments in calls
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
        {"role": "tool", "tool_call_id": "d", "content": '{"files": ["a"]}'},
        {"role": "tool", "tool_call_id": "e", "content": '[{"stdout": "b"}]'},
    ]


@pytest.mark.parametrize("arguments", ["", '{"old": "x', "[1]", None, {"a": 1}])
def test_a_call_comes_back_whatever_its_arguments_are(arguments: Any) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    [message] = prompt([call]).messages
    assert message["tool_calls"][0]["function"]["name"] == "f"


def test_a_prompt_is_named_by_its_field() -> None:
    assert prompt("Hi").param == "input"
