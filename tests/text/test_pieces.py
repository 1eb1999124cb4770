"""The text of a choice becomes typed pieces; today all of it is the answer's text."""

from __future__ import annotations

from luceasync.request import TextPiece
from luceasync.text.answer.pieces import PlainText


def test_plain_text_is_passed_on_as_it_comes():
    maker = PlainText()
    pieces = [maker.make("<think>", is_last=False), maker.make(" so", is_last=True)]
    assert pieces == [(TextPiece("<think>"),), (TextPiece(" so"),)]


def test_no_text_is_no_piece():
    assert PlainText().make("", is_last=False) == PlainText().make("", is_last=True) == ()
