"""aider, the command: it edits a file as the model says, twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from told import MODEL, URL, tell

AIDER = Path(sys.executable).parent / "aider"
FOLDER = Path.cwd() / "aider"
FLAGS = (
    *("--model", f"openai/{MODEL}", "--no-git", "--yes-always", "--edit-format", "whole"),
    *("--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--map-tokens", "0"),
    *("--no-auto-lint", "--no-detect-urls", "--no-pretty", "--no-show-release-notes"),
)


def aider(*words: str) -> str:
    ran = subprocess.run(
        [str(AIDER), *FLAGS, *words],
        cwd=FOLDER,
        env={
            "HOME": str(FOLDER),
            "PATH": os.environ["PATH"],
            "OPENAI_API_BASE": f"{URL}/v1",
            "OPENAI_API_KEY": "k",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-300:] + ran.stderr[-300:]
    return ran.stdout


def two_edits():
    FOLDER.mkdir(exist_ok=True)
    said = FOLDER / "said.txt"
    said.write_text("nothing\n")
    aider("--message", "Write one. [[say said.txt\n```\none\n```\n]]", "said.txt")
    assert said.read_text() == "one\n", said.read_text()
    again = "Write two. [[say said.txt\n```\ntwo\n```\n]]"
    aider("--restore-chat-history", "--message", again, "said.txt")
    assert said.read_text() == "two\n", said.read_text()


tell(two_edits)
