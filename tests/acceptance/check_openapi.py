"""The server's own OpenAPI document: schemathesis, and a client generated from it, with scripted
answers.

    python -m tests.acceptance.check_openapi FOLDER [--cases 50]

Both are installed under FOLDER, once. A stream without an end is left out. Exit status 1 if one of
them finds something.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx

from tests.acceptance.check_clients import server
from tests.acceptance.clients.programs import CASES, Program

SCHEMATHESIS = Program("schemathesis", "pip", ("schemathesis==4.32.5",))
GENERATOR = Program("openapi-python-client", "pip", ("openapi-python-client==0.29.1",))
PACKAGE = "luceasync_client"
ENDLESS = "/status/events"
# What is asked for by a schema may still be refused: a prompt may be too long for the context, or a
# model another one. The schema says what a field may hold, not what all of them may together.
LEFT_OUT = "positive_data_acceptance"
LIMIT_S = 1800.0


def run(folder: Path, url: str, num_cases: int, *more: str) -> subprocess.CompletedProcess[str]:
    """Run all checks of schemathesis and return its output."""
    home = folder / "schemathesis"
    home.mkdir(exist_ok=True)
    return _run(
        home,
        {},
        *(str(folder / SCHEMATHESIS.folder_name / "bin/schemathesis"), "run"),
        *(f"{url}/openapi.json", "--exclude-path", ENDLESS, "--exclude-checks", LEFT_OUT),
        *("--max-examples", str(num_cases), "--request-timeout", "600", *more),
    )


def generated(folder: Path, url: str) -> list[str]:
    """Errors of a generated client: the generator's warnings, and those of its cases."""
    home = folder / "generated"
    home.mkdir(exist_ok=True)
    document = home / "openapi.json"
    document.write_bytes(httpx.get(f"{url}/openapi.json", timeout=60).content)
    programs = folder / GENERATOR.folder_name / "bin"
    how = ("--meta", "none", "--overwrite", "--output-path", str(home / PACKAGE))
    generator = str(programs / "openapi-python-client")
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}  # it formats what it has written
    made = _run(home, path, generator, "generate", "--path", str(document), *how)
    faults = [made.stdout + made.stderr] if made.returncode or "WARNING" in made.stdout else []
    where = {"LUCE_URL": url, "PYTHONPATH": str(home)}
    told = _run(home, where, str(programs / "python"), str(CASES / "generated_python.py"))
    lines = [json.loads(line) for line in told.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        print(f"| generated client | {line['case']} | {line['error'] or 'passed'} |", flush=True)
    faults += [line["error"] for line in lines if line["error"]]
    return faults if lines else [*faults, told.stderr[-2000:]]


def _run(home: Path, more: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **more},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where both are installed")
    parser.add_argument("--cases", type=int, default=50, help="of each operation; 0: none")
    args = parser.parse_args()
    folder = args.folder.resolve()
    for program in (SCHEMATHESIS, GENERATOR):
        program.install(folder)
    with server(folder / f"run-{os.getpid()}", "--template", "qwen3.5") as url:
        faults = generated(folder, url)
        print("\n".join(faults), flush=True)
        ran = run(folder, url, args.cases) if args.cases else None
    if ran is not None:
        print(ran.stdout[-60000:], ran.stderr[-2000:])
    sys.exit(1 if faults else ran.returncode if ran is not None else 0)


if __name__ == "__main__":
    main()
