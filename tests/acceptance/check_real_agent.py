"""aider edits a small program with a real model on this server, is taken back, and edits it again
after the server was killed.

    python -m tests.acceptance.fetch_models qwen2.5-coder-0.5b
    python -m tests.acceptance.check_real_agent AIDER [--transcript FILE]

AIDER is its command. Exit status 1 unless the function that was asked for works each time.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from luceasync.bench.servers import Client, server
from tests.acceptance import command
from tests.acceptance.fetch_models import FOLDER, MODELS

MODEL = "qwen2.5-coder-0.5b"
CONTEXT = 8192
DEADLINE_S = 900
PROGRAM = """\
def add(a, b):
    return a + b


def multiply(a, b):
    return a * b
"""
TASK = "Add a function subtract(a, b) that returns a - b. Keep the other functions."
PROOF = "import calc as c; print(c.add(7, 2), c.multiply(7, 2), c.subtract(7, 2))"
PROVED = "9 14 5\n"
ARGUMENTS = (
    *("--model", "openai/luce", "--edit-format", "whole", "--map-tokens", "0", "--no-git"),
    *("--yes-always", "--no-pretty", "--no-show-model-warnings", "--no-check-update"),
    *("--no-show-release-notes", "--analytics-disable", "--no-detect-urls"),
)
NOISE = re.compile(r"^(Analytics have|Warning: Input is|HTTPSConnectionPool).*\n+", re.MULTILINE)


def main() -> None:
    """Have the program edited and run it, twice."""
    parser = command.parser(__doc__)
    parser.add_argument("aider", type=Path)
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    parser.add_argument("--transcript", type=Path, help="a file for what aider shows")
    options = parser.parse_args()
    told: list[str] = []
    is_right = True
    with tempfile.TemporaryDirectory() as folder:
        work, cache = Path(folder) / "work", Path(folder) / "cache"
        work.mkdir()
        flags = [str(options.folder / MODELS[MODEL].file), "--model-name", "luce"]
        flags += ["--max-ctx", str(CONTEXT), "--kv-cache-dir", str(cache)]
        for _ in range(2):
            (work / "calc.py").write_text(PROGRAM)
            with server([*flags, "--kv-cache-min-tokens", "64"]) as client:
                told += [edit(options.aider, client, work), cached(client)]
                wait_for_files(cache)
                os.kill(client.pid or 0, signal.SIGKILL)
            shown, stdout = proof(work)
            told.append(shown)
            is_right &= stdout == PROVED
            print(*told[-3:], sep="\n", flush=True)
    if options.transcript:
        options.transcript.write_text("\n".join(told))
    sys.exit(0 if is_right else 1)


def proof(work: Path) -> tuple[str, str]:
    """The program as it is now and what it does, to be shown, and the latter by itself."""
    run = [sys.executable, "-B", "-c", PROOF]
    done = subprocess.run(run, cwd=work, capture_output=True, text=True, check=False)
    program = (work / "calc.py").read_text()
    shown = f"$ cat calc.py\n{program}\n$ python -c '{PROOF}'\n{done.stdout}{done.stderr}"
    return shown, done.stdout


def edit(aider: Path, client: Client, work: Path) -> str:
    """What aider shows while it does the task."""
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(work.parent),
        "OPENAI_API_BASE": f"{client.url}/v1",
        "OPENAI_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    run = [str(aider.absolute()), *ARGUMENTS, "--message", TASK, "calc.py"]
    done = subprocess.run(
        run,
        cwd=work,
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    return f'$ aider --model openai/luce --message "{TASK}" calc.py\n{NOISE.sub("", done.stdout)}'


def wait_for_files(cache: Path) -> None:
    """Wait until the directory has some of the prompt."""
    deadline = time.monotonic() + DEADLINE_S
    while not list(cache.glob("*/*.safetensors")):
        assert time.monotonic() < deadline, "nothing was written"
        time.sleep(0.1)


def cached(client: Client) -> str:
    """How many tokens of its prompts the server has found, and where."""
    metrics = httpx.get(f"{client.url}/metrics", timeout=60).text
    wanted = ("prefilled_tokens_total", "restored_tokens_total")
    lines = [line for line in metrics.splitlines() if any(f"_{name}" in line for name in wanted)]
    lines = [line for line in lines if not line.startswith("#")]
    return "\n".join(["(server)", *lines, ""])


if __name__ == "__main__":
    main()
