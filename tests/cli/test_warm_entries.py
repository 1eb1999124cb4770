"""What files may hold that is to be kept, and what is said of those that may not."""

from __future__ import annotations

import io
import json

import pytest

from luceasync.cli.warm.entries import (
    WarmEntry,
    parse_kwargs,
    read_entries,
    read_tools,
    with_common,
)
from luceasync.errors import ConfigError

SYSTEM = [{"role": "system", "content": "Be brief."}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture
def write(tmp_path):
    def make(name: str, content: object) -> str:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return make


@pytest.mark.parametrize("role", ["system", "user"])
def test_a_text_is_one_message(write, role):
    (entry,) = read_entries(write("prompt.md", "Be\nbrief.\n"), role=role)
    assert entry.messages == [{"role": role, "content": "Be\nbrief."}]
    assert entry.is_answered == (role == "user")


@pytest.mark.parametrize("content", [SYSTEM, {"messages": SYSTEM, "model": "any", "n": 2}])
def test_json_is_a_list_of_messages_or_a_request(write, content):
    (entry,) = read_entries(write("chat.json", content))
    assert entry.body() == {"messages": SYSTEM}


def test_jsonl_has_an_entry_a_line_and_each_knows_its_own(write):
    lines = [json.dumps(SYSTEM), "", json.dumps({"messages": SYSTEM, "tools": TOOLS})]
    path = write("chats.jsonl", "\n".join(lines))
    first, second = read_entries(path)
    assert (first.origin, second.origin) == (f"{path}:1", f"{path}:3")
    assert second.body() == {"messages": SYSTEM, "tools": TOOLS}


def test_a_line_separator_within_a_string_ends_no_line(write):
    messages = [{"role": "system", "content": "one\u2028two"}]
    path = write("chats.jsonl", json.dumps(messages, ensure_ascii=False))
    assert read_entries(path)[0].messages == messages


def test_stdin_is_a_file_too(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(SYSTEM)))
    (entry,) = read_entries("-", "jsonl")
    assert (entry.origin, entry.messages) == ("stdin:1", SYSTEM)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "{", "a.json: not JSON"),
        ("a.jsonl", json.dumps(SYSTEM) + "\n[", "a.jsonl:2: not JSON"),
        ("a.json", [], "expected a list of messages"),
        ("a.json", {"prompt": "x"}, "expected a list of messages"),
        ("a.json", ["hi"], "messages: expected a list of objects"),
        ("a.json", {"messages": SYSTEM, "tools": "f"}, "tools: expected a list"),
        ("a.json", {"messages": SYSTEM, "chat_template_kwargs": 1}, "expected an object"),
        ("a.txt", " \n", "it is empty"),
        ("a.jsonl", "\n", "it is empty"),
    ],
)
def test_what_is_wrong_is_one_line_that_says_where(write, name, content, words):
    with pytest.raises(ConfigError, match=words) as refused:
        read_entries(write(name, content))
    assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--file .*gone\.txt: cannot be read: No such file"):
        read_entries(str(tmp_path / "gone.txt"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="it is not UTF-8"):
        read_entries(str(tmp_path / "latin.txt"))


def test_tools_are_for_entries_without_any(write):
    own = [{"type": "function", "function": {"name": "own"}}]
    entries = [WarmEntry("a", SYSTEM), WarmEntry("b", SYSTEM, own)]
    common = with_common(entries, read_tools(write("tools.json", TOOLS)), {})
    assert [entry.tools for entry in common] == [TOOLS, own]


def test_an_entrys_own_variables_count(write):
    entry = WarmEntry("a", SYSTEM, template_kwargs={"style": "own"})
    (common,) = with_common([entry], [], parse_kwargs('{"style": "any", "enable_thinking": false}'))
    assert common.template_kwargs == {"style": "own", "enable_thinking": False}


@pytest.mark.parametrize("text", ["[]", "{"])
def test_variables_are_an_object(text):
    with pytest.raises(ConfigError, match="--template-kwargs"):
        parse_kwargs(text)
