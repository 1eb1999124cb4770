"""Whatever a model writes, and however it is split and cut: every character is in a call, in
reasoning or in text, and the arguments of a call are a JSON object.
"""

from __future__ import annotations

import json
import random

import pytest

from tests.text.answer.written import (
    IN_CHANNELS,
    TOOL,
    WRITERS,
    AnswerContents,
    a_call,
    a_string,
    read,
)

NUM_CALLS = 150  # of each format
NUM_TEXTS = 60
WORDS = [
    "<think>",
    "</think>",
    "so ",
    "\n",
    " ",
    "{",
    "[",
    "é😀",
    '"',
    "<tool_call>",
    "</function>",
]


@pytest.fixture(params=sorted(WRITERS))
def call_format(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def read_alike(
    call_format: str, text: str, rng: random.Random, *, is_reasoning: bool = False
) -> AnswerContents:
    """What `text` is parsed to, which must not depend on how it is split."""
    whole = read(call_format, text, is_reasoning=is_reasoning)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(3))
    assert read(call_format, text, cuts, is_reasoning=is_reasoning) == whole, text
    for _, arguments in whole.calls:
        assert isinstance(json.loads(arguments), dict), text
    return whole


@pytest.mark.slow
def test_hundreds_of_calls(call_format: str) -> None:
    rng = random.Random(5)
    for _ in range(NUM_CALLS):
        call = a_call(rng)
        found = read_alike(call_format, WRITERS[call_format](call), rng)
        assert [(n, json.loads(a)) for n, a in found.calls] == [(TOOL, call.arguments)]
        assert found.text == ""


@pytest.mark.slow
def test_a_call_that_lacks_any_character_is_a_call_or_the_same_text(call_format: str) -> None:
    rng = random.Random(6)
    text = WRITERS[call_format](a_call(rng))
    for i in range(len(text)):
        for broken in (text[:i], text[:i] + text[i + 1 :], text[:i] + "\x00" + text[i + 1 :]):
            found = read_alike(call_format, broken, rng)
            if not found.calls and call_format not in IN_CHANNELS:  # whose headers are no text
                assert found.text == broken


@pytest.mark.slow
@pytest.mark.parametrize("is_reasoning", [False, True])
def test_no_word_of_any_text_is_lost(call_format: str, is_reasoning: bool) -> None:
    """Numbered words between calls, parts of calls and tags all come, in order."""
    rng = random.Random(7)
    for _ in range(NUM_TEXTS):
        parts, words = [], []
        for i in range(rng.randrange(6)):
            call = WRITERS[call_format](a_call(rng))
            begin = rng.randrange(len(call))
            parts += [
                rng.choice(
                    [
                        call,
                        call[:begin],
                        call[begin:],
                        rng.choice(WORDS),
                        a_string(rng),
                    ]
                ),
                f"\nword{i}\n",
            ]
            words.append(f"word{i}")
        text = "".join(parts)
        found = read_alike(call_format, text, rng, is_reasoning=is_reasoning)
        said = found.reasoning + found.text + "".join(n + a for n, a in found.calls)
        assert all(word in said for word in words), text
        if call_format in IN_CHANNELS:
            continue
        if not found.calls and not found.reasoning and "<think>" not in text:
            rest = text.removeprefix("</think>").lstrip("\n") if is_reasoning else text
            assert found.text == rest


@pytest.mark.slow
def test_a_call_in_reasoning_that_never_ends_is_a_call(call_format: str) -> None:
    rng = random.Random(8)
    for _ in range(20):
        call = a_call(rng)
        text = f"why\n{WRITERS[call_format](call)}"
        found = read_alike(call_format, text, rng, is_reasoning=True)
        assert [(n, json.loads(a)) for n, a in found.calls] == [(TOOL, call.arguments)], text
        assert (found.reasoning, found.text) == ("why", "")
        if call_format in IN_CHANNELS:  # a message ends with the next one
            continue
        ended = read_alike(call_format, f"{text}\n</think>\n\nso", rng, is_reasoning=True)
        assert ended == AnswerContents("so", text, ())
