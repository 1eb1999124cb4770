"""Which answers a later prompt can hold as they were generated."""

from __future__ import annotations

from pathlib import Path

import pytest

from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.text.replay_check import ReplayCheck
from luceasync.text.template import ChatTemplate

TEMPLATES = Path(__file__).parents[2] / "tests/acceptance/turns"
QWEN3_5 = ChatTemplate((TEMPLATES / "qwen3.5.jinja").read_text())  # opens reasoning itself
QWEN3 = ChatTemplate((TEMPLATES / "qwen3.jinja").read_text())  # leaves that to the model
WHOLE = ChatTemplate.load(BUNDLED_MODEL_DIR)  # leaves nothing out
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture
def returns(byte_level):
    """What is known of answers to ASKED, where one "<think>" is a token."""

    def of(template: ChatTemplate, messages=ASKED, tools=None, **kwargs) -> ReplayCheck:
        text = template.render(messages, tools, **kwargs)
        return ReplayCheck.of(template, byte_level, text, messages, tools, kwargs)

    return of


@pytest.fixture
def thought(byte_level) -> list[int]:
    """The beginning of an answer whose reasoning the model opens."""
    return [byte_level.token_id("<think>"), *byte_level.encode("the cat")]


@pytest.fixture
def said(byte_level) -> list[int]:
    return byte_level.encode("the cat")


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_template_that_leaves_nothing_out_gives_it_back(returns, said, thought, tools):
    found = returns(WHOLE, tools=tools)
    assert found(said) and found(thought)


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_where_reasoning_goes_once_a_user_has_spoken_it_does_not(returns, said, enable_thinking):
    assert not returns(QWEN3_5, enable_thinking=enable_thinking)(said)


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_but_before_the_result_of_a_tool_it_does(returns, said, enable_thinking):
    assert returns(QWEN3_5, tools=TOOLS, enable_thinking=enable_thinking)(said)


def test_where_the_model_opens_its_reasoning_it_is_told_by_what_it_wrote(returns, said, thought):
    found = returns(QWEN3)
    assert found(said)
    assert not found(thought)


def test_which_the_result_of_a_tool_leaves_as_it_was(returns, said, thought):
    found = returns(QWEN3, tools=TOOLS)
    assert found(said) and found(thought)


def test_told_not_to_think_no_answer_comes_back(returns, said):
    assert not returns(QWEN3, enable_thinking=False)(said)


def test_each_is_tried_once_by_who_asks_first():
    tried = []
    found = ReplayCheck(lambda: bool(tried.append("others")), lambda: bool(tried.append("it")), 9)
    assert tried == []
    assert not found([5]) and not found([]) and tried == ["others"]
    assert not found([9, 5]) and not found([9]) and tried == ["others", "it"]


def test_an_answer_without_tokens_is_no_reasoning(returns):
    assert returns(QWEN3)([])


def test_a_model_without_such_a_token_is_asked_about_plain_answers_alone(fallback, said):
    text = QWEN3.render(ASKED)
    found = ReplayCheck.of(QWEN3, fallback, text, ASKED)
    assert found(said) and found([0])


def test_an_answer_that_is_trimmed_to_nothing_does_not_return(returns, said):
    source = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}"
    assert not returns(ChatTemplate(source))(said)


def test_where_every_trial_is_refused_it_may(returns, said, thought):
    source = "{% if messages | length > 2 %}{{ raise_exception('one turn') }}{% endif %}x"
    found = returns(ChatTemplate(source))
    assert found(said) and found(thought)
