"""Client programs as people use them, with scripted answers; forced formats ask the bundled model.

    python -m tests.acceptance.check_clients FOLDER [--only NAME ...] [--template qwen3]

Each is installed under FOLDER, once. No request may be refused unless its case expects so, and of
an agent's later prompts as much must be cached as its first one has. Exit status 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.acceptance.clients.agents import AGENTS
from tests.acceptance.clients.programs import PROGRAMS, Program
from tests.acceptance.clients.record import Exchange, exchanges
from tests.acceptance.clients.script import WRITERS

READY_S = 120.0
SLACK_TOKENS = 16  # which open an answer; the next turn may write them otherwise
EXPECTS_REFUSALS = ("errors",)


@contextmanager
def server(folder: Path, *model: str) -> Iterator[str]:
    """URL of a server that is ready, with its files in `folder`; `model`: its flags."""
    command = [sys.executable, "-m", "tests.acceptance.clients.serve", str(folder), *model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url: str = json.loads(process.stdout.readline())["url"]
            wait_ready(url)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def wait_ready(url: str) -> None:
    """Wait until it serves. Raises TimeoutError."""
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(f"{url} is not ready after {READY_S:g} s")


def usage(exchange: Exchange) -> tuple[int, int] | None:
    """Prompt tokens and cached ones, as the answer reports them; None without a report."""
    found = None
    for event in exchange.events:
        told = event.get("usage") or (event.get("response") or {}).get("usage")
        found = _counts(told) or found if told else found
    return found


def _counts(told: Mapping[str, Any]) -> tuple[int, int] | None:
    if "cache_read_input_tokens" in told:
        cached = told["cache_read_input_tokens"]
        return told["input_tokens"] + cached, cached
    details = told.get("prompt_tokens_details") or told.get("input_tokens_details")
    if details is None:
        return None
    return told.get("prompt_tokens", told.get("input_tokens")), details["cached_tokens"]


def faults_of_agent(seen: list[Exchange]) -> list[str]:
    """Errors in what the server saw."""
    faults = [
        f"{one.method} {one.path}: {one.status} {one.answer[:200]}"
        for one in seen
        if one.status >= 400
    ]
    counts = [usage(one) for one in seen if '"tools"' in one.body and one.status == 200]
    if len(counts) < 4:
        faults.append(f"{len(counts)} requests with tools, 4 expected")
    for i, found in enumerate(counts[1:], 1):
        if found is None or counts[0] is None or found[1] < counts[0][0] - SLACK_TOKENS:
            faults.append(f"request {i}: {found} after {counts[0]}")
    return faults


def check(
    program: Program, cases: str | None, under: Path, runs: Path, url: str
) -> dict[str, list[str]]:
    """The error of each case, None for none; `cases` None: of an agent."""
    log = runs / "requests.jsonl"
    before = len(exchanges(log))
    home = runs / "homes" / program.folder_name
    if cases is None:
        faults = AGENTS[program.name].run(under / program.folder_name, home, url)
        return {"two turns, a call in each": faults + faults_of_agent(exchanges(log)[before:])}
    told = program.run(cases, under, home, url, runs / "model")
    rows = {case: [error] if error else [] for case, error in told.items()}
    refused = [one for one in exchanges(log)[before:] if one.status >= 400]
    if refused and not any(case in rows for case in EXPECTS_REFUSALS):
        rows["refusals"] = [f"{one.path}: {one.answer[:200]}" for one in refused]
    return rows


def tell(program: Program, cases: str | None, under: Path, runs: Path, url: str) -> int:
    """Print a line for each case; returns the number of failures."""
    name = f"{program.name} ({program.version(under)})"
    rows = check(program, cases, under, runs, url)
    for case, faults in rows.items():
        told = f"{case}, forced" if cases and cases == program.forced else case
        print(f"| {name} | {told} | {'; '.join(faults) or 'passed'} |", flush=True)
    return sum(map(bool, rows.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where clients are installed and run")
    parser.add_argument("--only", nargs="*", default=[], help="names of clients")
    parser.add_argument("--template", choices=WRITERS, default="qwen3.5")
    args = parser.parse_args()
    under = args.folder.resolve()
    under.mkdir(parents=True, exist_ok=True)
    runs = Path(tempfile.mkdtemp(prefix="run-", dir=under))
    chosen = [one for one in PROGRAMS if not args.only or one.name in args.only]
    for program in chosen:
        program.install(under)
    print("| client | case | |\n|---|---|---|")
    of_script = [(program, program.cases) for program in chosen]
    forced = [(program, program.forced) for program in chosen if program.forced]
    num_faulty = 0
    for cases, kind, model in (
        (of_script, "scripted", ("--template", args.template)),
        (forced, "bundled", ("--bundled",)),
    ):
        with server(runs / kind, *model) as url:
            for program, file in cases:
                num_faulty += tell(program, file, under, runs / kind, url)
    sys.exit(1 if num_faulty else 0)


if __name__ == "__main__":
    main()
