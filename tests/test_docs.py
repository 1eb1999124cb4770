"""Documents name and link files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAPS = ("docs/architecture.md", "CONTRIBUTING.md")
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")))
FOLDERS = ("", "luceasync", "docs", "tests", "scripts", "training")  # names are relative to these
NAME = re.compile(r"`([\w./-]+(?:\.(?:py|pyi|pyx|pxi|cu|cuh|h|md|toml)|/))`")
LINK = re.compile(r"\]\(([\w./-]+)\)")


def missing_files(text: str) -> list[str]:
    """Files and folders that `text` names and that do not exist. A bare file name, such as
    `pump.py`, may be anywhere in luceasync/.
    """
    names = sorted({name for name in NAME.findall(text) if not name.startswith("/")})
    return [
        name
        for name in names
        if not any(ROOT.joinpath(folder, name).exists() for folder in FOLDERS)
        and ("/" in name or not any(ROOT.joinpath("luceasync").rglob(name)))
    ]


def broken_links(text: str, folder: Path) -> list[str]:
    """Links of a page in `folder` to files that do not exist."""
    return [link for link in LINK.findall(text) if not folder.joinpath(link).exists()]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_named_and_linked_files_exist(page: str) -> None:
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    assert missing_files(text) == []
    assert broken_links(text, path.parent) == []


@pytest.mark.parametrize("page", MAPS)
def test_the_maps_name_files(page: str) -> None:
    assert len(NAME.findall((ROOT / page).read_text(encoding="utf-8"))) > 20


@pytest.mark.parametrize("name", ["keeping/pump.py", "docs/nothing.md", "gone.py", "abacus/"])
def test_a_missing_file_is_found(name: str) -> None:
    assert missing_files(f"Look at `{name}` and `engine/pump.py`.") == [name]


def test_a_broken_link_is_found() -> None:
    text = "[One](docs/api.md), [another](docs/nothing.md), [a site](https://example.org)."
    assert broken_links(text, ROOT) == ["docs/nothing.md"]
