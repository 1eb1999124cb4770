"""Whatever a model called, broken off or not, the conversation goes on with any template."""

from __future__ import annotations

from typing import Any

import pytest

from luceasync.errors import RequestError
from luceasync.text.roles import Roles
from luceasync.text.template import ChatTemplate

# How templates write the arguments of calls.
LISTED = "{% for k, v in c.function.arguments | items %}<{{ k }}={{ v }}>{% endfor %}"
INSERTED = "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}"
QUOTED = "{{ c.function.arguments | tojson }}"
# Mistral's rule: texts of user and assistant alternate.
ALTERNATE = (
    "{% set n = namespace(i=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (n.i % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set n.i = n.i + 1 %}{% endif %}{% endfor %}"
)
# gpt-oss: a result follows a call.
PAIRED = (
    "{% set n = namespace(called=false) %}{% for m in messages %}"
    "{% if m.role == 'tool' and not n.called %}{{ raise_exception('no call') }}{% endif %}"
    "{% if m.role == 'assistant' %}{% set n.called = m.tool_calls is defined %}{% endif %}"
    "{% endfor %}"
)
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call') }}{% endif %}{% endfor %}"
)
BROKEN = ['{"old": "x', '{"old": "h1",}', "[1]", "text", '"{}"', "1", '{"a": ' * 3000]


def template_of(arguments: str, rules: str = "") -> ChatTemplate:
    return ChatTemplate(
        f"{rules}{{% for m in messages %}}[{{{{ m.role }}}}]{{{{ m.content }}}}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}:"
        f"{arguments}</call>{{% endfor %}}{{% endfor %}}"
    )


