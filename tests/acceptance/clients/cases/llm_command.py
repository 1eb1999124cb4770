"""llm as a command with a home of its own, which knows this server's models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from told import MODEL, URL

__all__ = ["MODEL", "llm"]

HOME = Path.cwd() / "llm"
LLM = Path(sys.executable).parent / "llm"
MODELS = f"""- model_id: {MODEL}
  model_name: {MODEL}
  api_base: {URL}/v1
  supports_tools: true
  supports_schema: true
- model_id: {MODEL}-text
  model_name: {MODEL}
  api_base: {URL}/v1
  completion: true
"""


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
