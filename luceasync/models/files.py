"""The files of one model: its config, its GGUF header and its weights, each header read once.

At a start, everything about a model's files comes from this object. Refuses what cannot be run
exactly. Pure: no torch, no weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from luceasync.errors import ModelError
from luceasync.gguf.model import GgufModel, read_model
from luceasync.gguf.paths import gguf_at
from luceasync.models.directory import CONFIG, check_directory
from luceasync.models.families import FAMILIES
from luceasync.models.families.family import ConfigFields
from luceasync.models.formats import StoredWeights, format_of
from luceasync.models.formats.gguf import GgufWeights
from luceasync.models.gguf_model import GgufContents, read_gguf
from luceasync.models.quant.checkpoints.module import Scheme
from luceasync.models.quant.checkpoints.scheme import scheme_at
from luceasync.models.spec import ModelSpec

GENERATION_CONFIG = "generation_config.json"


class ModelFiles:
    """The model at `path`: a Hugging Face directory, a GGUF file, or a directory with one.

    A file is read on first use. One that is missing, broken or not supported is a ModelError that
    names the file and the field.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def gguf(self) -> GgufModel | None:
        """The header of the GGUF file; None for a Hugging Face directory."""
        file = gguf_at(self.path)
        return None if file is None else read_model(file)

    @cached_property
    def spec(self) -> ModelSpec:
        """The spec of the model, read by the family that its config or its GGUF header names."""
        if (contents := self._gguf_contents) is not None:
            return contents.spec
        check_directory(self.path)
        path = self.path / CONFIG
        config = _read_object(path)
        _ = self.scheme  # refuse an unsupported scheme before any other field
        try:
            spec = parse_spec(config)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None
        return replace(
            spec,
            tied_embeddings=spec.tied_embeddings and self._is_tied(spec),
            suppressed=_suppressed(self.path / GENERATION_CONFIG, spec.vocab_size),
        )

    def _is_tied(self, spec: ModelSpec) -> bool:
        """Whether the weights agree with a config that ties the head to the embedding. If a
        separate head is stored, it is used, as in transformers."""
        names = spec.end_names.head, spec.embedding_name
        return not self.has_weights or self.weights.is_tied(*names)

    @cached_property
    def scheme(self) -> Scheme | None:
        """How the matrices are quantised according to a Hugging Face config; None: they are not."""
        return None if self.gguf is not None else scheme_at(self.path)

    @cached_property
    def weights(self) -> StoredWeights:
        """The weights. If they are missing, their methods raise ModelError."""
        if (contents := self._gguf_contents) is not None:
            return GgufWeights(contents)
        return format_of(self.path).weights(self.path, self.scheme)

    @property
    def has_weights(self) -> bool:
        """Whether there are any weights; a plan does not need them."""
        return self.gguf is not None or format_of(self.path).is_at(self.path)

    @cached_property
    def mtp_fault(self) -> str | None:
        """Why there is no drafting head, as words to follow a value; None: there is one."""
        if self.spec.mtp is None:
            return "the model's config has no such head"
        if not self.has_weights:
            return "the model has no weights"
        shapes = self.spec.mtp_shapes()
        missing = next((name for name in shapes if not self.weights.holds(name)), None)
        return None if missing is None else f"the weights have no tensor {missing!r}"

    @cached_property
    def _gguf_contents(self) -> GgufContents | None:
        return None if self.gguf is None else read_gguf(self.gguf)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _suppressed(path: Path, vocab_size: int) -> tuple[int, ...]:
    """The tokens that are never chosen according to a generation_config, if there is one."""
    ids = _read_object(path).get("suppress_tokens") if path.is_file() else None
    if ids is None:
        return ()
    is_list = isinstance(ids, list)
    if not is_list or any(type(each) is not int or not 0 <= each < vocab_size for each in ids):
        raise ModelError(
            f"{path}: suppress_tokens = {ids!r}: expected a list of token ids below {vocab_size}"
        )
    return tuple(sorted(set(ids)))


def read_spec(path: Path) -> ModelSpec:
    """The spec of the model at `path`, for callers that need nothing else from its files. Raises
    ModelError."""
    return ModelFiles(path).spec


def parse_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The spec that a parsed config.json describes. Raises ModelError."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    _check_classes(config.get("architectures"), family.classes)
    return family.parse(ConfigFields(config))


def _check_classes(named: object, classes: Sequence[str]) -> None:
    """Raise ModelError if a config names classes, but none of these: a drafter or a classifier has
    the config of the language model that it belongs to."""
    if named is not None and not isinstance(named, list):
        raise ModelError(f"architectures = {named!r}: expected a list of names")
    if named and classes and not any(name in classes for name in named):
        raise ModelError(
            f"architectures = {named!r} is not supported; expected {' or '.join(classes)}"
        )