def history(*arguments: Any, content: str = "") -> list[dict[str, Any]]:
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "edit", "arguments": each}}
        for i, each in enumerate(arguments)
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"r{i}"}
        for i, call in enumerate(calls)
    ]
    return [
        {"role": "user", "content": "do it"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        *results,
    ]


def rendered(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    """As the engine renders: in the first form that the template takes."""
    for fit in Roles.of(template).fits:
        try:
            return template.render(fit(messages))
        except RequestError as error:
            refusal = error
    raise refusal


@pytest.mark.parametrize("rules", ["", ALTERNATE, PAIRED, ONE_CALL])
@pytest.mark.parametrize("arguments", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("how", [LISTED, INSERTED, QUOTED])
def test_a_call_that_broke_off_keeps_its_text_in_every_template(how, arguments, rules):
    text = rendered(template_of(how, rules), history(arguments))
    assert "edit" in text and arguments in text and "r0" in text


@pytest.mark.parametrize("arguments", [None, "", " ", "null", "{}", {}])
@pytest.mark.parametrize("how", [LISTED, INSERTED, QUOTED])
def test_no_arguments_are_an_empty_object(how, arguments):
    written = "" if how == LISTED else "{}"
    assert f"<call>edit:{written}</call>[tool]r0" in rendered(template_of(how), history(arguments))


def test_a_template_that_inserts_arguments_gets_what_the_model_wrote():
    text = rendered(template_of(INSERTED), history('{"old": "x'))
    assert '<call>edit:{"old": "x</call>[tool]r0' in text


def test_only_the_broken_one_of_several_calls_becomes_text_and_its_result_comes_last():
    text = rendered(template_of(LISTED), history("[1]", '{"a": "b"}', content="Now:"))
    assert text == (
        '[user]do it[assistant]Now:\n\n{"name": "edit", "arguments": [1]}'
        "<call>edit:<a=b></call>[tool]r1[user]r0"
    )


def test_an_empty_list_of_calls_is_none():
    template = ChatTemplate("{% for m in messages %}{{ m.tool_calls is defined }}{% endfor %}")
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": []}]
    assert template.render(Roles().fit(messages)) == "FalseFalse"


def test_half_of_a_surrogate_pair_is_a_replacement_character():
    text = rendered(template_of(LISTED), history('{"old": "\\ud83d", "new": "\\ud83d\\ude00"}'))
    assert "<old=\ufffd><new=\U0001f600>" in text


@pytest.mark.parametrize("rules", [ALTERNATE, PAIRED, ONE_CALL])
def test_a_conversation_that_a_template_refuses_goes_on_as_texts(rules):
    messages = [
        *history('{"a": "b"}', '{"c": "d"}'),
        {"role": "user", "content": "stop"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "why?"},
        {"role": "tool", "tool_call_id": "lost", "content": "late"},
    ]
    text = rendered(template_of(LISTED, rules), messages)
    assert [text.find(word) for word in ("do it", "edit", "r1", "stop", "why?", "late")] == sorted(
        text.find(word) for word in ("do it", "edit", "r1", "stop", "why?", "late")
    )
    assert "late" in text


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_stands_in_the_field_that_the_template_reads(field):
    template = ChatTemplate(
        f"{{% for m in messages %}}[{{{{ m.{field} }}}}]{{{{ m.content }}}}{{% endfor %}}"
    )
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "reasoning_content": "thought"},
    ]
    assert template.render(Roles.of(template).fit(messages)) == "[]x[thought]y"


def test_calls_and_results_that_a_template_drops_become_text():
    only_texts = (
        "{% for m in messages if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    text = rendered(ChatTemplate(only_texts), history('{"a": "b"}'))
    assert text == '[user]do it[assistant]{"name": "edit", "arguments": {"a": "b"}}[user]r0'
    no_results = template_of(QUOTED).source.replace(
        "in messages", "in messages if m.role != 'tool'"
    )
    text = rendered(ChatTemplate(no_results), history('{"a": "b"}'))
    assert text == '[user]do it[assistant]<call>edit:{"a": "b"}</call>[user]r0'


def test_results_stay_where_only_calls_are_dropped():
    no_calls = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    text = rendered(ChatTemplate(no_calls), history('{"a": "b"}'))
    assert text == '[user]do it[assistant]{"name": "edit", "arguments": {"a": "b"}}[tool]r0'


def test_a_conversation_may_begin_with_the_assistant():
    said = [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Hi"}]
    text = rendered(template_of(QUOTED, ALTERNATE), said)
    assert text == "[user][assistant]Hello[user]Hi"


def test_a_user_who_interrupts_does_not_make_calls_text():
    """Mistral's template counts calls and results as no turn."""
    said = [*history('{"a": "b"}'), {"role": "user", "content": "stop"}]
    text = rendered(template_of(QUOTED, ALTERNATE), said)
    assert text == '[user]do it[assistant]<call>edit:{"a": "b"}</call>[tool]r0[assistant][user]stop'
    del said[2]
    assert "</call>[assistant][user]stop" in rendered(template_of(QUOTED, ALTERNATE), said)


FIRST_ONLY = (  # as gpt-oss's: a result is that of the last call
    "{% set last = namespace(name=none) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if last.name is none %}{{ raise_exception('no call') }}{% endif %}"
    "<{{ last.name }}>{{ m.content }}{% elif m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    "|{{ m.thinking }}|{{ m.content }}<call>{{ c.name }}:{{ c.arguments | tojson }}"
    "{% set last.name = c.name %}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
ONE_AT_A_TIME = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}:"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def two_calls() -> list[dict[str, Any]]:
    """Two calls of one message, whose results come in another order, and a question."""
    messages = history('{"a": 1}', '{"a": 2}', content="Now:")
    messages[1]["tool_calls"][1]["function"]["name"] = "read"
    question = {"role": "user", "content": "y"}
    return [*messages[:2], messages[3], messages[2], question]


def test_a_second_call_is_told_where_the_template_shows_the_first_of_a_message():
    called = two_calls()
    called[1]["reasoning_content"] = "hm"
    assert rendered(ChatTemplate(FIRST_ONLY), called) == (
        '[user]do it|hm|Now:<call>edit:{"a": 1}<edit>r0||<call>read:{"a": 2}<read>r1[user]y'
    )


def test_a_second_call_is_a_message_where_the_template_refuses_two():
    assert rendered(ChatTemplate(ONE_AT_A_TIME), two_calls()) == (
        '[user]do it[assistant]Now:<call>edit:{"a": 1}[tool]r0[assistant]<call>read:{"a": 2}'
        "[tool]r1[user]y"
    )


def test_results_of_no_call_stay_where_calls_are_parted():
    called = two_calls()
    called[2]["tool_call_id"] = "unknown"
    assert rendered(ChatTemplate(ONE_AT_A_TIME), called) == (
        '[user]do it[assistant]Now:<call>edit:{"a": 1}[tool]r0[assistant]<call>read:{"a": 2}'
        "[tool]r1[user]y"
    )
    assert rendered(ChatTemplate(ONE_AT_A_TIME), called[:2]).count("<call>") == 2


def test_calls_stay_together_where_the_template_shows_both():
    assert rendered(template_of(INSERTED), two_calls()) == (
        '[user]do it[assistant]Now:<call>edit:{"a": 1}</call><call>read:{"a": 2}</call>'
        "[tool]r1[tool]r0[user]y"
    )
