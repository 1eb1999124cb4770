"""The map and the guide name files that are there, so that a newcomer finds what they speak of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ("docs/architecture.md", "CONTRIBUTING.md")
FOLDERS = ("", "luceasync", "docs", "tests", "scripts", "training")  # from which they name files
NAME = re.compile(r"[`(]([\w./-]+(?:\.(?:py|pyi|pyx|pxi|md|toml|txt)|/))[`)]")


def missing(text: str) -> list[str]:
    """Files and folders that the text names and nobody finds; a bare name may be anywhere."""
    names = sorted({name for name in NAME.findall(text) if not name.startswith("/")})
    return [
        name
        for name in names
        if not any(ROOT.joinpath(f, name).exists() for f in FOLDERS)
        and ("/" in name or not any(ROOT.joinpath("luceasync").rglob(name)))
    ]


@pytest.mark.parametrize("doc", DOCS)
def test_every_file_that_is_named_is_there(doc: str) -> None:
    text = (ROOT / doc).read_text(encoding="utf-8")
    assert len(NAME.findall(text)) > 20
    assert missing(text) == []


@pytest.mark.parametrize(
    "name", ["`keeping/pump.py`", "(docs/nothing.md)", "`gone.py`", "`abacus/`"]
)
def test_one_that_is_not_there_is_found(name: str) -> None:
    assert missing(f"See {name} and `engine/pump.py`.") == [name[1:-1]]
