"""schemathesis against the server's own OpenAPI document, with scripted answers.

    python -m tests.acceptance.check_openapi FOLDER [--cases 50]

It is installed under FOLDER, once. A stream without an end is left out. Exit status 1 if it finds
something.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.acceptance.check_clients import server
from tests.acceptance.clients.programs import Program

SCHEMATHESIS = Program("schemathesis", "pip", ("schemathesis==4.32.5",))
ENDLESS = "/status/events"
# What is asked for by a schema may still be refused: a prompt may be too long for the context, or a
# model another one. The schema says what a field may hold, not what all of them may together.
LEFT_OUT = "positive_data_acceptance"
LIMIT_S = 1800.0


def run(folder: Path, url: str, num_cases: int, *more: str) -> subprocess.CompletedProcess[str]:
    """Run all its checks and return its output."""
    home = folder / "schemathesis"
    home.mkdir(exist_ok=True)
    return subprocess.run(
        [
            *(str(folder / SCHEMATHESIS.folder_name / "bin/schemathesis"), "run"),
            *(f"{url}/openapi.json", "--exclude-path", ENDLESS, "--exclude-checks", LEFT_OUT),
            *("--max-examples", str(num_cases), "--request-timeout", "60", *more),
        ],
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where schemathesis is installed")
    parser.add_argument("--cases", type=int, default=50, help="of each operation")
    args = parser.parse_args()
    folder = args.folder.resolve()
    SCHEMATHESIS.install(folder)
    with server(folder / f"run-{os.getpid()}", "--template", "qwen3.5") as url:
        ran = run(folder, url, args.cases)
    print(ran.stdout[-20000:], ran.stderr[-2000:])
    sys.exit(ran.returncode)


if __name__ == "__main__":
    main()
