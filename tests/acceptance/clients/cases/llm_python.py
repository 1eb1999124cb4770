"""llm, the command: a prompt, a second turn, a tool, a model of completions."""

from __future__ import annotations

from llm_command import MODEL, llm
from told import LONG, WORDS, tell

TOOL = (
    'def look_up(name: str, depth: int) -> str:\n    "Look it up."\n    return "it writes " + name'
)


def two_turns():
    assert llm("-m", MODEL, LONG) == WORDS
    assert llm("-c", "And json.loads?") == WORDS


def plain():
    assert llm("-m", MODEL, "--no-stream", "Hello") == WORDS


def tools():
    asked = 'Look. [[look_up {"name": "json", "depth": 2}]] [[say It is found]]'
    assert llm("-m", MODEL, "--functions", TOOL, asked) == "It is found"


def completion():
    assert llm("-m", f"{MODEL}-text", "The sky is", "-o", "max_tokens", "4")


tell(two_turns, plain, tools, completion)
