"""Marks of what to cache: where they lie is told, what they say is checked, the text stays."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.anthropic.test_conversation import HI, MARK, prompt, refused


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


BILLING = text("x-anthropic-billing-header: cc_version=1;")


def test_places_are_characters_of_what_is_said():
    said = prompt(
        [{"role": "user", "content": [text("Läuse"), text("and", **MARK), text("fleas")]}],
        system=[BILLING, text("static", **MARK), text("of today", **MARK)],
    )
    assert said.messages[0]["content"] == "static\nof today"
    assert said.messages[1]["content"] == "Läuse\nand\nfleas"
    assert said.marks == ((0, len("static")), (1, len("Läuse\nand")))


def test_in_what_a_tool_says_too():
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("x", **MARK), text("y")]}
    said = prompt([HI, {"role": "user", "content": [result, text("go")]}])
    assert said.marks == ((1, 1),) and said.messages[1]["content"] == "x\ny"


def test_a_mark_that_wanders_changes_nothing_that_is_said():
    plain = prompt([HI], system=[text("a"), text("b")])
    for marked in ([text("a", **MARK), text("b")], [text("a"), text("b", **MARK)]):
        said = prompt([HI], system=marked)
        assert (said.messages, said.tools) == (plain.messages, plain.tools)


def test_on_every_block_they_are_too_many_as_anthropic_has_it():
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
def test_a_mark_that_is_none_is_refused_where_it_stands(mark, field):
    where = f"system[0].cache_control.{field}"
    assert refused([HI], system=[text("a", cache_control=mark)]) == where


@pytest.mark.parametrize("mark", [None, {"type": "ephemeral", "ttl": "1h", "scope": "global"}])
def test_what_clients_send_beside_it_is_no_fault(mark):
    assert prompt([HI], system=[text("a", cache_control=mark)])
