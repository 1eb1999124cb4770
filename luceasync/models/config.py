"""What a model is, read by the family that its config.json or its GGUF header names. Pure: no
torch, no weights.

What we cannot run exactly is refused here, in words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from luceasync.errors import ModelError
from luceasync.gguf.model import read_model
from luceasync.gguf.place import gguf_at
from luceasync.models.directory import CONFIG, check_directory
from luceasync.models.families import FAMILIES
from luceasync.models.families.family import Fields
from luceasync.models.gguf_model import read_gguf
from luceasync.models.quant.checkpoints.scheme import scheme_at
from luceasync.models.spec import ModelSpec


def read_spec(model_dir: Path) -> ModelSpec:
    """The spec of the model in `model_dir`, which may be a GGUF file. Raises ModelError naming the
    file and the field.
    """
    if (file := gguf_at(model_dir)) is not None:
        return read_gguf(read_model(file)).spec
    check_directory(model_dir)
    path = model_dir / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: a JSON object is expected, got {type(config).__name__}")
    scheme_at(model_dir)
    try:
        return parse_spec(config)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def quantisation_words(model_dir: Path) -> str | None:
    """How a Hugging Face directory says that its matrices are quantised; None: not at all. Raises
    ModelError.
    """
    scheme = None if gguf_at(model_dir) else scheme_at(model_dir)
    return None if scheme is None else scheme.words


def parse_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The spec that a parsed config.json describes. Raises ModelError."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    return family.parse(Fields(config))
