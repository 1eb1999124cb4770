"""Reads the text files of a model directory, and says in words what is wrong with them.

Knows no file by name: what a file means is for its reader.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from luceasync.errors import ModelError


def read_text(path: Path) -> str | None:
    """The UTF-8 text of `path`; None when there is no such file. Raises ModelError when it cannot
    be read.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ModelError(f"{path} is no regular file")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read as UTF-8 text: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty when there is no such file. Raises ModelError for anything
    else.
    """
    text = read_text(path)
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__}; an object was expected.")
    return content


def special_text(value: Any) -> str | None:
    """The text of a special token as tokenizer_config.json writes it: a string, or an object's
    `content`.
    """
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
