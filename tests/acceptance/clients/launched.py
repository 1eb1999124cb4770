"""Agents as `luceasync launch` starts them, in sessions of three turns, of which the last fills
their context.

Owns how each is asked, and what it must have done in the end. Knows no settings: those are what is
tested.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TURN_S = 300.0
BIN = {"npm": "node_modules/.bin", "pip": "bin"}
WORDS = "return the name of the file that was read"  # 10 tokens of the bundled model's
GREETING = "hello\n"


@dataclass(frozen=True, slots=True)
class LaunchedAgent:
    """`command` gives its own words for a question, depending on whether it goes on with its last
    session; `shell`: its tool for commands, the argument that has the command, and others; None: it
    edits files by its answers. `max_ctx_tokens`: of the server; `fills`: how many commands of the
    second turn print how many lines, and how many lines the last question has. `reads_input`: the
    question comes on standard input.
    """

    name: str
    command: Callable[[str, bool], Sequence[str]]
    max_ctx_tokens: int
    fills: tuple[int, int, int]
    shell: tuple[str, str, dict[str, object]] | None
    environ: dict[str, str] = field(default_factory=dict)
    reads_input: bool = False

    def has_asked(self, body: str) -> bool:
        """Whether a request is the agent's own, which has tools, or is streamed if it has none at
        all; those for titles and summaries are not.
        """
        asked = json.loads(body or "{}")
        return bool(asked.get("stream" if self.shell is None else "tools"))

    def questions(self) -> list[str]:
        """What it is asked, turn by turn, with the steps of the scripted model: after a summary it
        takes those of the last question from the first one on.
        """
        num_calls, num_lines, num_words = self.fills
        many = "\n".join([WORDS] * num_words)
        if self.shell is None:
            first, last = (f"[[say greet.py\n```\n{text}```\n]]" for text in ("hi\n", GREETING))
            return [
                f"Write greet.py. {first}",
                f"Read this:\n{many}\n[[say I have read it.]]",
                f"Write another greeting. {last}",
            ]
        fill = self._call(f"yes {WORDS} | head -n {num_lines}")
        return [
            f"Write a file. {self._call('echo hi > greet.py')} [[say The file is written.]]",
            f"Look at this. {' '.join([fill] * num_calls)} [[say I have looked.]]",
            f"Read this:\n{many}\nWrite another. {self._call('echo hello > greet.py')} "
            "[[say All is written.]]",
        ]

    def _call(self, command: str) -> str:
        assert self.shell is not None
        tool, argument, more = self.shell
        return f"[[{tool} {json.dumps({**more, argument: command})}]]"

    def ask(self, home: Path, programs: Path, url: str, question: str, goes_on: bool) -> list[str]:
        """Ask it, in its own folder; returns what is wrong with how it ended."""
        work = home / "work"
        work.mkdir(parents=True, exist_ok=True)
        environ = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), **self.environ}
        for name in ("CONFIG", "DATA", "CACHE", "STATE"):
            environ[f"XDG_{name}_HOME"] = str(home / name.lower())
        launch = [sys.executable, "-m", "luceasync", "launch", self.name, "--url", url, "--"]
        ran = subprocess.run(
            [*launch, *self.command(question, goes_on)],
            cwd=work,
            env=environ,
            input=question if self.reads_input else "",
            capture_output=True,
            text=True,
            timeout=TURN_S,
            check=False,
        )
        (home / "output.txt").write_text(ran.stdout + ran.stderr)
        return [f"status {ran.returncode}: {ran.stderr[-400:]}"] if ran.returncode else []


def _aider(question: str, goes_on: bool) -> list[str]:
    quiet = ("--no-git", "--yes-always", "--no-check-update", "--analytics-disable")
    quiet += ("--map-tokens", "0", "--no-auto-lint", "--no-detect-urls", "--no-pretty")
    again = ["--restore-chat-history"] if goes_on else []
    return [*quiet, *again, "--message", question, "greet.py"]


LAUNCHED = {
    "Claude Code": LaunchedAgent(
        "claude",
        lambda question, goes_on: [
            *(["-c"] if goes_on else []),
            *("--allowedTools", "Bash", "-p", question),
        ],
        50_000,
        (2, 650, 700),
        ("Bash", "command", {"description": "work"}),
        {"DISABLE_AUTOUPDATER": "1"},
    ),
    "Codex": LaunchedAgent(
        "codex",
        lambda question, goes_on: [
            *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            *(["resume", "--last"] if goes_on else []),
            question,
        ],
        18_000,
        (1, 250, 350),
        ("exec_command", "cmd", {}),
    ),
    "OpenCode": LaunchedAgent(
        "opencode",
        lambda question, goes_on: ["run", *(["-c"] if goes_on else [])],
        32_000,
        (2, 500, 650),
        ("bash", "command", {"description": "work"}),
        {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        reads_input=True,  # words of more than one it would put in quotes
    ),
    "Qwen Code": LaunchedAgent(
        "qwen-code",
        lambda question, goes_on: [*(["-c"] if goes_on else []), "--yolo", "-p", question],
        48_000,
        (1, 450, 100),
        ("run_shell_command", "command", {"is_background": False}),
    ),
    "pi": LaunchedAgent(
        "pi",
        lambda question, goes_on: [*(["-c"] if goes_on else []), "-p", question],
        48_000,
        (2, 900, 1300),
        ("bash", "command", {}),
        {"PI_OFFLINE": "1"},
    ),
    "aider": LaunchedAgent(
        "aider", _aider, 20_000, (0, 0, 300), None, {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ),
}
