"""llm, the command, with a schema: two turns, streamed and not."""

from __future__ import annotations

import json

from llm_command import MODEL, llm
from told import LONG, tell

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["json.dumps", "json.loads"]},
        "depth": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "depth"],
    "additionalProperties": False,  # else a model of any kind adds what it likes
}


def check(said: str) -> None:
    found = json.loads(said)
    assert found["name"].startswith("json.") and 0 <= found["depth"] <= 9


def two_turns():
    check(llm("-m", MODEL, "--schema", json.dumps(SCHEMA), LONG))
    check(llm("-c", "--schema", json.dumps(SCHEMA), "And json.loads?"))


def plain():
    check(llm("-m", MODEL, "--no-stream", "--schema", json.dumps(SCHEMA), LONG))


tell(two_turns, plain)
