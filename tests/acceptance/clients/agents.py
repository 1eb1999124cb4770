"""Agents as commands, with the settings of docs/agents.md: where each expects them, and its flags.

Owns how an agent is started. Knows neither what it is asked nor what the model says.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/agents.md"
NOTES = Path(__file__).parent / "notes.py"
URL = "http://127.0.0.1:8000"  # on the page
TIMEOUT_S = 300.0
BLOCK = re.compile(r"^```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EXPORT = re.compile(r"^export (\w+)=(.*)$", re.MULTILINE)

Changes = Mapping[str, str]  # of settings: what a text is replaced by


def settings(title: str, url: str, changes: Changes) -> list[str]:
    """The blocks of a section of the page, for the server at `url`, with texts replaced."""
    section = PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    for old, new in {URL: url, **changes}.items():
        assert old in section, f"{PAGE} does not say {old} of {title}"
        section = section.replace(old, new)
    return BLOCK.findall(section)


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run of an agent ended."""

    status: int
    output: str
    errors: str


@dataclass(frozen=True, slots=True)
class Agent:
    """`command` gives the program's words, depending on whether it goes on with its last session;
    the question is the last word, or comes on standard input if `reads_input`. `prepare` writes
    settings into a home and returns variables; `changes`: what it changes of them.
    """

    bin: str
    command: Callable[[bool], Sequence[str]]
    prepare: Callable[[Path, str, Changes], dict[str, str]]
    reads_input: bool = False
    changes: Changes = field(default_factory=dict)

    def run(
        self,
        folder: Path,
        home: Path,
        url: str,
        asked: str,
        *,
        goes_on: bool,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Ran:
        """Ask it in its own folder; `meanwhile` is called again and again until it ends. Raises
        TimeoutError.
        """
        work = home / "work"
        work.mkdir(parents=True, exist_ok=True)
        environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
        environment |= self.prepare(home, url, self.changes)
        for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
            environment[name] = str(home / name.lower())
        words = [str(folder / "node_modules/.bin" / self.bin), *self.command(goes_on)]
        output, errors = home / "output.txt", home / "errors.txt"
        asking = home / "asked.txt"
        asking.write_text(asked if self.reads_input else "")
        with asking.open() as stdin, output.open("w") as stdout, errors.open("w") as stderr:
            process = subprocess.Popen(
                words if self.reads_input else [*words, asked],
                cwd=work,
                env=environment,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )
            end = time.monotonic() + TIMEOUT_S
            try:
                while process.poll() is None:
                    if time.monotonic() > end:
                        raise TimeoutError(f"{self.bin}: {errors.read_text()[-400:]}")
                    meanwhile()
                    time.sleep(0.1)
            finally:
                process.kill()
                process.wait()
        return Ran(process.returncode, output.read_text(), errors.read_text())


def _claude(home: Path, url: str, changes: Changes) -> dict[str, str]:
    return {
        **dict(EXPORT.findall(settings("Claude Code", url, changes)[0])),
        "DISABLE_AUTOUPDATER": "1",
    }


def _codex(home: Path, url: str, changes: Changes) -> dict[str, str]:
    config, catalog = settings("Codex", url, changes)
    folder = home / ".codex"
    folder.mkdir(exist_ok=True)
    (folder / "luceasync.json").write_text(catalog)
    notes = json.dumps([str(NOTES), str(home / "work/notes.txt")])
    (folder / "config.toml").write_text(
        'approval_policy = "never"\nsandbox_mode = "danger-full-access"\n'
        f"{config}"
        f"[mcp_servers.notes]\ncommand = {json.dumps(sys.executable)}\nargs = {notes}\n"
    )
    return {}


def _opencode(home: Path, url: str, changes: Changes) -> dict[str, str]:
    (home / "work/opencode.json").write_text(settings("OpenCode", url, changes)[0])
    return {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}


AGENTS = {
    "Claude Code": Agent(
        "claude",
        lambda goes_on: [*(["-c"] if goes_on else []), "--allowedTools", "Bash,Read,Edit", "-p"],
        _claude,
    ),
    "Codex": Agent(
        "codex",
        lambda goes_on: [
            *("exec", "--skip-git-repo-check"),
            *(("resume", "--last") if goes_on else ()),
        ],
        _codex,
    ),
    "OpenCode": Agent(
        "opencode",
        lambda goes_on: ["run", *(["-c"] if goes_on else [])],
        _opencode,
        reads_input=True,
    ),
}
