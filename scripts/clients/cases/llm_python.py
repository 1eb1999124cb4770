"""llm, the command: a prompt, a second turn, a tool, a schema's absence, a model of completions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from told import LONG, MODEL, URL, WORDS, tell

HOME = Path.cwd() / "llm"
LLM = Path(sys.executable).parent / "llm"
MODELS = f"""- model_id: {MODEL}
  model_name: {MODEL}
  api_base: {URL}/v1
  supports_tools: true
- model_id: {MODEL}-text
  model_name: {MODEL}
  api_base: {URL}/v1
  completion: true
"""
TOOL = (
    'def look_up(name: str, depth: int) -> str:\n    "Look it up."\n    return "it writes " + name'
)


def llm(*words: str) -> str:
    HOME.mkdir(exist_ok=True)
    (HOME / "extra-openai-models.yaml").write_text(MODELS)
    command = [str(LLM), *words]
    ran = subprocess.run(
        command,
        env={"LLM_USER_PATH": str(HOME), "HOME": str(HOME), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def two_turns():
    assert llm("-m", MODEL, LONG) == WORDS
    assert llm("-c", "And json.loads?") == WORDS


def plain():
    assert llm("-m", MODEL, "--no-stream", "Hello") == WORDS


def tools():
    asked = 'Look. [[look_up {"name": "json", "depth": 2}]] [[say It is found]]'
    assert llm("-m", MODEL, "--functions", TOOL, asked) == "It is found"


def completion():
    assert llm("-m", f"{MODEL}-text", "The sky is", "-o", "max_tokens", "4")


tell(two_turns, plain, tools, completion)
