"""Reasoning, text and calls are parted the same way, however the text is cut."""

from __future__ import annotations

import pytest

from luceasync.request import TextPiece
from luceasync.text.answer.call_formats import FORMATS
from luceasync.text.answer.pieces import AnswerPieces
from tests.text.answer.written import SCHEMAS, Told, read, told

CALL = '<tool_call>\n{"name": "run_it", "arguments": {"num": 1}}\n</tool_call>'
CALLS = (("run_it", '{"num": 1}'),)


@pytest.mark.parametrize(
    ("text", "is_reasoning", "expected"),
    [
        ("<think>\nwhy\n</think>\n\nso", False, Told("so", "why", ())),
        ("why\n</think>\n\nso", True, Told("so", "why", ())),
        ("\n<think>why</think>so\n", False, Told("so\n", "why", ())),
        ("</think>\n\nso", True, Told("so", "", ())),
        ("why not", True, Told("", "why not", ())),
        ("<think>why", False, Told("", "why", ())),
        ("<thin", False, Told("<thin", "", ())),
        ("a <think>b</think>", False, Told("a <think>b</think>", "", ())),
        ("a </thi b </think> c", True, Told(" c", "a </thi b ", ())),
        (f"why\n</think>\n\nlook\n\n{CALL}", True, Told("look", "why", CALLS)),
        (f"<think>\nw\n</think>\n\n{CALL}", False, Told("", "w", CALLS)),
        (f"<think>{CALL}</think>x", False, Told("x", CALL, ())),
        (f"a\n{CALL}\nb", False, Told("ab", "", CALLS)),
        ("a <tool b", False, Told("a <tool b", "", ())),
        ("a \n\n", False, Told("a \n\n", "", ())),
        ("", False, Told("", "", ())),
    ],
)
def test_an_answer_is_parted(text: str, is_reasoning: bool, expected: Told) -> None:
    assert read("qwen-json", text, is_reasoning=is_reasoning) == expected
    cuts = range(1, len(text))
    assert read("qwen-json", text, cuts, is_reasoning=is_reasoning) == expected
    for cut in cuts:
        assert read("qwen-json", text, [cut], is_reasoning=is_reasoning) == expected


def test_without_tools_text_is_told_at_once() -> None:
    maker = AnswerPieces(reasons=False)
    assert maker.make("a <tool_call>  ", is_last=False) == (TextPiece("a <tool_call>  "),)
    assert maker.make("", is_last=True) == ()


def test_text_is_told_as_soon_as_it_can_belong_to_no_call() -> None:
    maker = AnswerPieces(reasons=False)
    assert told(maker.make("ab", is_last=False)).text == "ab"


def test_an_argument_is_told_when_it_is_whole() -> None:
    maker = AnswerPieces(calls=FORMATS["qwen-json"], schemas=SCHEMAS, call_id=lambda: "id")
    first = maker.make('<tool_call>{"name": "run_it", "arguments": {"a": "x', is_last=False)
    assert told(first).calls == (("run_it", ""),)
    second = maker.make('y", "b', is_last=False)
    assert "".join(piece.text for piece in second) == '{"a": "xy"'  # type: ignore[union-attr]


def test_a_long_answer_is_not_kept() -> None:
    maker = AnswerPieces()
    for _ in range(1000):
        maker.make("some text ", is_last=False)
    assert len(maker._text.text) < 100


@pytest.mark.parametrize(
    ("name", "text", "left"),
    [
        ("qwen-json", "so <tool_call>", "so"),
        ("qwen-json", 'so\n<tool_call>\n{"name": "ru', "so"),
        ("qwen-json", "<tool_ca", ""),
        ("qwen-json", "a <", "a <"),  # perhaps it was one of another kind
        ("qwen-json", "a <table", "a <table"),
        ("qwen-xml", "so <tool_call>\n<funct", "so"),
        ("qwen-xml", "so <function=ru", "so"),
        ("glm-xml", "so <tool_call>ru", "so"),
        ("llama-json", '{"name": "ru', '{"name": "ru'),  # an answer that is JSON begins so too
        ("qwen-json", "<tool_call>nothing of the kind", "<tool_call>nothing of the kind"),
    ],
)
def test_of_a_call_that_was_cut_off_at_its_tag_nothing_is_told(name, text, left) -> None:
    for cut in range(len(text) + 1):
        maker = AnswerPieces(calls=FORMATS[name], schemas=SCHEMAS)
        pieces = [
            *maker.make(text[:cut], is_last=False),
            *maker.make(text[cut:], is_last=True, is_cut=True),
        ]
        assert told(tuple(pieces)).text == left and not told(tuple(pieces)).calls


def test_a_model_that_ends_there_itself_has_said_it() -> None:
    maker = AnswerPieces(calls=FORMATS["qwen-json"], schemas=SCHEMAS)
    assert told(maker.make("so <tool_call>", is_last=True)).text == "so <tool_call>"
