"""Clients with the recipes of docs/agents.md as they stand there: files, commands, programs.

Owns how a recipe is carried out. An agent is asked for a command and two sentences; a program says
what it says.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.acceptance.clients.agents import settings

RUN_S = 300.0
SAID = "The answer is written."
TITLES = {"langchain": "LangChain", "openai, anthropic, ai": "AI SDK"}  # of programs' sections


@dataclass(frozen=True, slots=True)
class Place:
    """Where a recipe is tried: `folder` of the installed client, and a home."""

    folder: Path
    home: Path

    def run(self, words: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
        """What a command prints. Raises CalledProcessError."""
        work = self.home / "work"
        work.mkdir(parents=True, exist_ok=True)
        programs = f"{self.folder / 'node_modules/.bin'}:{self.folder / 'bin'}"
        path = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(self.home)}
        return subprocess.run(
            words,
            cwd=work,
            env={**path, **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=True,
        ).stdout


def try_recipe(name: str, url: str, place: Place) -> list[str]:
    """Follow the section of a client; returns what is wrong with what came of it."""
    blocks = settings(TITLES.get(name, name), url, {})
    try:
        said = TRIES[name](blocks, place)
    except subprocess.CalledProcessError as error:
        return [f"status {error.returncode}: {(error.stdout + error.stderr)[-400:]}"]
    return [] if said else ["nothing was said, or done"]


def _asked(tool: str, arguments: Mapping[str, object]) -> str:
    return f"Do this: [[{tool} {json.dumps(arguments)}]] [[say {SAID}]]"


def _wrote(place: Place, said: str) -> bool:
    """Whether an agent has run its command and said its sentence."""
    file = place.home / "work/answer.txt"
    return file.exists() and file.read_text() == "42\n" and SAID in said


def _continue(blocks: Sequence[str], place: Place) -> bool:
    config = place.home / ".continue/config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(blocks[0])
    asked = _asked("Bash", {"command": "echo 42 > answer.txt"})
    return _wrote(place, place.run(["cn", "--config", str(config), "--auto", "-p", asked]))


def _cline(blocks: Sequence[str], place: Place) -> bool:
    place.run(["sh", "-c", blocks[0]])
    asked = _asked("run_commands", {"commands": ["echo 42 > answer.txt"]})
    said = place.run(["cline", asked])
    hub = json.loads((place.home / ".cline/data/locks/hub/production.json").read_text())
    os.kill(hub["pid"], signal.SIGTERM)  # it would go on
    return _wrote(place, said)


def _qwen_code(blocks: Sequence[str], place: Place) -> bool:
    config, exports = blocks
    file = place.home / ".qwen/settings.json"
    file.parent.mkdir(parents=True)
    file.write_text(config)
    asked = _asked("run_shell_command", {"command": "echo 42 > answer.txt", "is_background": False})
    return _wrote(place, place.run(["sh", "-c", f'{exports}\nqwen --yolo -p "$0"', asked]))


def _pi(blocks: Sequence[str], place: Place) -> bool:
    file = place.home / ".pi/agent/models.json"
    file.parent.mkdir(parents=True)
    file.write_text(blocks[0])
    words = ("pi", "--provider", "luceasync", "--model", "luce", "-p")
    asked = _asked("bash", {"command": "echo 42 > answer.txt"})
    return _wrote(place, place.run([*words, asked], {"PI_OFFLINE": "1"}))


def _langchain(blocks: Sequence[str], place: Place) -> bool:
    return bool(place.run(["python", "-c", blocks[0]]).strip())


def _ai_sdk(blocks: Sequence[str], place: Place) -> bool:
    file = place.folder / "recipe.mjs"  # so that it finds its packages
    file.write_text(blocks[0])
    return bool(place.run(["node", str(file)]).strip())


TRIES: dict[str, Callable[[Sequence[str], Place], bool]] = {
    "Qwen Code": _qwen_code,
    "pi": _pi,
    "Continue": _continue,
    "Cline": _cline,
    "langchain": _langchain,
    "openai, anthropic, ai": _ai_sdk,
}
