"""guidellm, the command: a few synchronous requests, by chat and by completions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from told import MODEL, URL, tell

GUIDELLM = Path(sys.executable).parent / "guidellm"
FOLDER = Path.cwd() / "guidellm"


def benchmark(kind: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    ran = subprocess.run(
        [
            *(str(GUIDELLM), "run", "--disable-console-interactive"),
            *("--backend", f"kind=openai_http,target={URL},model={MODEL},request_format={kind}"),
            *("--tokenizer", f"kind=huggingface_auto,model={os.environ['LUCE_MODEL_DIR']}"),
            *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"),
            *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
            *("--output", f"kind=json,path={FOLDER / kind.strip('/').replace('/', '-')}.json"),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(FOLDER)},
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-300:] + ran.stderr[-600:]


def chat():
    benchmark("/v1/chat/completions")


def completions():
    benchmark("/v1/completions")


tell(chat, completions)
