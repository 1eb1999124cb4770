"""Texts whose token ids are compared: code, prose, numbers, and letters of many scripts."""

from __future__ import annotations

import random
import sys
import sysconfig
import unicodedata
from collections.abc import Callable
from pathlib import Path

KINDS = ("L", "M", "N", "P", "S", "Z")  # first letters of categories of Unicode
MOST_CHARS = 300
FIRST_IDEOGRAPHS = "\u3000"


def nfc_texts(num_texts: int, seed: int = 0) -> list[str]:
    """`num_texts` texts in Unicode's normal form C, the same for a seed and a Python version."""
    choose = random.Random(seed)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    letters = [
        chr(code)
        for code in range(32, sys.maxunicode)
        if unicodedata.category(chr(code))[0] in KINDS
    ]
    near = sum(letter < FIRST_IDEOGRAPHS for letter in letters)  # most of the others are alike

    def code() -> str:
        text = choose.choice(sources).read_text(encoding="utf-8", errors="ignore")
        begin = choose.randrange(max(1, len(text) - MOST_CHARS))
        return text[begin : begin + choose.randrange(1, MOST_CHARS)]

    def mixed() -> str:
        """Runs of one block each, with spaces of all kinds and digits in between."""
        runs = []
        for _ in range(choose.randrange(1, 12)):
            at = choose.randrange(choose.choice([near, near, len(letters)]) - 64)
            runs.append("".join(choose.choices(letters[at : at + 64], k=choose.randrange(1, 9))))
            runs.append(
                choose.choice([" ", "  ", "\n", "\n\n", "\t ", "", "'s ", " 12345", "...", ", "])
            )
        return "".join(runs)

    def scattered() -> str:
        return "".join(choose.choices(letters, k=choose.randrange(1, 60)))

    makers: tuple[Callable[[], str], ...] = (code, code, mixed, scattered)
    made = (makers[i % len(makers)]() for i in range(num_texts))
    return [unicodedata.normalize("NFC", text) for text in made]
