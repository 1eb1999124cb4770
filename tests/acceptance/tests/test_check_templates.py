"""The check of templates tells what is rendered otherwise than by transformers, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.check_templates import CHATS, expected, find

TURNS = Path(__file__).parents[1] / "turns"
NO_CALLS = "{{ tools }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.slow
def test_a_template_renders_as_transformers_renders_it() -> None:
    finding = find(TURNS / "qwen3.jinja")
    assert not finding.differing and finding.equal == len(CHATS)
    assert (finding.calls, finding.max_calls, finding.reasoning) == ("qwen-json", None, "`<think>`")
    assert finding.between == "\n"


@pytest.mark.slow
def test_calls_that_are_dropped_count_as_told_and_errors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "no.jinja"
    path.write_text(NO_CALLS)
    finding = find(path)
    assert (finding.told, finding.calls, dict(finding.differing)) == (3, "none", {})
    path.write_text("{% if %}")
    assert "line 1" in find(path).error


def test_a_text_of_transformers_is_that_of_either_form_of_arguments() -> None:
    [called] = [chat for chat in CHATS if chat.name == "call"]
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}"
    texts = list(expected(source + "{% endfor %}{% endfor %}", called))
    assert texts == ["{'city': 'Oslo'}", '{"city": "Oslo"}']
