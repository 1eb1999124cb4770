"""Messages are reordered only as far as the template requires."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from luceasync.text.roles import Roles
from luceasync.text.template import ChatTemplate

TEMPLATES = Path(__file__).parents[1] / "acceptance" / "turns"
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls }}{% endfor %}"
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate.') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}"
)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


AGENT = [
    message("system", "a"), message("system", "b"), message("user", "c"), message("system", "d"),
    message("user", "e"), message("assistant", "f"), message("user", "g"),
]  # fmt: skip


def rendered(source: str, messages: list[dict[str, str]]) -> str:
    template = ChatTemplate(source)
    return template.render(Roles.of(template).fit(messages))


def test_a_template_that_takes_all_gets_all() -> None:
    template = ChatTemplate(PLAIN)
    assert Roles.of(template) == Roles()
    assert Roles.of(template).fit(AGENT) == AGENT


def test_text_beside_a_call_is_reasoning_where_the_template_takes_one_of_them() -> None:
    source = (
        "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}"
        "{{ raise_exception('Cannot pass both.') }}{% endif %}[{{ m.role }}]{{ m.thinking }}"
        "|{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"
        "{% endfor %}"
    )
    call = {"id": "i", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = {**message("assistant", "b"), "reasoning_content": "a", "tool_calls": [call]}
    roles = Roles.of(ChatTemplate(source))
    fitted = roles.fit_thinking_aloud([message("user", "x"), said])
    assert ChatTemplate(source).render(fitted) == '[user]|x[assistant]a\n\nb|{"a": 1}'
    assert roles.fit_thinking_aloud in roles.fits


def test_a_late_system_message_becomes_the_users() -> None:
    assert rendered(SYSTEM_FIRST, AGENT) == (
        "[system]a\n\nb[user]c[user]d[user]e[assistant]f[user]g"
    )


def test_neighbours_are_merged_if_roles_must_alternate() -> None:
    messages = [message("user", "c"), *AGENT[3:]]
    assert rendered(ALTERNATING, messages) == "[user]c\n\nd\n\ne[assistant]f[user]g"


def test_orders_of_real_templates() -> None:
    for name in ("qwen3", "qwen3.5"):
        text = rendered((TEMPLATES / f"{name}.jinja").read_text(), AGENT)
        places = [text.find(f"\n{m['content']}") for m in AGENT]
        assert places == sorted(places) and places[0] >= 0, name


def test_an_order_whose_text_is_dropped_counts_as_refused() -> None:
    source = (
        "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert not Roles.of(ChatTemplate(source)).late_system


def test_an_unknown_kind_of_template_gets_all() -> None:
    assert Roles.of(ChatTemplate("{{ raise_exception('no') }}")) == Roles()


CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {}}},
            {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_2", "content": "y"},
]


def ids_of(template: str) -> list[str]:
    """The ids of the calls and of the result, as `template` gets them."""
    _, called, result = Roles.of(ChatTemplate(template)).fit(CALLED)
    return [*(call["id"] for call in called["tool_calls"]), result["tool_call_id"]]


def test_ids_of_calls_are_as_the_template_takes_them() -> None:
    text = "{% for m in messages %}{{ m.content }}"
    calls = "{% for c in m.tool_calls or [] %}"
    named = "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    assert ids_of(text + calls + "{{ c.id }}" + named) == ["call_1", "call_2", "call_2"]
    nine = "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    first, second, result = ids_of(text + calls + nine + named)
    assert second == result != first and len(first) == len(second) == 9
    assert (first + second).isalnum()
    by_id = "{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    assert ids_of(text + calls + by_id) == ["functions.f:0", "functions.g:1", "functions.g:1"]


def test_calls_that_show_only_beside_no_content_get_none() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    roles = Roles.of(template)
    assert [message.get("content") for message in roles.fit(CALLED)] == ["x", None, "y"]
    mixed = roles.fit([CALLED[0], {**CALLED[1], "content": "so"}, CALLED[2]])
    assert "so" in mixed[1]["content"] and '"name": "f"' in mixed[1]["content"]
