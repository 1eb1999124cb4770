"""Checks that a path is a model directory, and suggests what was probably meant if it is not.

Owns the messages about missing paths and names on the hub, and a model's default name. Reads no
config and does not import torch, so that a typo is reported at once.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from luceasync.errors import ModelError
from luceasync.gguf.paths import PART, SUFFIX

CONFIG = "config.json"
EXPECTED = (
    "expected a Hugging Face model directory: config.json, *.safetensors, tokenizer.json; "
    "or a GGUF file"
)
HUB_NAME = re.compile(
    r"(?:(?:https?:/+)?(?:hf\.co|huggingface\.co)/|hf:/+)?"
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<quant>[\w.-]+))?(?:/tree/main)?/?"
)
OLLAMA_NAME = re.compile(r"(?P<family>[a-z][\w.-]*):(?P<tag>[\w.-]+)")
QWEN3_TAG = re.compile(r"(\d+(?:\.\d+)?)b")


def check_directory(path: Path, expected: str = EXPECTED) -> None:
    """Raise ModelError unless `path` is a directory with a config.json."""
    fault = _fault_of(path)
    if fault:
        raise ModelError(f"{path}: {fault}; {expected}")


def _fault_of(path: Path) -> str:
    """Why `path` is not a model directory; "" if it is one."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return _fault_of_missing(path)
    except (OSError, ValueError) as error:
        return f"cannot be opened ({getattr(error, 'strerror', None) or error})"
    if not stat.S_ISDIR(mode):
        if not stat.S_ISREG(mode):
            return "is not a regular file"
        return "is a GGUF file" if path.suffix.lower() == SUFFIX else "is a file"
    if (path / CONFIG).exists():
        return ""
    if any(file.is_file() for file in path.glob(f"*{SUFFIX}")):
        return f"no {CONFIG}, but GGUF files"
    inner = sorted(path.glob(f"snapshots/*/{CONFIG}")) or sorted(path.glob(f"*/{CONFIG}"))
    return f"no {CONFIG}" + (f" (there is one in {inner[-1].parent})" if inner else "")


def _fault_of_missing(path: Path) -> str:
    if path.is_symlink():
        return f"is a link to {os.readlink(path)}, which does not exist"
    if found := HUB_NAME.fullmatch(str(path)):
        return (
            "does not exist here. Nothing is downloaded automatically: for the hub's model of that "
            f"name, {_download(found['name'], found['quant'])}"
        )
    if found := OLLAMA_NAME.fullmatch(str(path)):
        size = QWEN3_TAG.fullmatch(found["tag"]) if found["family"] == "qwen3" else None
        name = f"Qwen/Qwen3-{size[1]}B" if size else "ORGANISATION/NAME"
        return (
            "does not exist here, and names of Ollama are not known. Nothing is downloaded "
            f"automatically: {_download(name)}"
        )
    return "does not exist"


def _download(name: str, quant: str | None = None) -> str:
    """How to download the hub's model `name`; of a GGUF repository, only the files of `quant`."""
    target = name.partition("/")[2]
    only = f"--include '*{quant}*' " if quant else ""
    return f"run `hf download {name} {only}--local-dir {target}` and serve {target}"


def model_name(path: Path) -> str:
    """The model's default name: that of its directory, or of its GGUF file without part number and
    suffix.
    """
    if path.is_dir():
        return path.resolve().name
    part = PART.fullmatch(path.name)  # the link's own name: its target may be named anything
    return part["stem"] if part else path.stem if path.suffix.lower() == SUFFIX else path.name
