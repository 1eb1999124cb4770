"""How an answer to a schema ended, in words.

Made-up schemas are judged by validity.py, others by the package jsonschema, which they need. An
answer that was cut off only has to be a valid beginning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tests.acceptance.grammar.validity import is_valid

Judge = Callable[[Any, Any], bool]
DATES = ("date", "time", "date-time")
VALID, CUT, REFUSED = "valid", "cut off", "refused"
WRONG = "NOT VALID"
NO_PREFIX = "CUT OFF, AND NO BEGINNING"


def by_package() -> Judge:
    """Whether a value is valid, formats included. Raises ImportError without the package."""
    from jsonschema import FormatChecker
    from jsonschema.validators import Draft202012Validator, validator_for

    formats = FormatChecker()
    for name in DATES:  # RFC 3339 has a year 0000, which Python and so the package do not know
        formats.checks(name)(lambda value, name=name: is_valid(value, {"format": name}))

    def judge(value: Any, schema: Any) -> bool:
        kind = validator_for(schema, default=Draft202012Validator)
        return bool(kind(schema, format_checker=formats).is_valid(value))

    return judge


def end_of(schema: Any, text: str, reason: str, judge: Judge = is_valid) -> str:
    """One of the words above; after REFUSED also why."""
    if reason == "length":
        return CUT if is_beginning(text) else NO_PREFIX
    if reason != "stop":
        return f"{REFUSED}: {reason}"
    try:
        return VALID if judge(json.loads(text), schema) else WRONG
    except ValueError:
        return WRONG


_STRING = r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*'
_WHOLE = re.compile(rf'{_STRING}"|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null')
_PART = re.compile(
    rf"(?:{_STRING}(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?|-?(?:0|[1-9]\d*)?(?:\.\d*)?(?:[eE][+-]?\d*)?"
    r"|t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?)\Z"
)


def is_beginning(text: str) -> bool:
    """Whether more text can complete it to JSON: a reading token by token."""
    text = text.removesuffix("\N{REPLACEMENT CHARACTER}")  # half a character
    at, open_ones, wanted = 0, "", "value"
    while at < len(text):
        char = text[at]
        if char in " \n\t\r":
            at += 1
        elif wanted in ("value", "value or end") and char in "{[":
            open_ones, at = open_ones + char, at + 1
            wanted = "name or end" if char == "{" else "value or end"
        elif wanted.endswith("end") and open_ones and char == "]}"[open_ones[-1] == "{"]:
            open_ones, at, wanted = open_ones[:-1], at + 1, "end"
        elif wanted == "end" and open_ones and char == ",":
            at, wanted = at + 1, "name" if open_ones[-1] == "{" else "value"
        elif wanted == "colon" and char == ":":
            at, wanted = at + 1, "value"
        elif wanted in ("colon", "end") or (wanted.startswith("name") and char != '"'):
            return False
        elif _PART.match(text, at):
            return True
        elif whole := _WHOLE.match(text, at):
            at, wanted = whole.end(), "colon" if wanted.startswith("name") else "end"
        else:
            return False
    return True
