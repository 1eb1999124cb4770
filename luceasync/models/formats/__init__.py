"""Formats of weight files, a file each, and the list of them. The first that fits reads them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from luceasync.models.encodings import Encoding, Shape
from luceasync.models.formats import gguf, safetensors

if TYPE_CHECKING:
    from luceasync.models.loader import TensorSource


class Format(Protocol):
    """How weights lie in files. Raises ModelError where they do not."""

    def is_at(self, model_dir: Path) -> bool:
        """Whether the weights of `model_dir` are in this format."""
        ...

    def weight_files(self, model_dir: Path) -> list[Path]:
        """The files that the numbers come from."""
        ...

    def encodings(self, model_dir: Path) -> Callable[[str], Encoding]:
        """How each tensor is stored, by its name: what a plan counts with. Reads no numbers."""
        ...

    def check(self, model_dir: Path, shapes: Mapping[str, Shape]) -> None:
        """Whether all of these tensors are there, as the headers say; `is_at` must hold. Raises
        ModelError, for files that are cut too.
        """
        ...

    def open(self, model_dir: Path) -> "AbstractContextManager[TensorSource]":
        """Open every file (mapped, not read)."""
        ...


FORMATS: list[Format] = [safetensors.Safetensors(), gguf.Gguf()]


def format_of(model_dir: Path) -> Format:
    """The format of the weights in `model_dir`; where none fits, the first, which then says what
    is missing.
    """
    return next((f for f in FORMATS if f.is_at(model_dir)), FORMATS[0])
