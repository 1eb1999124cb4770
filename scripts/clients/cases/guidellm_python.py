"""guidellm, the command: a few synchronous requests, by chat and by completions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from told import MODEL, URL, tell

GUIDELLM = Path(sys.executable).parent / "guidellm"
FOLDER = Path.cwd() / "guidellm"


def benchmark(kind: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    ran = subprocess.run(
        [
            *(str(GUIDELLM), "benchmark", "--target", URL, "--model", MODEL),
            *("--processor", os.environ["LUCE_MODEL_DIR"], "--request-type", kind),
            *("--rate-type", "synchronous", "--max-requests", "3", "--max-seconds", "100"),
            *("--data", "prompt_tokens=64,output_tokens=16", "--disable-console-interactive"),
            *("--output-path", str(FOLDER / f"{kind}.json")),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(FOLDER)},
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-300:] + ran.stderr[-600:]


def chat():
    benchmark("chat_completions")


def completions():
    benchmark("text_completions")


tell(chat, completions)
