"""Deltas reach their streams, and an answer that has ended is remembered."""

from __future__ import annotations

from array import array
from dataclasses import replace
from types import SimpleNamespace

from luceasync.engine.streams import Answers
from luceasync.request import Delta, Finish, Timings, Usage
from luceasync.text.prompt import RenderedPrompt

IDS = array("i", (1, 2))
FINISH = Finish("stop", Usage(2, 3), Timings(0, 1, 2, 2, 2))


class Remembering:
    """In place of a tenant's history: what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple] = []

    def remember(self, text, ids, said) -> None:
        self.told.append((text, ids, list(said)))


def prompt(history: Remembering, text: str | None = "hello") -> RenderedPrompt:
    return RenderedPrompt(SimpleNamespace(history=history), text, IDS, ())


def beside(call) -> None:
    """In place of another thread."""
    call()


def delta(index: int, *ids: int, finish: Finish | None = None) -> Delta:
    return Delta(index, (), ids, (), finish)


async def test_each_delta_goes_to_its_stream_and_the_ends_are_told():
    answers = Answers(beside)
    first = answers.open(0, prompt(Remembering()), 1, lambda: None)
    second = answers.open(1, prompt(Remembering()), 1, lambda: None)
    told = [(1, delta(0, 5)), (0, delta(0, 6, finish=FINISH)), (1, delta(0, finish=FINISH))]
    assert answers.deliver(told) == [("", FINISH), ("", FINISH)]
    assert [d.token_ids for d in [d async for d in first]] == [(6,)]
    assert [d.token_ids for d in [d async for d in second]] == [(5,), ()]
    assert repr(answers) == "Answers(0 open)"


def test_an_answer_is_open_until_its_last_choice_has_ended():
    answers = Answers(beside)
    answers.open(0, prompt(Remembering()), 2, lambda: None)
    answers.deliver([(0, delta(1, finish=FINISH))])
    assert repr(answers) == "Answers(1 open)"


def test_what_a_choice_said_is_remembered_with_the_prompt_that_it_followed():
    answers, history = Answers(beside), Remembering()
    answers.open(0, prompt(history), 2, lambda: None)
    answers.deliver([(0, delta(0, 5)), (0, delta(1, 7)), (0, delta(0, 6, finish=FINISH))])
    assert history.told == []  # whoever reads the answer is first
    answers.remember(), answers.remember()
    assert history.told == [("hello", IDS, [5, 6])]


def test_whether_a_choice_can_come_back_is_tried_once_when_it_has_begun():
    tried: list[tuple] = []
    asked = replace(prompt(Remembering()), answer_returns=tried.append)
    answers = Answers(beside)
    answers.open(0, asked, 2, lambda: None)
    assert not tried
    answers.deliver([(0, delta(0, 5)), (0, delta(1, 7)), (0, delta(0, 6, finish=FINISH))])
    assert tried == [(5,), (7,)]


def test_nothing_is_remembered_after_a_prompt_that_was_no_text():
    answers, history = Answers(beside), Remembering()
    answers.open(0, prompt(history, text=None), 1, lambda: None)
    assert answers.deliver([(0, delta(0, 5, finish=FINISH))]) == [("", FINISH)]
    answers.remember()
    assert history.told == []
