"""Client programs: where each is installed from, and how its cases run.

Owns installation. Every client has a folder and dependencies of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CASES = Path(__file__).parent / "cases"
TOLD = "told.mjs"  # what JavaScript's cases share
DIST_INFO = "lib/python3*/site-packages/*.dist-info"
INSTALL_S = 900.0
CASES_S = 900.0


@dataclass(frozen=True, slots=True)
class Program:
    """A client. `packages`: from an index; `cases`: the file of `clients/cases` that uses them,
    None for an agent, which is run as a command; `forced`: cases that force a format, so that any
    model can answer.
    """

    name: str
    kind: str
    packages: tuple[str, ...]
    cases: str | None = None
    forced: str | None = None

    @property
    def folder_name(self) -> str:
        return f"{self.kind}-{self.name.lower().replace(' ', '-')}"

    def install(self, under: Path) -> Path:
        """Install into its own folder, unless that is done; returns the folder."""
        folder = under / self.folder_name
        if (folder / "installed").exists():
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        if self.kind == "npm":
            quiet = ("--no-audit", "--no-fund", "--no-update-notifier")
            _run(["npm", "install", "--prefix", str(folder), *quiet, *self.packages])
        else:
            _run([sys.executable, "-m", "venv", str(folder)])
            pip = [str(folder / "bin/pip"), "install", "-q", "--disable-pip-version-check"]
            _run([*pip, *self.packages])
        (folder / "installed").write_text("")
        return folder

    def version(self, under: Path) -> str:
        """The installed version of its first package."""
        folder = under / self.folder_name
        return ", ".join(_version(folder, self.kind, package) for package in self.packages)

    def run(
        self, cases: str, under: Path, home: Path, url: str, model_dir: Path
    ) -> dict[str, str | None]:
        """Run a file of `clients/cases`; returns each case's error, None for none."""
        folder = under / self.folder_name
        home.mkdir(parents=True, exist_ok=True)
        if self.kind == "npm":
            for file in (cases, TOLD):  # so that it finds its packages
                shutil.copy(CASES / file, folder)
            command = ["node", str(folder / cases)]
        else:
            command = [str(folder / "bin/python"), str(CASES / cases)]
        ran = subprocess.run(
            command,
            cwd=home,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "LUCE_URL": url,
                "LUCE_MODEL_DIR": str(model_dir),
            },
            capture_output=True,
            text=True,
            timeout=CASES_S,
            check=False,
        )
        lines = [line for line in ran.stdout.splitlines() if line.startswith('{"case"')]
        told = {line["case"]: line["error"] for line in map(json.loads, lines)}
        return told or {"start": (ran.stdout + ran.stderr)[-600:]}


PROGRAMS = (
    Program("Claude Code", "npm", ("@anthropic-ai/claude-code@2.1.330",)),
    Program("Codex", "npm", ("@openai/codex@0.169.0",)),
    Program("OpenCode", "npm", ("opencode-ai@1.18.33",)),
    Program("Qwen Code", "npm", ("@qwen-code/qwen-code@0.24.4",)),
    Program("pi", "npm", ("@earendil-works/pi-coding-agent@1.5.2",)),
    Program("Continue", "npm", ("@continuedev/cli@1.5.47",)),
    Program("Cline", "npm", ("cline@3.0.65",)),
    Program("openai", "pip", ("openai",), "openai_python.py"),
    Program("anthropic", "pip", ("anthropic",), "anthropic_python.py"),
    Program(
        "openai, anthropic, ai",
        "npm",
        ("openai", "@anthropic-ai/sdk", "ai@6", "@ai-sdk/openai-compatible@2", "zod"),
        "javascript.mjs",
        "javascript_forced.mjs",
    ),
    Program("litellm", "pip", ("litellm", "mcp"), "litellm_python.py", "litellm_forced.py"),
    Program(
        "langchain", "pip", ("langchain-openai",), "langchain_python.py", "langchain_forced.py"
    ),
    Program(
        "instructor",
        "pip",
        ("instructor", "anthropic"),
        "instructor_python.py",
        "instructor_forced.py",
    ),
    Program(
        "pydantic-ai",
        "pip",
        ("pydantic-ai-slim[openai]",),
        "pydantic_ai_python.py",
        "pydantic_ai_forced.py",
    ),
    Program("llm", "pip", ("llm",), "llm_python.py", "llm_forced.py"),
    Program("aider", "pip", ("aider-chat",), "aider_python.py"),
    Program("lm_eval", "pip", ("lm_eval[api]",), "lm_eval_python.py"),
    Program("ollama", "pip", ("ollama",), "ollama_python.py", "ollama_forced.py"),
    Program("ollama", "npm", ("ollama",), "ollama.mjs"),
    Program("langchain-ollama", "pip", ("langchain-ollama", "litellm"), "ollama_apps_python.py"),
    Program("guidellm", "pip", ("guidellm",), "guidellm_python.py"),
)


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, timeout=INSTALL_S, stdout=subprocess.DEVNULL)


def _version(folder: Path, kind: str, package: str) -> str:
    if kind == "npm":
        name = package[0] + package[1:].partition("@")[0]
        file = folder / "node_modules" / name / "package.json"
        return f"{name} {json.loads(file.read_text())['version']}"
    name = package.partition("[")[0]
    names = (path.name.removesuffix(".dist-info") for path in folder.glob(DIST_INFO))
    versions = {
        name.replace("_", "-").lower(): version
        for name, _, version in (each.rpartition("-") for each in names)
    }
    return f"{name} {versions[name.replace('_', '-').lower()]}"
