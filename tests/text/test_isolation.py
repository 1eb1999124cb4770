"""A template in its own process renders as one in this process does, and no template hangs or fills
the server.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from luceasync.errors import ModelError, TemplateOverrun, TemplateRefusal, Unavailable
from luceasync.text.control_tokens import BREAK
from luceasync.text.isolation import IsolatedTemplate, RenderLimits
from luceasync.text.past_calls import Arguments
from luceasync.text.template import ChatTemplate, StartTrial, TemplateSource
from tests.children import children
from tests.later import later

SHOWN = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{{ c.function.arguments }}"
    "{% for k, v in c.function.arguments | items %}<{{ k }}={{ v }}>{% endfor %}{% endfor %}"
    "{% endfor %}{{ style }}{{ documents is none }}{{ add_generation_prompt }}"
)
SOURCE = TemplateSource(Path("model"), SHOWN, "with {{ tools | tojson }}", {"bos_token": "<s>"})
ASKED = [{"role": "user", "content": "x"}]
LIMITS = RenderLimits(cpu_s=0.2, memory_bytes=256 << 20, max_text_bytes=1 << 20)
# For the limits of memory and text: on a slow machine the limit of time must not come first.
UNHURRIED = dataclasses.replace(LIMITS, cpu_s=60.0)
# What a model from anywhere may bring, and what it exceeds.
HOSTILE = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "0.2 s",
    "{{ 'a' * 10 ** 10 }}": "256 MiB of memory",
    "{{ '%9999999999d' | format(1) }}": "256 MiB of memory",
    "{{ (messages * 10 ** 7) | join('b' * 100) }}": "takes more than",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}": (
        "256 MiB of memory"
    ),
    "{{ lipsum(n=10 ** 9) }}": "takes more than",
    "{{ 'a' * 10 ** 7 }}": "1 MiB of text",
}


@pytest.fixture(scope="module", autouse=True)
def reused_renderers() -> None:
    """Each template has a process of its own here."""


FAILURES = {
    "division": "{{ 1 / 0 }}",
    "runtime": "{{ cycler() }}",
    "lookup": "{{ 'a'.encode('no') }}",
    "type": "{{ 1 | items | list }}",
    "undefined": "{{ x.y.z }}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "long": "{{ raise_exception('a' * 9999) }}",
}


@pytest.fixture(scope="module")
def isolated() -> Iterator[IsolatedTemplate]:
    template = IsolatedTemplate(SOURCE)
    yield template
    template.close()


def called(arguments: Any) -> list[dict[str, Any]]:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return [*ASKED, {"role": "assistant", "content": None, "tool_calls": calls}]


@pytest.mark.parametrize(
    "messages",
    [
        ASKED,
        [{"role": "user", "content": f"\u00e4 \U0001f600 \ud800 <|im_{BREAK}end|>\0"}],
        called('{"a":  1.50, "b": [true, null]}'),
        called({"a": "\u00e4", "n": {"b": 10**20}}),
        called(Arguments({"other": 1}, '{"not": "the same"}')),
        called("no JSON"),
    ],
)
def test_a_text_is_the_same_as_in_this_process(isolated: IsolatedTemplate, messages) -> None:
    here = ChatTemplate(SHOWN, variables={"bos_token": "<s>"})
    for kwargs in ({}, {"style": ["brief"], "add_generation_prompt": False}):
        try:
            expected = here.render(messages, **kwargs)
        except TemplateRefusal as error:
            with pytest.raises(TemplateRefusal) as caught:
                isolated.render(messages, **kwargs)
            assert str(caught.value) == str(error)
        else:
            assert isolated.render(messages, **kwargs) == expected


def test_tools_have_their_own_source(isolated: IsolatedTemplate) -> None:
    assert isolated.render(ASKED, [{"name": "f"}]) == 'with [{"name": "f"}]'


@pytest.fixture(scope="module")
def failing() -> Iterator[IsolatedTemplate]:
    """Fails in the way that the message names."""
    cases = (f"{{% if messages[0].content == '{name}' %}}{FAILURES[name]}" for name in FAILURES)
    source = "".join(f"{case}{{% endif %}}" for case in cases) + "fine"
    template = IsolatedTemplate(TemplateSource(Path("model"), source))
    yield template
    template.close()


@pytest.mark.parametrize("name", FAILURES)
def test_whatever_a_template_raises_is_told_briefly(failing: IsolatedTemplate, name: str) -> None:
    with pytest.raises(TemplateRefusal, match=r"^The model's chat template refused") as caught:
        failing.render([{"role": "user", "content": name}])
    assert len(str(caught.value)) < 2100
    assert failing.render(ASKED) == "fine"


@pytest.mark.slow
def test_messages_that_are_nested_too_deeply_are_refused(isolated: IsolatedTemplate) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(TemplateRefusal):
        isolated.render([{"role": "user", "content": nested}])
    assert isolated.render(ASKED).startswith("<s>[user]x")


@pytest.mark.slow
@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_template_costs_one_chat_no_more_than_the_limits(hostile: str) -> None:
    source = "{% if messages[0].content == 'bad' %}" + hostile + "{% endif %}fine"
    limits = UNHURRIED if "MiB" in HOSTILE[hostile] else LIMITS
    template = IsolatedTemplate(TemplateSource(Path("model"), source), limits)
    with pytest.raises(TemplateOverrun, match=rf"chat template .*{HOSTILE[hostile]}"):
        template.render([{"role": "user", "content": "bad"}])
    assert template.render(ASKED) == "fine"
    template.close()


def test_a_template_that_compiles_for_ever_is_told_with_its_model() -> None:
    """Jinja computes constants while it compiles."""
    source = "{{ " + " ~ ".join(["'a' * 10 ** 7"] * 2000) + " }}"
    template = IsolatedTemplate(TemplateSource(Path("model"), source), LIMITS)
    with pytest.raises(ModelError, match="model: the chat template takes more than"):
        template.check()


@pytest.mark.parametrize(("source", "words"), [("{% if %}", "line 1"), ("{{ 1 | no }}", "line 1")])
def test_a_template_that_does_not_compile_is_told_with_its_model(source: str, words: str) -> None:
    template = IsolatedTemplate(TemplateSource(Path("model"), source))
    with pytest.raises(ModelError, match=f"^model: the chat template does not compile: {words}"):
        template.check()


@pytest.mark.slow
def test_at_the_start_a_limit_is_an_error_of_the_model() -> None:
    hostile = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = IsolatedTemplate(TemplateSource(Path("model"), hostile), LIMITS)
    with pytest.raises(
        ModelError, match=r"^model: the chat template takes more than 0\.2 s for a short"
    ):
        StartTrial(template, Path("model")).render(ASKED)
    slow = StartTrial(ChatTemplate("x"), Path("model"), limit_s=-1)
    with pytest.raises(ModelError, match="for a few chats"):
        slow.render(ASKED)


def test_a_process_that_was_killed_from_outside_is_replaced() -> None:
    template = IsolatedTemplate(SOURCE)
    text = template.render(ASKED)
    for child in children("luceasync.text.sandbox"):
        child.kill()
    assert template.render(ASKED) == text
    template.close()


def test_closing_ends_what_is_being_rendered() -> None:
    hostile = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = IsolatedTemplate(TemplateSource(Path("model"), hostile), RenderLimits(cpu_s=60))
    begin = time.monotonic()
    with later(0.2, template.close), pytest.raises(Unavailable, match="shutting down"):
        template.render(ASKED)
    assert time.monotonic() - begin < 20
    with pytest.raises(Unavailable, match="shutting down"):
        template.render(ASKED)
