"""Answers in channels: each message is reasoning, text or a call by its header alone."""

from __future__ import annotations

import json
import random

import pytest

from luceasync.text.answer.channels import ChannelPieces, MessageHeader
from luceasync.text.detokenizer import ChannelScanner, StopScanner
from tests.text.answer.written import AnswerContents, contents_of, read

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.run_it <|constrain|>json<|message|>"


def contents(text: str, reasoning: str = "", *calls: str) -> AnswerContents:
    return AnswerContents(text, reasoning, tuple(("run_it", call) for call in calls))


CASES = {
    f"{ANALYSIS}why{NEXT}{FINAL}so": contents("so", "why"),
    f"{ANALYSIS}a{NEXT}{ANALYSIS}b\n{NEXT}{FINAL}\nso ": contents("so", "a\n\nb"),
    f"{ANALYSIS}why{NEXT}<|channel|>commentary<|message|>I will.{NEXT}{CALL}{{}}<|call|>": contents(
        "I will.", "why", "{}"
    ),
    # The recipient is in the header's role or its channel, with or without its type.
    'to=functions.run_it<|channel|>commentary json<|message|>{"num": 1}': contents(
        "", "", '{"num": 1}'
    ),
    "<|start|>assistant to=run_it<|channel|>analysis<|message|>{}": contents("", "", "{}"),
    # A message may lack its end, or its header.
    f'{ANALYSIS}why{CALL}{{"num": 2}}': contents("", "why", '{"num": 2}'),
    "plain text": contents("plain text"),
    f"{ANALYSIS}never ends": contents("", "never ends"),
    # What is no call stays as it is; a header that is cut off says nothing.
    f'{CALL}{{"num": 1, }}<|end|>': contents(CALL + '{"num": 1, }'),
    f'{CALL}{{"num":': contents(CALL + '{"num":'),
    f"{FINAL}so{NEXT}<|channel|>comm": contents("so"),
    "<|channel|>commentary to=python<|message|>1 + 1": contents(
        "<|channel|>commentary to=python<|message|>1 + 1"
    ),
    f"{FINAL}write <|channel|>, then <|start|> it": contents(
        "write <|channel|>, then <|start|> it"
    ),
    f"<|channel|>commentary\n\n{FINAL}so": contents("<|channel|>commentary\n\nso"),
}


@pytest.mark.parametrize("text", CASES)
def test_a_message_is_what_its_header_says(text: str) -> None:
    assert read("harmony", text) == CASES[text]
    assert read("harmony", text, range(1, len(text))) == CASES[text]


def test_without_tools_a_call_is_text() -> None:
    maker = ChannelPieces()
    assert contents_of(maker.make(f"{CALL}{{}}", is_last=True)).text == f"{CALL}{{}}"


def test_an_answer_that_the_prompt_has_begun_goes_on() -> None:
    maker = ChannelPieces(opened=MessageHeader.of(f"<|start|>assistant{FINAL}"))
    assert contents_of(maker.make("so on", is_last=True)) == contents("so on")


def test_reasoning_that_is_not_told_apart_is_text() -> None:
    maker = ChannelPieces(separates=False)
    found = contents_of(maker.make(f"{ANALYSIS}why{NEXT}{FINAL}so", is_last=True))
    assert found == contents("why\n\nso")


def test_stop_strings_count_in_text_for_the_user_alone() -> None:
    """However the text is split; headers are no text either."""
    text = f"{ANALYSIS}final stop{NEXT}{CALL}{json.dumps({'text': 'stop'})}{NEXT}{FINAL}go stop on"
    rng = random.Random(4)
    for _ in range(50):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(5))
        scanner, stops, found = ChannelScanner(), StopScanner(["stop", "final"]), ""
        parts = [
            part
            for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)
            for part in scanner.push(text[begin:end])
        ]
        parts += scanner.flush()
        assert "".join(part.text for part in parts) == text
        for part in parts:
            found += stops.push(part.text).text if part.is_answer else part.text
            if stops.found:
                break
        assert (found, stops.found) == (text[: text.rfind("stop")], "stop")
