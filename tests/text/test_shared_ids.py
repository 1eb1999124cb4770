"""The ids with which every prompt that continues some messages begins."""

from __future__ import annotations

import pytest

from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.errors import RequestError
from luceasync.text.shared_prefix import shared_ids
from luceasync.text.template import ChatTemplate, TurnBoundaries
from luceasync.text.tokenizer import Tokenizer

SYSTEM = {"role": "system", "content": "Answer briefly."}
EXAMPLE = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
# Like some models: no system turn; its text and the tools open the first user turn.
MERGED = """\
{%- for m in messages if m.role != "system" -%}
<|im_start|>{{ m.role }}
{% if loop.first %}
{%- if tools %}{{ tools | tojson }}

{% endif %}
{%- if messages[0].role == "system" %}{{ messages[0].content }}

{% endif %}
{%- endif %}{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Refuses messages without a user turn, and drops reasoning before the last one.
STRICT = """\
{%- set ns = namespace(last=none) -%}
{%- for m in messages if m.role == "user" %}{% set ns.last = m %}{% endfor -%}
{%- if ns.last is none %}{{ raise_exception("No user query found.") }}{% endif -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if loop.last and m.thought %}<think>{{ m.thought }}</think>{% endif %}{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED_MODEL_DIR)


@pytest.fixture
def shared(tokenizer):
    def text_of(template: ChatTemplate, messages, tools=None, **kwargs) -> str:
        turns = TurnBoundaries.of(template, tokenizer)
        ids = shared_ids(template, turns, tokenizer.encode, messages, tools, kwargs)
        return "".join(map(tokenizer.token_text, ids))

    return text_of


@pytest.mark.parametrize("messages", [[SYSTEM], [SYSTEM, *EXAMPLE], EXAMPLE])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_it_ends_where_the_users_turn_begins(shared, messages, tools):
    template = ChatTemplate.load(BUNDLED_MODEL_DIR)
    rendered = template.render(messages, tools, add_generation_prompt=False)
    assert shared(template, messages, tools) == rendered


def test_tools_alone_are_shared(shared):
    template = ChatTemplate.load(BUNDLED_MODEL_DIR)
    text = shared(template, [], TOOLS)
    assert '"name": "f"' in text and text.endswith("<|im_end|>\n")


def test_a_template_that_requires_a_user_turn_gets_one(shared):
    template = ChatTemplate(STRICT)
    with pytest.raises(RequestError):
        template.render([SYSTEM])
    assert shared(template, [SYSTEM]) == "<|im_start|>system\nAnswer briefly.<|im_end|>\n"


def test_text_that_later_prompts_drop_is_not_shared(shared):
    thought = EXAMPLE[1] | {"thought": "A greeting."}
    assert "greeting" in ChatTemplate(STRICT).render([EXAMPLE[0], thought])
    assert "greeting" not in shared(ChatTemplate(STRICT), [EXAMPLE[0], thought])


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_text_within_the_users_turn_is_shared(shared, tools):
    text = shared(ChatTemplate(MERGED), [SYSTEM], tools)
    assert text.rstrip().endswith("Answer briefly.")
    assert ('"name": "f"' in text) == bool(tools)


def test_the_requests_variables_reach_the_template(shared):
    template = ChatTemplate("{{ style }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert shared(template, [SYSTEM], style="plain ") == "plain Answer briefly."


def test_a_request_cannot_open_the_answer(shared):
    template = ChatTemplate.load(BUNDLED_MODEL_DIR)
    text = shared(template, [SYSTEM], add_generation_prompt=True)
    assert "assistant" not in text
