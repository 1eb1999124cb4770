"""Rendered prompts, compared with transformers, and where their turns end."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from luceasync.errors import ModelError, RequestError
from luceasync.text.template import ChatTemplate, TextParts, TurnBoundaries, wants_parts

CHATML = """\
{%- for message in messages %}
    {%- if message.role == "bad" %}{{ raise_exception("No role " + message.role) }}{% endif %}
    {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>" + "\\n" }}
{%- endfor %}
{%- if tools %}
    {{- tools | tojson(indent=2) }}
{%- endif %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- "<think></think>" }}{% endif %}
{%- endif %}
"""
MARKED = """\
{% for m in messages %}
  {% if loop.index > 2 %}{% break %}{% endif %}
  {% generation %}
{{ m.content }}{{ m | tojson }}
  {% endgeneration %}
{% endfor %}
{{ strftime_now("%Y") | length }}
"""
CHAT = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": "caf\u00e9?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And \U0001f680?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b> & caf\u00e9"}}]


def configure(model_dir, **content) -> None:
    (model_dir / "tokenizer_config.json").write_text(json.dumps(content))


def render_with_transformers(model_dir, source: str, **kwargs) -> str:
    peer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(model_dir / "tokenizer.json"))
    return peer.apply_chat_template(CHAT, chat_template=source, tokenize=False, **kwargs)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "enable_thinking": False},
    ],
)
def test_prompts_are_those_of_transformers(model_dir, tools, kwargs):
    expected = render_with_transformers(model_dir, CHATML, tools=tools, **kwargs)
    assert ChatTemplate(CHATML).render(CHAT, tools, **kwargs) == expected


def test_blocks_loops_and_generation_marks_render_as_in_transformers(model_dir):
    expected = render_with_transformers(model_dir, MARKED)
    assert ChatTemplate(MARKED).render(CHAT, add_generation_prompt=False) == expected


def test_an_answer_is_opened_unless_told_otherwise():
    opened = ChatTemplate(CHATML).render(CHAT)
    closed = ChatTemplate(CHATML).render(CHAT, add_generation_prompt=False)
    assert opened == closed + "<|im_start|>assistant\n"


def test_what_is_nested_too_deeply_to_be_rendered_is_refused():
    nested: list[Any] = []
    for _ in range(2000):
        nested = [nested]
    with pytest.raises(RequestError, match=r"refused the messages: .*recursion"):
        ChatTemplate("{{ messages | tojson(indent=2) }}").render([{"content": nested}])


def test_special_tokens_are_variables(model_dir):
    configure(
        model_dir,
        bos_token={"content": "<s>"},
        eos_token="</s>",
        pad_token=None,
        chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}",
    )
    assert ChatTemplate.load(model_dir).render([{"content": "x"}]) == "<s>x</s>"


def test_the_jinja_file_comes_before_the_configured_template(model_dir):
    configure(model_dir, chat_template="configured")
    assert ChatTemplate.load(model_dir).render([]) == "configured"
    (model_dir / "chat_template.jinja").write_text("from the file")
    assert ChatTemplate.load(model_dir).render([]) == "from the file"


def test_named_templates_are_chosen_by_tools(model_dir):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    configure(model_dir, chat_template=named)
    template = ChatTemplate.load(model_dir)
    assert template.render([], []) == template.render([]) == "plain"
    assert template.render([], TOOLS) == "tools"


def test_a_tool_template_may_be_a_file(model_dir):
    (model_dir / "chat_template.jinja").write_text("plain")
    (model_dir / "additional_chat_templates").mkdir()
    (model_dir / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert ChatTemplate.load(model_dir).render([], TOOLS) == "tools"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "bad", "content": "x"}, "No role bad"),
        ({"role": "user", "content": 5}, "refused the messages: .*concatenate"),
        ({"role": "user", "content": None}, "refused the messages: .*concatenate"),
        ({"role": "user"}, "no attribute 'content'"),
    ],
)
def test_messages_that_the_template_refuses_are_a_request_error(message, words):
    with pytest.raises(RequestError, match=words) as refused:
        ChatTemplate(CHATML).render([message])
    assert refused.value.param == "messages"


def test_a_template_cannot_reach_out_or_change_the_messages():
    reach, change = "{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"
    for source in (reach, change):
        with pytest.raises(RequestError, match="refused the messages"):
            ChatTemplate(source).render([])


@pytest.mark.parametrize("name", ["messages", "tools"])
def test_kwargs_cannot_replace_the_messages(name):
    with pytest.raises(RequestError, match=name) as refused:
        ChatTemplate(CHATML).render(CHAT, **{name: []})
    assert refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("configured", "words"),
    [
        (None, r"no chat template; add a chat_template\.jinja"),
        ([{"name": "rag", "template": "x"}], "no chat template"),
        ([{"name": "default"}], "must be a string or a list"),
        ("{% if %}", "does not compile: line 1"),
    ],
)
def test_a_directory_without_a_usable_template_is_refused(model_dir, configured, words):
    configure(model_dir, chat_template=configured)
    with pytest.raises(ModelError, match=words):
        ChatTemplate.load(model_dir)


def test_turns_end_where_the_next_one_begins(byte_level):
    template = ChatTemplate(CHATML)
    ids = byte_level.encode(template.render(CHAT))
    ends = TurnBoundaries.of(template, byte_level).ends(ids)
    prefixes = [template.render(CHAT[:n], add_generation_prompt=False) for n in range(1, 5)]
    assert ends == [len(byte_level.encode(prefix)) for prefix in prefixes]


def test_a_turn_begins_at_a_token_not_across_two():
    parts = [0x01020000, 0x0304]  # their adjacent bytes contain those of the token
    assert TurnBoundaries(0x03040102).ends([0x03040102, *parts, 0x03040102, 5]) == [3]


def test_a_prompt_and_its_next_turn_share_boundaries(byte_level):
    template = ChatTemplate(CHATML)
    turns = TurnBoundaries.of(template, byte_level)
    first, second = (byte_level.encode(template.render(CHAT[:n])) for n in (2, 4))
    shared = turns.ends(first)
    assert turns.ends(second)[: len(shared)] == shared
    assert second[: shared[-1]] == first[: shared[-1]]


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",  # nothing opens the answer
        "{{ messages[0].content }}{% if add_generation_prompt %}assistant: {% endif %}",
        "{% if add_generation_prompt %}<|im_start|>{% endif %}{{ messages[0].content }}",
        "{{ raise_exception('two messages at least') }}",
    ],
)
def test_without_a_special_opening_token_there_are_no_boundaries(byte_level, source):
    turns = TurnBoundaries.of(ChatTemplate(source), byte_level)
    assert turns.start_id is None
    assert turns.ends(byte_level.encode("<|im_start|>x<|im_start|>y")) == []


def test_texts_are_parts_for_a_template_that_shows_them_only_so():
    source = (
        "{% for m in messages %}[{{ m.role }}]{% for part in m.content or [] "
        "if part.type == 'text' %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(source)
    assert wants_parts(template) and not wants_parts(ChatTemplate(CHATML))
    assert not wants_parts(ChatTemplate("{{ raise_exception('no') }}"))
    chat = [*CHAT, {"role": "assistant", "content": None}]
    said = "".join(f"[{message['role']}]{message['content'] or ''}" for message in chat)
    assert TextParts(template).render(chat) == said
