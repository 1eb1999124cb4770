"""Answers of every format of calls, whole and broken at random, are told alike by every API,
streamed or not, and can be sent back; OpenAI's and Anthropic's own types take them.

A small part of tests/acceptance/fuzz_answers.py.
"""

from __future__ import annotations

import random

import pytest

from luceasync.server.app import create_app
from luceasync.server_config import ServerConfig
from luceasync.text.answer.answer_format import REASONING_WORDS
from luceasync.text.answer.pieces import THINK, ReasoningWords
from tests.acceptance.answers.cases import Case, Wrong
from tests.acceptance.answers.saying import SayingEngine
from tests.acceptance.fuzz_answers import check, fuzz
from tests.text.answer.written import WRITERS

HARMONY = REASONING_WORDS[0]


@pytest.mark.slow
async def test_every_api_tells_any_answer_alike() -> None:
    found, wrong = await fuzz(2 * len(WRITERS), 0, sorted(WRITERS))
    assert not wrong
    assert found["with calls"] > len(WRITERS) // 2 and found["with reasoning"] > 10
    assert found["calls of a custom tool"] > 5


@pytest.mark.parametrize(("name", "words"), [("qwen-json", THINK), ("harmony", HARMONY)])
async def test_what_is_wrong_is_found(name: str, words: ReasoningWords) -> None:
    """A word that is missing, and a request that is refused."""
    engine = SayingEngine(name, words)
    app = create_app(engine, ServerConfig())
    case = Case("word0x", ("word0x", "word1x"), False, True, True, None, None, False)
    engine.say(case, random.Random(0))
    with pytest.raises(Wrong, match=r"lost: \['word1x'\]"):
        await check(app, engine, case)
    with pytest.raises(Wrong, match="400"):
        await check(app, engine, Case("x", (), False, True, True, None, 1 << 40, False))
