"""Prompts to keep, read from files: plain text, JSON, or JSONL with an entry per line.

Owns the formats and their error messages. Whether a model accepts an entry is checked by the
server.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from luceasync.errors import ConfigError

Form = Literal["auto", "text", "json", "jsonl"]
Role = Literal["system", "user"]
Verify = Literal["first", "all", "none"]  # which entries are requested again

STDIN = "-"
FORMS: Mapping[str, Form] = {".json": "json", ".jsonl": "jsonl"}
# A log of requests can be passed as it is: other fields of a request are ignored.
EXPECTED = 'expected a list of messages, or an object with "messages" or "tools"'


@dataclass(frozen=True, slots=True)
class WarmEntry:
    """Fields of a chat request. `origin` is the file, or the line of it, that they come from."""

    origin: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_answered(self) -> bool:
        """Whether an answer comes next, rather than another user message."""
        return bool(self.messages) and self.messages[-1].get("role") in ("user", "tool")

    def body(self) -> dict[str, Any]:
        """These fields as part of a request body."""
        optional = {"tools": self.tools, "chat_template_kwargs": self.template_kwargs}
        return {"messages": self.messages, **{name: x for name, x in optional.items() if x}}


def read_entries(source: str, form: Form = "auto", role: Role = "system") -> list[WarmEntry]:
    """The entries of a file, or of stdin for "-". A text file is one message of `role`.

    Raises ConfigError, one line that names the file and the line.
    """
    name = "stdin" if source == STDIN else source
    text = _read(source)
    if form == "auto":
        form = FORMS.get(Path(source).suffix.lower(), "text")
    if form == "text":
        entries = (
            [WarmEntry(name, [{"role": role, "content": text.strip()}])] if text.strip() else []
        )
    elif form == "json":
        entries = [_entry(name, _parse(name, text))]
    else:
        entries = [_entry(origin, _parse(origin, line)) for origin, line in _lines(name, text)]
    if not entries:
        raise ConfigError(f"--file {name}: it is empty; expected a prompt")
    return entries


def with_common(
    entries: Sequence[WarmEntry],
    tools: Sequence[dict[str, Any]],
    template_kwargs: Mapping[str, Any],
) -> list[WarmEntry]:
    """The entries with `tools` unless they have their own, and with `template_kwargs`, which their
    own override.
    """
    return [
        replace(
            entry,
            tools=entry.tools or list(tools),
            template_kwargs={**template_kwargs, **entry.template_kwargs},
        )
        for entry in entries
    ]


def read_tools(path: Path) -> list[dict[str, Any]]:
    """Read a JSON list of tools. Raises ConfigError."""
    name = f"--tools {path}"
    return _objects(name, "tools", _parse(name, _read(str(path), "--tools")))


def parse_kwargs(text: str) -> dict[str, Any]:
    """Parse variables of the chat template, a JSON object. Raises ConfigError."""
    value = _parse("--template-kwargs", text)
    if not isinstance(value, dict):
        raise ConfigError(f"--template-kwargs: {text!r} is not allowed; allowed: a JSON object")
    return value


def _read(source: str, flag: str = "--file") -> str:
    try:
        return sys.stdin.read() if source == STDIN else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{flag} {source}: cannot be read: {reason}") from None


def _lines(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Origin and content of each line that is not blank."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{name}:{number}", line


def _parse(origin: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{origin}: not JSON: {error}") from None


def _entry(origin: str, value: Any) -> WarmEntry:
    fields = {"messages": value} if isinstance(value, list) else value
    if not isinstance(fields, dict) or not (fields.get("messages") or fields.get("tools")):
        raise ConfigError(f"{origin}: {EXPECTED}")
    kwargs = fields.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise ConfigError(f"{origin}: chat_template_kwargs: expected an object")
    return WarmEntry(
        origin,
        _objects(origin, "messages", fields.get("messages") or []),
        _objects(origin, "tools", fields.get("tools") or []),
        kwargs,
    )


def _objects(origin: str, what: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ConfigError(f"{origin}: {what}: expected a list of objects")
    return value
