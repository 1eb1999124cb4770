"""How settings may be written: text (flag, variable) or a TOML value to the value that is meant.

Every parser raises ValueError for what it does not take. Knows no setting by name.
"""

from __future__ import annotations

import logging
import math
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

T = TypeVar("T")
Parser = Callable[[object], T]

MAX_DIGITS = 20  # of a whole number

SWITCH_WORDS = {"on": True, "true": True, "yes": True, "1": True}
SWITCH_WORDS |= {"off": False, "false": False, "no": False, "0": False}


def text(value: object) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def path(value: object) -> Path:
    """A path, `~` expanded; whether it exists is not asked."""
    return Path(text(value)).expanduser()


def path_or_none(value: object) -> Path | Literal["none"]:
    """The word "none", or a path; a directory of that name is `./none`."""
    return "none" if value == "none" else path(value)


def switch(value: object) -> bool:
    """true or false as TOML has them, or a word for them."""
    if isinstance(value, bool):
        return value
    word = text(value).strip().lower()
    if word not in SWITCH_WORDS:
        raise ValueError
    return SWITCH_WORDS[word]


def one_of(*choices: str) -> Parser[str]:
    """One of these words."""

    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError
        return text(value)

    return parse


def whole(least: int, most: int = 2**48) -> Parser[int]:
    """An integer; text may end in K, M or G (powers of 1024)."""

    def parse(value: object) -> int:
        if isinstance(value, str):
            digits = value.strip().upper()
            power = {"K": 1, "M": 2, "G": 3}.get(digits[-1:], 0)
            digits = digits[:-1] if power else digits
            if not (digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS):
                raise ValueError  # a sign, too; and int() takes seconds where there are many
            value = int(digits) * 1024**power
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError
        return value

    return parse


def whole_or_auto(least: int) -> Parser[int | Literal["auto"]]:
    """The word "auto", or an integer as `whole` reads it."""
    parse_whole = whole(least)

    def parse(value: object) -> int | Literal["auto"]:
        return "auto" if value == "auto" else parse_whole(value)

    return parse


def spans(value: object) -> tuple[tuple[int, int], ...]:
    """Spans `begin:end` of integers from 0 on, none empty, from a list or from text with commas."""
    given = []
    for word in words(value):
        begin, colon, end = word.partition(":")
        if not colon:
            raise ValueError
        given.append((whole(0)(begin), whole(1)(end)))
    if not all(begin < end for begin, end in given):
        raise ValueError
    return tuple(given)


def seconds(least: float) -> Parser[float]:
    """Seconds from `least` to a day."""

    def parse(value: object) -> float:
        given = number(value)
        if not least <= given <= 86400:
            raise ValueError
        return given

    return parse


def number(value: object) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    given = float(value)
    if not math.isfinite(given):
        raise ValueError
    return given


def words(value: object) -> tuple[str, ...]:
    """Words from a list, or from text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise ValueError
    given = tuple(text(part).strip() for part in parts)
    if not given or not all(given):
        raise ValueError
    return given


def host_names(value: object) -> tuple[str, ...]:
    """Names or addresses as a Host header has them, without a port; or "*"."""
    given = tuple(word.lower().strip("[]") for word in words(value))
    if any(re.search(r"[/@\s]", name) or name.count(":") == 1 for name in given):
        raise ValueError
    return given


def origins(value: object) -> tuple[str, ...]:
    """Origins as browsers send them: scheme, host and port without a path; or "null", or "*"."""
    given = tuple(word.lower() for word in words(value))
    if not all(re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/@\s]*", origin) for origin in given):
        raise ValueError
    return given


def weights(value: object) -> tuple[float, ...]:
    """Numbers above 0 from a list, or from text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise ValueError
    given = tuple(number(part) for part in parts)
    if not given or min(given) <= 0:
        raise ValueError
    return given


def keys_in_file(value: object) -> tuple[str, ...]:
    """API keys of a file: one a line, `#` starts a comment line."""
    file = path(value)
    _warn_where_others_read(file, "API keys")
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError
    return keys


def private_path(value: object) -> Path:
    """The path of a file with a private key, which there need not be yet."""
    file = path(value)
    if file.exists():
        _warn_where_others_read(file, "a private key")
    return file


def _warn_where_others_read(file: Path, what: str) -> None:
    if file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        logging.getLogger("luceasync").warning(
            "%s can be read by other users: chmod 600 it, it holds %s", file, what
        )


ENV_PREFIX = "LUCEASYNC_"
CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"


@dataclass(frozen=True, slots=True)
class Option:
    """One setting and its names: flag `--a-b`, variable `LUCEASYNC_A_B`, TOML `section.a_b`.

    `parse` takes text (flag, variable) or a TOML value and raises ValueError; `allowed` ends the
    sentence "allowed: ..." of the ConfigError that follows. A `secret` value is never shown. A
    `switch` is `--x` or `--no-x`. `needs` names the option without which this one means nothing.
    """

    name: str
    section: str
    field: str
    parse: Parser[object]
    allowed: str
    metavar: str
    help: str
    secret: bool = False
    repeatable: bool = False
    switch: bool = False
    needs: str | None = None

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.replace("-", "_").upper()

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")
