"""What prompts with the same tools and different system messages share."""

from __future__ import annotations

import pytest

from luceasync.text.control_tokens import BREAK
from luceasync.text.shared_prefix import CommonPrefix, ToolsBlock
from luceasync.text.template import ChatTemplate
from tests.text.test_replay_check import QWEN3_5

TOOLS = [{"type": "function", "function": {"name": "read"}}]
ASKED = {"role": "user", "content": "the cat"}
TOOLS_LAST = ChatTemplate("{{ messages[0].content }} {{ tools }} {{ messages[1].content }}")
REFUSING = ChatTemplate("{{ raise_exception('no') if messages|length == 2 else tools }}")


def shared_text(
    tokenizer, template: ChatTemplate, content: str, tools=TOOLS, *, rest=(ASKED,), role="system"
) -> str | None:
    """The text that other prompts share with the one with that system message."""
    messages = [{"role": role, "content": content}, *rest]
    text = template.render(messages, tools)
    ids = tokenizer.encode(text)
    end = ToolsBlock(template, CommonPrefix(tokenizer)).end(text, ids, messages, tools)
    return None if end is None else b"".join(map(tokenizer.token_bytes, ids[:end])).decode()


@pytest.mark.parametrize("content", ["be brief", "0", "a", ""])
def test_prompts_diverge_where_the_system_message_begins(byte_level, content):
    shared = shared_text(byte_level, QWEN3_5, content)
    assert shared is not None and shared.rstrip().endswith('{"name": "read"}}]')
    assert shared == shared_text(byte_level, QWEN3_5, "another")


def test_later_messages_do_not_matter(byte_level):
    rest = (ASKED, {"role": "assistant", "content": "the"}, ASKED)
    assert shared_text(byte_level, QWEN3_5, "be brief", rest=rest) == shared_text(
        byte_level, QWEN3_5, "be brief"
    )


@pytest.mark.parametrize(
    ("tools", "role"), [(None, "system"), ([], "system"), (TOOLS, "assistant"), (TOOLS, "user")]
)
def test_without_tools_or_a_system_message_there_is_no_end(byte_level, tools, role):
    assert shared_text(byte_level, QWEN3_5, "be brief", tools, role=role) is None


def test_a_template_that_puts_tools_last_shares_nothing(byte_level):
    assert shared_text(byte_level, TOOLS_LAST, "be brief") == ""


def test_if_the_template_refuses_other_messages_nothing_is_known(byte_level):
    assert shared_text(byte_level, REFUSING, "be brief", rest=(ASKED, ASKED)) is None


def test_a_control_token_that_is_only_text_counts_by_its_spelling(byte_level):
    control = next(t for t in byte_level.added_texts if BREAK in byte_level.control.broken(t))
    broken = byte_level.control.broken(control)
    tools = [{"type": "function", "function": {"name": broken}}]
    template = ChatTemplate("{{ tools[0].function.name }} {{ messages[0].content }}")
    assert shared_text(byte_level, template, "be brief", tools).rstrip() == control
