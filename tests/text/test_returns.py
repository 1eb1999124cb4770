"""Which answers a later prompt can hold as they were generated."""

from __future__ import annotations

from pathlib import Path

import pytest

from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.text.returns import answer_returns
from luceasync.text.template import ChatTemplate

THINKING = (Path(__file__).parents[2] / "scripts/turns/thinking.jinja").read_text()
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def returns(template: ChatTemplate, messages=ASKED, tools=None, **kwargs) -> bool:
    text = template.render(messages, tools, **kwargs)
    return answer_returns(template, text, messages, tools, kwargs)


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_template_that_leaves_nothing_out_gives_it_back(tools):
    assert returns(ChatTemplate.load(BUNDLED_MODEL_DIR), tools=tools)


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_where_reasoning_goes_once_a_user_has_spoken_it_does_not(enable_thinking: bool):
    assert not returns(ChatTemplate(THINKING), enable_thinking=enable_thinking)


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_but_before_the_result_of_a_tool_it_does(enable_thinking: bool):
    assert returns(ChatTemplate(THINKING), tools=TOOLS, enable_thinking=enable_thinking)


def test_an_answer_that_is_trimmed_to_nothing_does_not():
    source = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}"
    assert not returns(ChatTemplate(source))


def test_where_every_trial_is_refused_it_may():
    source = "{% if messages | length > 2 %}{{ raise_exception('one turn') }}{% endif %}x"
    assert returns(ChatTemplate(source))
