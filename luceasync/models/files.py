"""Which files of a model directory hold its weights. Knows no tensor; reads no weights."""

from __future__ import annotations

import json
from pathlib import Path

from luceasync.errors import ModelError


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of `model_dir`: those of the index, or the single one."""
    index = model_dir / "model.safetensors.index.json"
    if not index.exists():
        single = model_dir / "model.safetensors"
        if not single.exists():
            raise ModelError(
                f"{model_dir}: neither model.safetensors nor model.safetensors.index.json is there"
            )
        return [single]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index}: not an index of weight files: {error!r}") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index}: {name!r} is not a file name in this directory")
    return [model_dir / name for name in sorted(names)]
