"""aider edits a small program with a real model on this server, which is killed between two edits.

    python -m tests.acceptance.fetch_models qwen2.5-coder-0.5b
    python -m tests.acceptance.check_real_agent AIDER [--transcript FILE]

`AIDER`: the command of an installation of its own (`pip install aider-chat`). Both functions that
were asked for must be in the program and work, with those that were there. Exit status 1 otherwise.
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
TASKS = (
    "Add a function subtract(a, b) that returns a - b. Keep the other functions.",
    "Add a function negate(a) that returns -a. Keep the other functions.",
)
PROOF = "import calc as c; print(c.add(7, 2), c.multiply(7, 2), c.subtract(7, 2), c.negate(7))"
PROVED = "9 14 5 -7\n"
ARGUMENTS = (
    *("--model", "openai/luce", "--edit-format", "whole", "--map-tokens", "0", "--no-git"),
    *("--yes-always", "--no-pretty", "--no-show-model-warnings", "--no-check-update"),
    *("--no-show-release-notes", "--analytics-disable", "--no-detect-urls"),
)
NOISE = re.compile(r"^(Analytics have|Warning: Input is|HTTPSConnectionPool).*\n+", re.MULTILINE)


def main() -> None:
    """Have the program edited, twice, and run it."""
    parser = command.parser(__doc__)
    parser.add_argument("aider", type=Path)
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    parser.add_argument("--transcript", type=Path, help="a file for what aider shows")
    options = parser.parse_args()
    told: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        work.mkdir()
        (work / "calc.py").write_text(PROGRAM)
        flags = [str(options.folder / MODELS[MODEL].file), "--model-name", "luce"]
        flags += ["--max-ctx", str(CONTEXT), "--kv-cache-dir", f"{folder}/cache"]
        for task in TASKS:
            with server([*flags, "--kv-cache-min-tokens", "64"]) as client:
                told.append(edit(options.aider, client, work, task))
                told.append(cached(client))
                print(*told[-2:], sep="\n", flush=True)
                wait_for_files(Path(folder) / "cache")
                os.kill(client.pid or 0, signal.SIGKILL)
        edited = (work / "calc.py").read_text()
        run = [sys.executable, "-B", "-c", PROOF]
        proof = subprocess.run(run, cwd=work, capture_output=True, text=True, check=False)
    told.append(f"$ cat calc.py\n{edited}\n$ python -c '{PROOF}'\n{proof.stdout}{proof.stderr}")
    print(told[-1])
    if options.transcript:
        options.transcript.write_text("\n".join(told))
    sys.exit(0 if proof.stdout == PROVED else 1)


def edit(aider: Path, client: Client, work: Path, task: str) -> str:
    """What aider shows while it does the task."""
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(work.parent),
        "OPENAI_API_BASE": f"{client.url}/v1",
        "OPENAI_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    run = [str(aider.absolute()), *ARGUMENTS, "--message", task, "calc.py"]
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
    return f'$ aider --model openai/luce --message "{task}" calc.py\n{NOISE.sub("", done.stdout)}'


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
