"""What somebody meets who starts the server for the first times, in seconds.

    python scripts/bench_newcomer.py [--picture help.svg]

Typos, until the refusal; --help at 80 columns, and lines of it where a flag is cut; Ctrl-C, until
the process has ended; the bundled model, until it is ready and has answered. Medians.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from rich.console import Console
from rich.text import Text

from luceasync.bench import command
from luceasync.bench.report import Cell, figure

SERVE = (sys.executable, "-m", "luceasync", "serve")
TYPOS = (
    ("/no/such/model",),
    ("Qwen/Qwen3-4B",),
    ("model.gguf",),
    ("--draft", "/no/such/drafter"),
    ("--target-devices", "gpu0"),
    ("--port", "eighty"),
)
AFTER_S = (0.3, 1.0, 2.0, 3.0)  # after the start, while modules are imported
BODY = {"messages": [{"role": "user", "content": "What does json.dumps do?"}], "temperature": 0}
DEADLINE_S = 120.0


def main() -> None:
    """Measure and print a row for each."""
    parser = command.parser(__doc__, rounds=3)
    parser.add_argument("--picture", type=Path, help="write the help there, as SVG")
    options = parser.parse_args()
    report = command.begin(options, ["cpu:0"])
    table = report.table(("what", "seconds", "exit code", "last words"))
    for typo in TYPOS:
        ended = [refused(typo) for _ in range(options.rounds)]
        table.add(f"serve {' '.join(typo)}", median(ended), *ended[0][1:])
    text, seconds = helped()
    cut = sum("…" in line for line in text.splitlines())
    table.add("serve --help", figure(seconds, "s"), 0, f"{cut} lines cut")
    if options.picture is not None:
        draw(text, options.picture)
    for after_s in AFTER_S:
        interrupted = [stopped(after_s) for _ in range(options.rounds)]
        table.add(f"Ctrl-C after {after_s} s", median(interrupted), *interrupted[0][1:])
    moments = zip(*lives(options.rounds), strict=True)
    for name, ended_at in zip(("ready", "first answer", "Ctrl-C, idle"), moments, strict=True):
        table.add(name, figure(statistics.median(ended_at), "s"), 0, "")


def median(ended: Sequence[tuple[float, int, str]]) -> Cell:
    return figure(statistics.median(seconds for seconds, *_ in ended), "s")


def refused(flags: Sequence[str]) -> tuple[float, int, str]:
    """Seconds, exit code and last line of a start that cannot be."""
    begun = time.perf_counter()
    done = subprocess.run([*SERVE, *flags], capture_output=True, text=True, check=False)
    return time.perf_counter() - begun, done.returncode, last_line(done.stderr)


def helped() -> tuple[str, float]:
    """The help in colours as a terminal of 80 columns shows it, and seconds."""
    begun = time.perf_counter()
    env = os.environ | {"COLUMNS": "80", "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    done = subprocess.run([*SERVE, "--help"], capture_output=True, text=True, env=env, check=True)
    return done.stdout, time.perf_counter() - begun


def draw(text: str, path: Path) -> None:
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title="luceasync serve --help")
    path.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL), encoding="utf-8")


def stopped(after_s: float) -> tuple[float, int, str]:
    """Seconds from Ctrl-C to the end."""
    with subprocess.Popen([*SERVE, "--port", "0"], stderr=subprocess.PIPE, text=True) as process:
        time.sleep(after_s)
        begun = time.perf_counter()
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=DEADLINE_S)
        return time.perf_counter() - begun, process.returncode, last_line(told)


def lives(rounds: int) -> list[tuple[float, float, float]]:
    """Of each life: seconds until ready, until the first answer, and from Ctrl-C to the end."""
    return [life() for _ in range(rounds)]


def life() -> tuple[float, float, float]:
    begun = time.perf_counter()
    with subprocess.Popen([*SERVE, "--port", "0"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        url = next(found[0] for line in lines if (found := re.search(r"http://[\d.:]+", line)))
        next(line for line in lines if line.startswith("Ready"))
        ready_s = time.perf_counter() - begun
        httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=DEADLINE_S).raise_for_status()
        answered_s = time.perf_counter() - begun
        begun = time.perf_counter()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_S)
        return ready_s, answered_s, time.perf_counter() - begun


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:100]


if __name__ == "__main__":
    main()
