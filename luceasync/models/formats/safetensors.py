"""Safetensors files of a Hugging Face model directory: one, or those of an index.

Knows names, shapes and dtypes of what is stored, and nothing of what it is for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from luceasync.errors import ModelError
from luceasync.models.forms import Dense, Form, Shape

if TYPE_CHECKING:
    from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
STORED_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them


class Safetensors:
    """See luceasync.models.formats.Format."""

    def is_at(self, model_dir: Path) -> bool:
        """See Format."""
        return (model_dir / INDEX).exists() or (model_dir / SINGLE).exists()

    def weight_files(self, model_dir: Path) -> list[Path]:
        """See Format."""
        return weight_files(model_dir)

    def forms(self, model_dir: Path) -> Callable[[str], Form]:
        """See Format."""
        return lambda name: Dense()

    def open(self, model_dir: Path) -> AbstractContextManager[Checkpoint]:
        """See Format."""
        return open_checkpoint(model_dir)


class Checkpoint:
    """A TensorSource: the files of one directory. Use `open_checkpoint`."""

    def __init__(self, model_dir: Path, files: Mapping[str, Any]) -> None:
        self._model_dir = model_dir
        self._files = files  # tensor name -> open safetensors file

    @property
    def names(self) -> list[str]:
        """Of all tensors that are stored."""
        return list(self._files)

    def form(self, name: str) -> Form:
        """See luceasync.models.loader.TensorSource."""
        return Dense()

    def read(self, name: str, shape: Shape) -> Tensor:
        """See luceasync.models.loader.TensorSource."""
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"{self._model_dir}: the weights have no tensor {name!r}")
        try:
            found = tuple(file.get_slice(name).get_shape())
            if found != shape:
                raise ModelError(f"{self._model_dir}: {name!r} has shape {found}, expected {shape}")
            dtype = file.get_slice(name).get_dtype()
            if dtype not in STORED_DTYPES:  # quantized values, whose scales we would not apply
                raise ModelError(
                    f"{self._model_dir}: {name!r} is stored as {dtype}; "
                    f"{', '.join(STORED_DTYPES)} are supported"
                )
            tensor: Tensor = file.get_tensor(name)
            return tensor
        except SafetensorError as error:
            raise ModelError(f"{self._model_dir}: {name!r} cannot be read: {error}") from None


@contextmanager
def open_checkpoint(model_dir: Path) -> Iterator[Checkpoint]:
    """Open every weight file of `model_dir` (mapped, not read). Raises ModelError."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in weight_files(model_dir):
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path}: not a readable safetensors file: {error}") from None
            files.update(dict.fromkeys(file.keys(), file))
        yield Checkpoint(model_dir, files)


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of `model_dir`: those of the index, or the single one."""
    index = model_dir / INDEX
    if not index.exists():
        single = model_dir / SINGLE
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
