"""The check of strangers finds them, and tells them from friends."""

from __future__ import annotations

import pytest

from luceasync.bench.report import Report
from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.text.guarded import GuardedTemplate
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer
from tests.acceptance import check_strangers


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED_MODEL_DIR)


@pytest.fixture(scope="module")
def trusting() -> ChatTemplate:
    return ChatTemplate.load(BUNDLED_MODEL_DIR)


def test_forged_turns_are_told_of_a_template_that_trusts_texts_only(tokenizer, trusting, capsys):
    guarded = GuardedTemplate(trusting, tokenizer)
    assert check_strangers.forge(Report({}), tokenizer, trusting, guarded)
    assert not check_strangers.forge(Report({}), tokenizer, trusting, trusting)
    assert "| user | 1 | 3 | 1 |" in capsys.readouterr().out


def test_another_id_is_told(tokenizer, trusting):
    class Shouting:
        def render(self, *args, **kwargs) -> str:
            return trusting.render(*args, **kwargs).upper()

    guarded = GuardedTemplate(trusting, tokenizer)
    assert check_strangers.converse(Report({}), tokenizer, trusting, guarded, 5)
    assert not check_strangers.converse(Report({}), tokenizer, trusting, Shouting(), 5)


@pytest.mark.parametrize("let_in", [None, "a rebound name posts", "a page posts JSON"])
@pytest.mark.parametrize("kept_out", [None, "a program, JSON"])
def test_who_is_let_in_or_kept_out_wrongly_is_told(monkeypatch, let_in, kept_out):
    answers = {
        str(case): 403 if who in check_strangers.STRANGERS else 200
        for who, case in (check_strangers.STRANGERS | check_strangers.FRIENDS).items()
        if who not in (let_in, kept_out)
    }

    def asked(url: str, *case: object) -> tuple[int, str]:
        wrong = 403 if case == check_strangers.FRIENDS["a program, JSON"] else 200
        return answers.get(str(case), wrong), "no"

    monkeypatch.setattr(check_strangers, "asked", asked)
    assert check_strangers.knock(Report({}), "http://x") == (let_in is None and kept_out is None)
