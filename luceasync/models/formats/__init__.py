"""Formats of weight files: GGUF, and the formats that accompany a config.json."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from luceasync.models.encodings import Encoding, Shape
from luceasync.models.formats import safetensors
from luceasync.models.quant.checkpoints.module import Scheme

if TYPE_CHECKING:
    from luceasync.models.loader import TensorSource


class StoredWeights(Protocol):
    """The weights of one model as described by the headers of their files. Each header is read
    once, on first use; a file that is missing, truncated or wrong raises ModelError."""

    @property
    def paths(self) -> list[Path]:
        """The files that hold the numbers."""
        ...

    def encoding(self, name: str) -> Encoding:
        """How a tensor is stored."""
        ...

    def holds(self, name: str) -> bool:
        """Whether a tensor of this name is stored, in any encoding."""
        ...

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Check that all of these tensors are stored, with these shapes."""
        ...

    def check_unused(self, shapes: Mapping[str, Shape]) -> None:
        """Check that nothing else is stored that would change what the model computes."""
        ...

    def is_tied(self, head: str, embedding: str) -> bool:
        """Whether a head that a config calls tied is the embedding: it is not stored, or is equal
        bit for bit."""
        ...

    def open(self) -> "AbstractContextManager[TensorSource]":
        """Open every file (mapped, not read). Headers are read again if a file has changed."""
        ...


class Format(Protocol):
    """A format of weight files in a directory with a config.json."""

    def is_at(self, model_dir: Path) -> bool:
        """Whether the weights of `model_dir` are in this format."""
        ...

    def weights(self, model_dir: Path, scheme: Scheme | None) -> StoredWeights:
        """The weights of `model_dir`, whose config says that matrices are quantised by `scheme`.
        Reads nothing yet.
        """
        ...


FORMATS: list[Format] = [safetensors.Safetensors()]


def format_of(model_dir: Path) -> Format:
    """The format of the weights in `model_dir`; if none fits, the first one, which then reports
    what is missing."""
    return next((f for f in FORMATS if f.is_at(model_dir)), FORMATS[0])
