"""What a model writes, whole and broken at random, and what clients see of it."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from luceasync.text.answer.answer_format import REASONING_WORDS
from luceasync.text.answer.pieces import ReasoningWords
from tests.text.answer.written import IN_CHANNELS, WRITERS, Call, a_call, a_string

STOP = "STOP here"
CUSTOM = "write_text"  # a tool with one text


class Wrong(Exception):
    """What an answer should not be."""


class Seen(NamedTuple):
    """What a client sees of an answer; a call is its name and arguments."""

    reasoning: str
    content: str
    calls: list[tuple[str, dict[str, Any]]]
    finish: str  # in OpenAI's words


@dataclass(frozen=True)
class Case:
    """`text`: what the model writes, of which `words` are outside of calls; the prompt has opened
    reasoning if it `is_opened`. `custom`: the format of a custom tool that is offered, if one is.
    """

    text: str
    words: tuple[str, ...]
    is_opened: bool
    has_tools: bool
    is_parallel: bool
    stop: str | None
    max_tokens: int | None
    odd_bytes: bool
    custom: Literal["text", "lark", "regex"] | None = None


def words_of(name: str, rng: random.Random) -> ReasoningWords:
    """Words around reasoning for a format; those of channels belong to their format."""
    rows = [row for row in REASONING_WORDS if row.has_channels == (name in IN_CHANNELS)]
    return rng.choice([row for row in rows if not row.answer_end])


def a_case(name: str, words: ReasoningWords, rng: random.Random) -> Case:
    """An answer with numbered words between thoughts, calls, parts of calls, tags and odd text."""
    written: list[str] = []
    kept: list[str] = []

    def word() -> str:
        kept.append(f"word{len(kept)}x")
        return f"\n{kept[-1]}\n"

    has_channels = words.has_channels
    is_opened = rng.random() < 0.3
    if is_opened or rng.random() < 0.4:
        written += ["" if is_opened else words.begin, word()]
        written += rng.choice([[words.end, words.after], [words.end, words.after], [words.end], []])
    if has_channels and rng.random() < 0.9:
        written.append(words.lead)
    custom = rng.choice(["text", "lark", "regex"]) if rng.random() < 0.4 else None
    for _ in range(rng.randrange(5)):
        is_custom = rng.random() < (0.5 if custom else 0.05)
        what = a_custom_call(rng) if is_custom else a_call(rng)
        call = WRITERS[name](what)
        bare = json.dumps({"name": what.name, "arguments": what.arguments})
        place = rng.randrange(len(call))
        broken = rng.choice([call[:place], call[place:], call[:place] + call[place + 1 :]])
        odd = rng.choice([words.end, words.begin, "{", "[", '"', "é😀", "\n\n", "<tool_call>", " "])
        written.append(rng.choice([call, call, call, bare, broken, odd, a_string(rng)]))
        if rng.random() < 0.7:
            written.append(word())
    stop = STOP if rng.random() < 0.1 else None
    if stop:
        written.insert(rng.randrange(len(written) + 1), rng.choice([STOP, STOP, STOP[:6]]))
    text = "".join(written)
    return Case(
        text,
        tuple(kept),
        is_opened,
        has_tools=rng.random() < 0.9,
        is_parallel=rng.random() < 0.85,
        stop=stop,
        max_tokens=rng.randrange(1, len(text) + 2) if rng.random() < 0.15 else None,
        odd_bytes=rng.random() < 0.05,
        custom=custom,  # type: ignore[arg-type]
    )


def a_custom_call(rng: random.Random) -> Call:
    """A call of the custom tool; a few lack its text, or have something else too."""
    odd = rng.choice([{}, {"other": a_string(rng)}, {"input": a_string(rng), "num": 3}])
    arguments = odd if rng.random() < 0.1 else {"input": a_string(rng) + "\n" * rng.randrange(2)}
    return Call(CUSTOM, arguments)
