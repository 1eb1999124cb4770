"""Agents that choose freely, each as a command: two turns with a tool call in both.

Owns what each needs to find the server.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

FIRST = "Do this: [[{tool} {arguments}]] [[say the tool said it]]"
SECOND = "Then: [[{tool} {arguments}]] [[say the second is done]]"
ENDS = ("the tool said it", "the second is done")
TIMEOUT_S = 300.0

CODEX = """model = "luce"
model_provider = "local"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "KEY"
"""


@dataclass(frozen=True, slots=True)
class Agent:
    """`command` gives the program's words, depending on whether it is the second turn; the question
    is the last word, or comes on standard input if `reads_input`.
    """

    bin: str
    tool: str
    arguments: dict[str, str]
    command: Callable[[bool], Sequence[str]]
    prepare: Callable[[Path, str], dict[str, str]]
    reads_input: bool = False

    def run(self, folder: Path, home: Path, url: str) -> list[str]:
        """Run two turns in their own folder; returns the error, if any."""
        home.mkdir(parents=True, exist_ok=True)
        work = home / "work"
        work.mkdir(exist_ok=True)
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), **self.prepare(home, url)}
        for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
            environment[name] = str(home / name.lower())
        faults = []
        for is_second, (ask, end) in enumerate(zip((FIRST, SECOND), ENDS, strict=True)):
            asked = ask.format(tool=self.tool, arguments=json.dumps(self.arguments))
            words = [str(folder / "node_modules/.bin" / self.bin), *self.command(bool(is_second))]
            ran = subprocess.run(
                words if self.reads_input else [*words, asked],
                cwd=work,
                env=environment,
                input=asked if self.reads_input else "",
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            if ran.returncode or end not in ran.stdout:
                faults.append(f"{ran.returncode}: {(ran.stdout + ran.stderr)[-400:]}")
        return faults


def _claude(home: Path, url: str) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "k",
        "ANTHROPIC_MODEL": "luce",
        "ANTHROPIC_SMALL_FAST_MODEL": "luce",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def _codex(home: Path, url: str) -> dict[str, str]:
    (home / ".codex").mkdir(exist_ok=True)
    (home / ".codex" / "config.toml").write_text(CODEX.format(url=url))
    return {"KEY": "k"}


def _opencode(home: Path, url: str) -> dict[str, str]:
    limit = {"context": 100_000, "output": 32_000}
    model = {"name": "luce", "reasoning": True, "tool_call": True, "limit": limit}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "local",
        "options": {"baseURL": f"{url}/v1", "apiKey": "k"},
        "models": {"luce": model},
    }
    config = {
        "autoupdate": False,
        "share": "disabled",
        "model": "local/luce",
        "small_model": "local/luce",
        "provider": {"local": provider},
    }
    (home / "opencode.json").write_text(json.dumps(config))
    return {
        "OPENCODE_CONFIG": str(home / "opencode.json"),
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
    }


SHELL = {"command": "echo luce-$((40+2))", "description": "say it"}
AGENTS = {
    "Claude Code": Agent(
        "claude",
        "Bash",
        SHELL,
        lambda again: [*(["-c"] if again else []), "--allowedTools", "Bash", "-p"],
        _claude,
    ),
    "Codex": Agent(
        "codex",
        "exec_command",
        {"cmd": SHELL["command"]},
        lambda again: [
            *("exec", "--skip-git-repo-check"),
            *(("resume", "--last") if again else ()),
        ],
        _codex,
    ),
    "OpenCode": Agent(
        "opencode",
        "bash",
        SHELL,
        lambda again: ["run", *(["-c"] if again else []), "-m", "local/luce"],
        _opencode,
        reads_input=True,
    ),
}
