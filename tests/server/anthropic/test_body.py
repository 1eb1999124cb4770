"""Blocks become template messages; marks keep their places and change no text."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from luceasync.errors import RequestError
from luceasync.request import ChatPrompt
from luceasync.server.anthropic.body import CountBody, prompt_of

HI = {"role": "user", "content": "Hi"}
RESULT = {"role": "user", "content": [{"type": "tool_result"}]}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}
MARK = {"cache_control": {"type": "ephemeral"}}


def prompt(messages: list[Any], **fields: Any) -> ChatPrompt:
    body = {"model": "m", "messages": messages, **fields}
    return prompt_of(msgspec.convert(body, CountBody))


def refused(messages: list[Any], **fields: Any) -> str | None:
    with pytest.raises(RequestError) as caught:
        prompt(messages, **fields)
    return caught.value.param


def test_text_is_the_same_as_a_string_and_as_a_block_with_any_mark() -> None:
    block = {"role": "user", "content": [{"type": "text", "text": "Hi", **MARK}]}
    assert prompt([HI], system="S") == prompt(
        [block], system=[{"type": "text", "text": "S", **MARK}]
    )
    assert prompt([HI], system="S").messages == [{"role": "system", "content": "S"}, HI]


def test_a_billing_header_is_left_out() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.99d;"}
    other = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.d87;"}
    text = {"type": "text", "text": "S"}
    assert prompt([HI], system=[billing, text]) == prompt([HI], system=[other, text])
    assert prompt([HI], system=[billing]).messages == [HI]


def test_system_messages_may_stand_between_others() -> None:
    late = {"role": "system", "content": "late"}
    assert prompt([HI, late, HI]).messages == [HI, late, HI]


def test_calls_and_their_results() -> None:
    said = prompt(
        [
            HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "why", "signature": "s"},
                    {"type": "text", "text": "look"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "ä"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": "one",
                        "is_error": False,
                    },
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "content": [{"type": "text", "text": "two"}],
                    },
                    {"type": "text", "text": "go on"},
                ],
            },
        ]
    ).messages[1:]
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": "ä"}'}}
    assert said == [
        {"role": "assistant", "content": "look", "reasoning_content": "why", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "name": "f", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": "two"},
        {"role": "user", "content": "go on"},
    ]


def test_results_alone_make_no_user_message() -> None:
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}
    assert prompt([result]).messages == [{"role": "tool", "tool_call_id": "t", "content": ""}]


def test_the_clients_tools_are_kept_and_others_left_out() -> None:
    schema = {"type": "object", "properties": {}}
    own = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    theirs = {"type": "web_search_20250305", "name": "web_search"}
    function = {"name": "f", "description": "d", "parameters": schema}
    assert prompt([HI], tools=[own, theirs]).tools == [{"type": "function", "function": function}]
    assert prompt([HI], tools=[own], tool_choice={"type": "none"}).tools is None
    assert prompt([HI], tools=[theirs]).tools is None


def test_one_call_at_most_without_parallel_calls() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert prompt([HI], tool_choice=choice).max_calls == 1
    assert prompt([HI]).max_calls is None


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [(None, False), ({"type": "disabled"}, False), ({"type": "adaptive"}, True),
     ({"type": "enabled", "budget_tokens": 1024}, True)],
)  # fmt: skip
def test_thinking_is_off_unless_it_is_asked_for(thinking: Any, expected: bool) -> None:
    assert prompt([HI], thinking=thinking).template_kwargs == {"enable_thinking": expected}


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([], {}, "messages"),
        ([HI, {"role": "assistant", "content": "so"}], {}, "messages[-1].role"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "messages[0].content[0].text"),
        ([RESULT], {}, "messages[0].content[0].tool_use_id"),
        ([CALL, HI], {}, "messages[0].content[0].name"),
        ([HI], {"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ([HI], {"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ([HI], {"tools": 2 * [{"name": "f", "input_schema": {}}]}, "tools[1].name"),
        ([HI], {"tools": [{"name": "f", "input_schema": {"type": "array"}}]},
         "tools[0].input_schema.type"),
        ([HI], {"thinking": {"type": "loud"}}, "thinking.type"),
        ([HI] * 9000, {}, "messages"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(messages: list[Any], fields: dict[str, Any], param: str) -> None:
    assert refused(messages, **fields) == param


def test_schema_places_count_tools_that_are_left_out() -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"name": "f", "input_schema": {"type": "object"}},
    ]
    said = prompt([HI], tools=tools)
    assert said.schema_places == ("tools[1].input_schema",) and said.tools is not None


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


BILLING = text("x-anthropic-billing-header: cc_version=1;")


def test_marks_are_characters_of_the_joined_text():
    said = prompt(
        [{"role": "user", "content": [text("Läuse"), text("and", **MARK), text("fleas")]}],
        system=[BILLING, text("static", **MARK), text("of today", **MARK)],
    )
    assert said.messages[0]["content"] == "static\nof today"
    assert said.messages[1]["content"] == "Läuse\nand\nfleas"
    assert said.marks == ((0, len("static")), (1, len("Läuse\nand")))


def test_tool_results_have_marks_too():
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("x", **MARK), text("y")]}
    said = prompt([HI, {"role": "user", "content": [result, text("go")]}])
    assert said.marks == ((1, 1),) and said.messages[1]["content"] == "x\ny"


def test_moving_a_mark_changes_no_text():
    plain = prompt([HI], system=[text("a"), text("b")])
    for marked in ([text("a", **MARK), text("b")], [text("a"), text("b", **MARK)]):
        said = prompt([HI], system=marked)
        assert (said.messages, said.tools) == (plain.messages, plain.tools)


def test_more_than_four_marks_are_refused():
    blocks = [text("a", **MARK) for _ in range(5)]
    message = {"role": "user", "content": blocks}
    assert prompt([{"role": "user", "content": blocks[:4]}]).marks
    assert refused([message]) == "messages[0].content[4].cache_control"
    assert refused([HI], system=blocks) == "system[4].cache_control"
    tools = [{"name": "f", "input_schema": {}, **MARK} for _ in range(3)]
    assert refused([HI], system=blocks[:2], tools=tools) == "system[1].cache_control"


@pytest.mark.parametrize(
    ("mark", "field"),
    [
        ({"type": "persistent"}, "type"),
        ({"type": "ephemeral", "ttl": "2h"}, "ttl"),
        ({"type": "x" * 9999}, "type"),
    ],
)
def test_an_invalid_mark_is_refused_with_its_path(mark, field):
    where = f"system[0].cache_control.{field}"
    assert refused([HI], system=[text("a", cache_control=mark)]) == where


@pytest.mark.parametrize("mark", [None, {"type": "ephemeral", "ttl": "1h", "scope": "global"}])
def test_unknown_fields_of_a_mark_are_ignored(mark):
    assert prompt([HI], system=[text("a", cache_control=mark)])
