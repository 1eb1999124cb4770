"""The building blocks of config.py: parsers, and fields of a frozen dataclass that carry them.

A parser takes text (flag, variable) or a TOML value and raises ValueError for values that it does
not accept. Independent of particular settings.
"""

from __future__ import annotations

import logging
import math
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

T = TypeVar("T")
Parser = Callable[[object], T]

MAX_DIGITS = 20  # of an integer

SWITCH_WORDS = {"on": True, "true": True, "yes": True, "1": True}
SWITCH_WORDS |= {"off": False, "false": False, "no": False, "0": False}


def text(value: object) -> str:
    """Non-empty text."""
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def path(value: object) -> Path:
    """A path, `~` expanded; it need not exist."""
    return Path(text(value)).expanduser()


def drafter(value: object) -> Path | Literal["none", "lookup", "mtp"]:
    """The word "none", "lookup" or "mtp", or a path; a directory with such a name is `./none`."""
    if value == "none" or value == "lookup" or value == "mtp":
        return value
    return path(value)


def boolean(value: object) -> bool:
    """A TOML boolean, or a word for one."""
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


def integer(minimum: int, maximum: int = 2**48) -> Parser[int]:
    """An integer; text may end in K, M or G (powers of 1024)."""

    def parse(value: object) -> int:
        if isinstance(value, str):
            digits = value.strip().upper()
            power = {"K": 1, "M": 2, "G": 3}.get(digits[-1:], 0)
            digits = digits[:-1] if power else digits
            if not (digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS):
                raise ValueError  # refuses signs too; and int() takes seconds for very many digits
            value = int(digits) * 1024**power
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise ValueError
        return value

    return parse


def integer_or_auto(minimum: int) -> Parser[int | Literal["auto"]]:
    """The word "auto", or an integer as `integer` reads it."""
    parse_integer = integer(minimum)

    def parse(value: object) -> int | Literal["auto"]:
        return "auto" if value == "auto" else parse_integer(value)

    return parse


def spans(value: object) -> tuple[tuple[int, int], ...]:
    """Spans `begin:end` of non-negative integers, none empty: a list, or comma-separated text."""
    parsed = []
    for word in comma_separated(value):
        begin, colon, end = word.partition(":")
        if not colon:
            raise ValueError
        parsed.append((integer(0)(begin), integer(1)(end)))
    if not all(begin < end for begin, end in parsed):
        raise ValueError
    return tuple(parsed)


def seconds(minimum: float) -> Parser[float]:
    """Seconds from `minimum` to a day."""

    def parse(value: object) -> float:
        parsed = number(value)
        if not minimum <= parsed <= 86400:
            raise ValueError
        return parsed

    return parse


def number(value: object) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    parsed = float(value)
    if not math.isfinite(parsed):
        raise ValueError
    return parsed


def comma_separated(value: object) -> tuple[str, ...]:
    """Non-empty words: a list, or comma-separated text."""
    words = tuple(text(part).strip() for part in _parts(value))
    if not all(words):
        raise ValueError
    return words


def host_names(value: object) -> tuple[str, ...]:
    """Names or addresses as in a Host header, without a port; or "*"."""
    names = tuple(word.lower().strip("[]") for word in comma_separated(value))
    if any(re.search(r"[/@\s]", name) or name.count(":") == 1 for name in names):
        raise ValueError
    return names


def origins(value: object) -> tuple[str, ...]:
    """Origins as browsers send them: scheme, host and port without a path; or "null", or "*"."""
    parsed = tuple(word.lower() for word in comma_separated(value))
    if not all(re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/@\s]*", origin) for origin in parsed):
        raise ValueError
    return parsed


def weights(value: object) -> tuple[float, ...]:
    """Numbers above 0: a list, or comma-separated text."""
    parsed = tuple(number(part) for part in _parts(value))
    if min(parsed) <= 0:
        raise ValueError
    return parsed


def _parts(value: object) -> list[object]:
    """The parts of a list or of comma-separated text, at least one."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not parts:
        raise ValueError
    return list(parts)


def keys_in_file(value: object) -> tuple[str, ...]:
    """API keys from a file: one per line, `#` starts a comment line."""
    file = path(value)
    _warn_if_others_can_use(file, "API keys")
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError
    return keys


def private_path(value: object) -> Path:
    """The path of a file with a private key; it need not exist yet."""
    file = path(value)
    if file.exists():
        _warn_if_others_can_use(file, "a private key")
    return file


def _warn_if_others_can_use(file: Path, what: str) -> None:
    if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        logging.getLogger("luceasync").warning(
            "%s holds %s and is accessible to other users: chmod 600 it", file, what
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """How a field is set; `name` is the flag without its dashes.

    `allowed` completes "allowed: ..." in the ConfigError for a value that `parse` refuses. A
    `secret` value is never shown. A `switch` is `--x` or `--no-x`. `needs` is the name of the
    setting without which this one has no effect.
    """

    name: str
    parse: Parser[object]
    allowed: str
    metavar: str
    help: str
    secret: bool = False
    repeatable: bool = False
    switch: bool = False
    needs: str | None = None


def setting(default: T, *settings: Setting) -> T:
    """A field set by any of these settings; their values are combined."""
    is_secret = any(each.secret for each in settings)
    return field(default=default, metadata={"settings": settings}, repr=not is_secret)


def value(
    default: T,
    name: str,
    parse: Parser[T],
    allowed: str,
    metavar: str,
    help: str,
    *,
    repeatable: bool = False,
    needs: str | None = None,
) -> T:
    """A field with one setting."""
    return setting(
        default, Setting(name, parse, allowed, metavar, help, repeatable=repeatable, needs=needs)
    )


def choice(
    default: T, name: str, words: Any, help: str, *, metavar: str = "", needs: str | None = None
) -> T:
    """A field that takes one of the words of the Literal `words`."""
    choices: tuple[str, ...] = get_args(words)
    metavar = metavar or "|".join(choices)
    parse, allowed = one_of(*choices), " | ".join(choices)
    return setting(default, Setting(name, parse, allowed, metavar, help, needs=needs))


def switch(name: str, help: str, needs: str | None = None) -> bool:
    """A field that is off by default; `needs`: see Setting."""
    kind = Setting(name, boolean, "on | off", "on|off", help, switch=True, needs=needs)
    return setting(False, kind)


def section(kind: type[T], title: str) -> T:
    """A field that holds a section, a dataclass of settings; `title` heads its flags in --help."""
    return field(default_factory=kind, metadata={"title": title})
