"""The format of answers is detected from the template."""

from __future__ import annotations

from pathlib import Path

import pytest

from luceasync.request import CallPiece, ReasoningPiece, TextPiece
from luceasync.text.answer.answer_format import AnswerFormat
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parents[2] / "acceptance" / "turns"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture
def template() -> ChatTemplate:
    return ChatTemplate((TEMPLATES / "qwen3.5.jinja").read_text())


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_dir)


@pytest.mark.parametrize(("file", "name"), [("qwen3", "qwen-json"), ("qwen3.5", "qwen-xml")])
def test_formats_of_real_templates(file: str, name: str, tokenizer: Tokenizer) -> None:
    answer_format = AnswerFormat.of(
        ChatTemplate((TEMPLATES / f"{file}.jinja").read_text()), tokenizer
    )
    assert answer_format.calls is not None and answer_format.calls.name == name


def test_a_template_without_tools_has_plain_answers(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert AnswerFormat.of(template, tokenizer).calls is None


def test_a_template_that_refuses_the_example_has_plain_answers(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ raise_exception('no tools') }}")
    assert AnswerFormat.of(template, tokenizer).calls is None


def test_a_named_format_wins(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    answer_format = AnswerFormat.of(
        template, tokenizer, reasoning_format="none", tool_format="llama-json"
    )
    assert answer_format.calls is not None and answer_format.calls.name == "llama-json"
    assert not answer_format.reasons
    assert AnswerFormat.of(template, tokenizer, tool_format="none").calls is None


def test_reasoning_may_be_opened_by_the_prompt() -> None:
    answer_format = AnswerFormat(reasons=True)
    opened = answer_format.maker("<assistant>\n<think>\n", None)
    assert opened.make("a\n</think>\n\nb", is_last=True) == (ReasoningPiece("a"), TextPiece("b"))
    closed = answer_format.maker("<assistant>\n<think>\n\n</think>\n\n", None)
    assert closed.make("b", is_last=True) == (TextPiece("b"),)


def test_calls_are_parsed_only_if_there_are_tools(
    template: ChatTemplate, tokenizer: Tokenizer
) -> None:
    answer_format = AnswerFormat.of(template, tokenizer)
    said = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    with_tools = answer_format.maker("", TOOLS, call_id=lambda: "id").make(said, is_last=True)
    assert with_tools[0] == CallPiece(0, "id", "f")
    assert answer_format.maker("", None).make(said, is_last=True) == (TextPiece(said),)
