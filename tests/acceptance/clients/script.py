"""What a scripted model says. Agents choose freely, so the steps stand in the user's message, as
`[[tool {"argument": 1}]]` and `[[say words]]`, one after the other.

Owns how steps are read from a rendered prompt, and how a call is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

STEP = re.compile(r"\[\[(\w+) (.*?)\]\]", re.DOTALL)
RESULT = "<tool_response>"
TOOLS = "# Tools"
THOUGHT = "Let me see what is asked.\n</think>\n\n"

WriteCall = Callable[[str, Mapping[str, Any]], str]


def as_xml(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as Qwen3.5 writes it."""
    said = (
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>"
        for key, value in arguments.items()
    )
    return "\n".join(["<tool_call>", f"<function={name}>", *said, "</function>", "</tool_call>"])


def as_json(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as Qwen3 writes it, with spaces that no client would write again."""
    spaced = json.dumps(arguments, ensure_ascii=False, separators=(",  ", ":  "))
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {spaced}}}\n</tool_call>'


WRITERS: dict[str, WriteCall] = {"qwen3.5": as_xml, "qwen3": as_json}


def answer(prompt: str, write_call: WriteCall) -> str:
    """What the model says to `prompt`: the next step of the last message with steps; without tools
    or steps, a few words.
    """
    thought = THOUGHT if prompt.rstrip().endswith("<think>") else ""
    steps = list(_last_run(prompt))
    if not steps or (TOOLS not in prompt and steps[-1][1] != "say"):
        return thought + "A few words about it"
    if TOOLS not in prompt:
        return thought + steps[-1][2]
    num_done = prompt.count(RESULT, steps[-1].end())
    name, given = steps[min(num_done, len(steps) - 1)].groups()
    return thought + (given if name == "say" else write_call(name, json.loads(given)))


def _last_run(prompt: str) -> list[re.Match[str]]:
    """The steps of the last message that has any."""
    found = list(STEP.finditer(prompt))
    run = found[-1:]
    for step in reversed(found[:-1]):
        if prompt[step.end() : run[0].start()].strip():
            break
        run.insert(0, step)
    return run
