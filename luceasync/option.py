"""One setting: its names in flags, variables and TOML, and how a value is read.

Knows none by name: luceasync.options is the table.
"""

from __future__ import annotations

from dataclasses import dataclass

from luceasync.parsers import Parser

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
