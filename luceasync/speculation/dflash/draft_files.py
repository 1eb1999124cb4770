"""The files of a drafter: a Hugging Face directory, plain or quantised, or a GGUF file.

Knows names and encodings of stored tensors. A tensor that the network would not use is refused: it
belongs to a variant of DFlash, which without it would silently propose badly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from luceasync.errors import ModelError
from luceasync.gguf.model import GgufModel, read_model
from luceasync.gguf.paths import gguf_at
from luceasync.models.directory import CONFIG, check_directory
from luceasync.models.encodings import (
    DenseEncoding,
    Encoding,
    NumbersInMemory,
    Shape,
    WeightFile,
)
from luceasync.models.formats.gguf import GgufSource
from luceasync.models.formats.safetensors import Checkpoint, SafetensorsWeights, weight_files
from luceasync.models.quant.checkpoints.scheme import scheme_at
from luceasync.speculation.dflash.draft_gguf import draft_config_of, tensors_of
from luceasync.speculation.dflash.draft_spec import (
    FUSED,
    MASK_EMBEDDING,
    SELECTOR,
    DraftSpec,
)

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.loader import TensorSource

ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
# Some checkpoints repeat weights of the target.
TARGETS_OWN = ("embed_tokens.weight", "lm_head.weight")
PREFIX = "model."


class DraftFiles:
    """The drafter at `path`. A file is read on first use; one that is missing, broken or not
    supported is a ModelError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def gguf(self) -> GgufModel | None:
        """The header of the GGUF file; None for a Hugging Face directory."""
        file = gguf_at(self.path)
        return None if file is None else read_model(file)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The fields of config.json, or those that the metadata stands for."""
        if self.gguf is not None:
            try:
                return draft_config_of(self.gguf)
            except ModelError as error:
                raise ModelError(f"{self.path}: {error}") from None
        check_directory(self.path, "expected a DFlash drafter's directory or GGUF file, or none")
        path = self.path / CONFIG
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
        if not isinstance(config, dict):
            raise ModelError(f"{path}: a JSON object is expected, got {type(config).__name__}")
        scheme_at(self.path)  # refuse one that is not supported
        return config

    @property
    def described_by(self) -> Path:
        """The file that says what the drafter is."""
        return self.path / CONFIG if self.gguf is None else self.gguf.path

    @property
    def weight_files(self) -> list[Path]:
        """The files that hold the numbers."""
        return weight_files(self.path) if self.gguf is None else list(self.gguf.paths)

    def encodings(self, spec: DraftSpec) -> dict[str, Encoding]:
        """How each tensor is stored, by published name. Plain ones need no file."""
        shapes = spec.shapes | spec.selector_shapes
        if self.gguf is not None:
            return {n: t.encoding for n, t in tensors_of(self.gguf, _needed(shapes)).items()}
        if scheme_at(self.path) is None:
            return dict.fromkeys(shapes, DenseEncoding())
        with self.open(spec) as source:
            return {name: source.encoding(name) for name in _needed(shapes)}

    @contextmanager
    def open(self, spec: DraftSpec) -> Iterator[TensorSource]:
        """The weights by published names, and no others than `spec` has. Raises ModelError."""
        if self.gguf is not None:
            model = read_model(self.gguf.path) if self.gguf.has_changed() else self.gguf
            stored = tensors_of(model, _needed(spec.shapes | spec.selector_shapes))
            with ExitStack() as closing:
                files = {path: WeightFile(path) for path in model.paths}
                for file in files.values():
                    closing.callback(file.close)
                yield GgufSource(model.path, stored, files)
            return
        with SafetensorsWeights(self.path, scheme_at(self.path)).open() as checkpoint:
            stored_names = {_published_name(name): name for name in checkpoint.names}
            source = DraftSource(self.path, checkpoint, stored_names, spec)
            source.check()
            yield source

    @property
    def has_mask_embedding(self) -> bool:
        """Whether there is a row to take in place of the mask token's."""
        if self.gguf is not None:
            return False
        with SafetensorsWeights(self.path, None).open() as checkpoint:
            return any(_published_name(name) == MASK_EMBEDDING for name in checkpoint.names)


def _needed(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: shape for name, shape in shapes.items() if name != MASK_EMBEDDING}


class DraftSource:
    """See TensorSource; translates the names by which drafters are published."""

    def __init__(
        self, draft_dir: Path, checkpoint: Checkpoint, stored: Mapping[str, str], spec: DraftSpec
    ) -> None:
        self._draft_dir = draft_dir
        self._checkpoint = checkpoint
        self._stored = stored  # published name -> name in the file
        self._shapes = spec.shapes | spec.selector_shapes
        self._prefix = PREFIX if any(n.startswith(PREFIX) for n in stored.values()) else ""
        self._parts = dict(self._parts_of(spec))

    def encoding(self, name: str) -> Encoding:
        if name in self._parts:
            return DenseEncoding()
        return self._checkpoint.encoding(self._own(name))

    def _own(self, name: str) -> str:
        """The name in the files of what is published as `name`, or of a quantised matrix."""
        return self._stored.get(name, self._prefix + name)

    def read(self, name: str, shape: Shape) -> Tensor:
        if (part := self._parts.get(name)) is None:
            return self._checkpoint.read(self._own(name), shape)
        whole = self._checkpoint.read(self._stored[part.name], (part.num_rows, *shape[1:]))
        return whole[part.begin : part.begin + shape[0]]

    def _parts_of(self, spec: DraftSpec) -> Iterator[tuple[str, _Part]]:
        """Where matrices are that are stored with others in one tensor."""
        for layer in range(spec.num_layers):
            prefix = f"layers.{layer}."
            for fused, names in FUSED.items():
                if prefix + fused not in self._stored:
                    continue
                heights = [self._shapes[prefix + name][0] for name in names]
                begins = accumulate(heights[:-1], initial=0)
                for name, begin in zip(names, begins, strict=True):
                    yield prefix + name, _Part(prefix + fused, begin, sum(heights))

    def stored(self, name: str, shape: Shape) -> Any:
        if name in self._parts:
            return NumbersInMemory(name, self.read(name, shape))
        return self._checkpoint.stored(self._own(name), shape)

    def stored_together(self, names: Sequence[str], shape: Shape) -> Iterator[tuple[int, Any]]:
        return ((1, self.stored(name, shape)) for name in names)

    def check(self) -> None:
        """Raise ModelError for a tensor that the network would not use."""
        fused = {part.name for part in self._parts.values()}
        known = self._shapes.keys() | fused | set(TARGETS_OWN)
        quantised = (self._checkpoint.names_of(self._own(name)) for name in self._shapes)
        known |= {_published_name(name) for names in quantised for name in names}
        unknown = sorted(set(self._stored) - known)
        if unknown:
            raise ModelError(
                f"{self._draft_dir}: {unknown[0]!r} and {len(unknown) - 1} other tensors are not "
                "part of the DFlash drafter that config.json describes"
            )


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows from `begin` on of the tensor `name`, which has `num_rows`."""

    name: str
    begin: int
    num_rows: int


def _published_name(name: str) -> str:
    name = name.removeprefix(PREFIX)
    if name.startswith(SELECTOR) and "codebook" in name:
        name = name.removesuffix(".weight")  # those of an embedding, which some writers make of it
    return ALIASES.get(name, name)
