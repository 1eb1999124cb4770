"""Reasoning, text and calls are separated alike, however the text is split."""

from __future__ import annotations

import pytest

from luceasync.request import TextPiece
from luceasync.text.answer.call_formats import FORMATS
from luceasync.text.answer.pieces import AnswerPieces, PlainText
from tests.text.answer.written import SCHEMAS, AnswerContents, contents_of, read

CALL = '<tool_call>\n{"name": "run_it", "arguments": {"num": 1}}\n</tool_call>'
CALLS = (("run_it", '{"num": 1}'),)


@pytest.mark.parametrize(
    ("text", "is_reasoning", "expected"),
    [
        ("<think>\nwhy\n</think>\n\nso", False, AnswerContents("so", "why", ())),
        ("why\n</think>\n\nso", True, AnswerContents("so", "why", ())),
        ("\n<think>why</think>so\n", False, AnswerContents("so\n", "why", ())),
        ("</think>\n\nso", True, AnswerContents("so", "", ())),
        ("why not", True, AnswerContents("", "why not", ())),
        ("<think>why", False, AnswerContents("", "why", ())),
        ("<thin", False, AnswerContents("<thin", "", ())),
        ("a <think>b</think>", False, AnswerContents("a <think>b</think>", "", ())),
        ("a </thi b </think> c", True, AnswerContents(" c", "a </thi b ", ())),
        (f"why\n</think>\n\nlook\n\n{CALL}", True, AnswerContents("look", "why", CALLS)),
        (f"<think>\nw\n</think>\n\n{CALL}", False, AnswerContents("", "w", CALLS)),
        (f"<think>{CALL}</think>x", False, AnswerContents("x", CALL, ())),
        (f"a\n{CALL}\nb", False, AnswerContents("a\n\nb", "", CALLS)),
        (f"{CALL}\n\nb\n", False, AnswerContents("b\n", "", CALLS)),
        (f"a\n\n{CALL}\n", False, AnswerContents("a", "", CALLS)),
        (f"why\n{CALL}", True, AnswerContents("", "why", CALLS)),
        (f"why\n{CALL}\nso", True, AnswerContents("so", "why", CALLS)),
        (f"why\n{CALL}\n</think>\n\nso", True, AnswerContents("so", f"why\n{CALL}", ())),
        ("why <tool_call>", True, AnswerContents("", "why <tool_call>", ())),
        ("a <tool_call> b </think>c", True, AnswerContents("c", "a <tool_call> b ", ())),
        ("a <tool b", False, AnswerContents("a <tool b", "", ())),
        ("a \n\n", False, AnswerContents("a \n\n", "", ())),
        ("", False, AnswerContents("", "", ())),
    ],
)
def test_an_answer_is_split_into_pieces(
    text: str, is_reasoning: bool, expected: AnswerContents
) -> None:
    assert read("qwen-json", text, is_reasoning=is_reasoning) == expected
    cuts = range(1, len(text))
    assert read("qwen-json", text, cuts, is_reasoning=is_reasoning) == expected
    for cut in cuts:
        assert read("qwen-json", text, [cut], is_reasoning=is_reasoning) == expected


def test_without_tools_text_is_emitted_at_once() -> None:
    maker = AnswerPieces(reasons=False)
    assert maker.make("a <tool_call>  ", is_last=False) == (TextPiece("a <tool_call>  "),)
    assert maker.make("", is_last=True) == ()


def test_text_is_emitted_once_it_cannot_belong_to_a_call() -> None:
    maker = AnswerPieces(reasons=False)
    assert contents_of(maker.make("ab", is_last=False)).text == "ab"


def test_a_call_is_emitted_once_it_is_whole() -> None:
    maker = AnswerPieces(calls=FORMATS["qwen-json"], schemas=SCHEMAS, call_id=lambda: "id")
    assert maker.make(CALL[:-1], is_last=False) == ()
    assert contents_of(maker.make(CALL[-1], is_last=False)).calls == CALLS


def test_reasoning_goes_on_after_what_is_no_call() -> None:
    maker = AnswerPieces(is_reasoning=True, calls=FORMATS["qwen-json"], schemas=SCHEMAS)
    assert contents_of(maker.make("a <tool_call>", is_last=False)).reasoning == "a"
    assert contents_of(maker.make(" b", is_last=False)).reasoning == " <tool_call> b"


def test_a_long_answer_is_not_buffered() -> None:
    maker = AnswerPieces()
    for _ in range(1000):
        maker.make("some text ", is_last=False)
    assert len(maker._text.text) < 100


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen-json", 'so\n<tool_call>\n{"name": "ru'),
        ("qwen-json", "<tool_ca"),
        ("qwen-json", "a <"),
        ("qwen-json", "<tool_call>nothing of the kind"),
        ("qwen-xml", "so <tool_call>\n<funct"),
        ("qwen-xml", "so <function=run_it>\n<parameter=num>\n5"),
        ("glm-xml", "so <tool_call>ru"),
        ("llama-json", '{"name": "ru'),
    ],
)
def test_a_call_that_never_ends_is_text(name, text) -> None:
    for cut in range(len(text) + 1):
        maker = AnswerPieces(calls=FORMATS[name], schemas=SCHEMAS)
        pieces = [
            *maker.make(text[:cut], is_last=False),
            *maker.make(text[cut:], is_last=True),
        ]
        assert contents_of(tuple(pieces)) == AnswerContents(text, "", ())


def test_an_incomplete_tag_that_ends_an_answer_is_text() -> None:
    maker = AnswerPieces(calls=FORMATS["qwen-json"], schemas=SCHEMAS)
    assert contents_of(maker.make("so <tool_call>", is_last=True)).text == "so <tool_call>"


def test_plain_text_is_passed_on():
    maker = PlainText()
    pieces = [maker.make("<think>", is_last=False), maker.make(" so", is_last=True)]
    assert pieces == [(TextPiece("<think>"),), (TextPiece(" so"),)]


def test_empty_text_gives_no_piece():
    assert PlainText().make("", is_last=False) == PlainText().make("", is_last=True) == ()
