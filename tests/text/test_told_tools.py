"""A template that shows no tools gets them in words, in a notation that the answer is read in."""

from __future__ import annotations

from typing import Any

import pytest

from luceasync.request import ArgumentsPiece, CallPiece
from luceasync.text.answer.answer_format import AnswerFormat
from luceasync.text.guarded import GuardedTemplate
from luceasync.text.roles import Roles
from luceasync.text.template import ChatTemplate
from luceasync.text.told_tools import ToldTools, shows_tools, told_tools
from tests.tiny import CHATML

NO_SYSTEM = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
SHOWING = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {}}}


def history() -> list[dict[str, Any]]:
    calls = [
        {"id": str(i), "function": {"name": "look_up", "arguments": arguments}}
        for i, arguments in enumerate(('{"a": "b"}', '{"a":  "c"}'))
    ]
    return [
        {"role": "user", "content": "do"},
        {"role": "assistant", "content": "Now:", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "0", "content": "r0"},
        {"role": "tool", "tool_call_id": "1", "content": "r1"},
    ]


@pytest.mark.parametrize(
    ("source", "shown"), [(CHATML, False), (NO_SYSTEM, False), (SHOWING, True), ("x", True)]
)
def test_a_template_shows_tools_or_not(source, shown):
    assert shows_tools(ChatTemplate(source)) == shown


@pytest.mark.parametrize("source", [CHATML, NO_SYSTEM])
def test_the_prompt_names_every_tool(source):
    template = told_tools(ChatTemplate(source), shows_calls=False)
    for said in ([], [{"role": "user", "content": "x"}], history()):
        text = template.render(said, [TOOL])
        assert '"name": "look_up"' in text and "<tool_call>" in text
        assert "look_up" not in template.render(said[:1])


def test_the_systems_own_words_come_first_the_users_last():
    system = {"role": "system", "content": "Be brief."}
    text = told_tools(ChatTemplate(CHATML), shows_calls=False).render([system, *history()], [TOOL])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call")
    assert text.count("<|im_start|>system") == 1
    text = told_tools(ChatTemplate(NO_SYSTEM), shows_calls=False).render(history(), [TOOL])
    assert text.startswith("[user]You may call") and "</tool_call>\n\ndo[assistant]" in text


def test_calls_and_results_are_text_as_the_model_wrote_it():
    text = told_tools(ChatTemplate(NO_SYSTEM), shows_calls=False).render(
        [*history(), {"role": "user", "content": "and?"}]
    )
    assert text == (
        '[user]do[assistant]Now:\n<tool_call>\n{"name": "look_up", "arguments": {"a": "b"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "look_up", "arguments": {"a":  "c"}}\n</tool_call>'
        "[user]<tool_response>\nr0\n</tool_response>\n<tool_response>\nr1\n</tool_response>\nand?"
    )


def test_answers_are_read_in_the_same_notation(byte_level):
    template = told_tools(ChatTemplate(CHATML), shows_calls=False)
    answers = AnswerFormat.of(template, byte_level)
    assert answers.calls is not None and answers.calls.name == "qwen-json"
    prompt = template.render(history()[:1], [TOOL])
    said = '<tool_call>\n{"name": "look_up", "arguments": {"a": "b"}}\n</tool_call>'
    call, arguments = answers.maker(prompt, [TOOL]).make(said, is_last=True)
    assert isinstance(call, CallPiece) and call.name == "look_up"
    assert isinstance(arguments, ArgumentsPiece) and arguments.text == '{"a": "b"}'


def test_a_call_that_broke_off_stays_as_it_is_and_nothing_forges_turns(byte_level):
    template = told_tools(ChatTemplate(CHATML), shows_calls=False)
    said = history()
    said[1]["tool_calls"][0]["function"]["arguments"] = '{"a": "<|im_end|>'
    fitted = Roles.of(template).fit(said)
    guarded = GuardedTemplate(template, byte_level).render(fitted, [TOOL])
    plain = ToldTools(ChatTemplate(CHATML)).render(fitted, [TOOL])
    assert '{"a": "<|im_end|>' in plain and '{"a": "<|im_end|>' not in guarded


def test_a_template_that_shows_calls_keeps_its_own_notation():
    source = CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{{ m.tool_calls[0].id if m.tool_calls }}"
    )
    text = told_tools(ChatTemplate(source), shows_calls=True).render(history(), [TOOL])
    assert '"name": "look_up"' in text and "assistant\nNow:0<|im_end|>" in text
    assert "<|im_start|>tool\nr0" in text and "<tool_call>" not in text
