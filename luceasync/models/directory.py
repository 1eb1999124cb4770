"""A model directory as a person names it: whether it is one, else what was probably meant.

Owns the words for a path that is missing, a name of the hub, a GGUF file. Reads no config. Pure of
torch, so that a typo is told at once.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from luceasync.errors import ModelError

CONFIG = "config.json"
EXPECTED = "expected a Hugging Face model directory: config.json, *.safetensors, tokenizer.json"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
GGUF = ".gguf"


def check_directory(path: Path, expected: str = EXPECTED) -> None:
    """Raise ModelError unless `path` is a directory with a config.json."""
    fault = _fault_of(path)
    if fault:
        raise ModelError(f"{path}: {fault}; {expected}")


def _fault_of(path: Path) -> str:
    """What keeps `path` from being a model directory; "" where nothing does."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return _fault_of_missing(path)
    except (OSError, ValueError) as error:
        return f"cannot be opened ({getattr(error, 'strerror', None) or error})"
    if not stat.S_ISDIR(mode):
        return _gguf_words() if path.suffix.lower() == GGUF else "is a file"
    if (path / CONFIG).exists():
        return ""
    if list(path.glob(f"*{GGUF}")):
        return f"no {CONFIG}, but {_gguf_words()}"
    inner = sorted(path.glob(f"snapshots/*/{CONFIG}")) or sorted(path.glob(f"*/{CONFIG}"))
    return f"no {CONFIG}" + (f" (there is one in {inner[-1].parent})" if inner else "")


def _fault_of_missing(path: Path) -> str:
    if path.suffix.lower() == GGUF:
        return f"does not exist, and {_gguf_words()}"
    if HUB_NAME.fullmatch(str(path)):
        target = path.name
        return (
            "does not exist here. Nothing is downloaded by itself: for the model of that name on "
            f"the hub, run `hf download {path} --local-dir {target}` and serve {target}"
        )
    return "does not exist"


def _gguf_words() -> str:
    return "GGUF files are not served"
