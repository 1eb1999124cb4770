"""Safetensors files of a Hugging Face model directory: one, or those of an index.

Knows names, shapes and dtypes of what is stored, and nothing of what it is for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from os import SEEK_END
from pathlib import Path
from struct import unpack
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from luceasync.errors import ModelError
from luceasync.models.encodings import DenseEncoding, Encoding, Shape
from luceasync.models.quant.checkpoints.module import Found, Info, Infos, Scheme, StoredModule
from luceasync.models.quant.checkpoints.scheme import scheme_at

if TYPE_CHECKING:
    from torch import Tensor


# What a safetensors file says that it holds, without opening it as one: that would load torch.


MAX_HEADER_BYTES = 100_000_000  # as the library has it
# What a header of anything can do: also lists within lists, and numbers that are none.
_FAULTS = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError),
    *(RecursionError, OverflowError),
)


def read_infos(path: Path) -> dict[str, Info]:
    """Dtypes and shapes of all tensors of the file. Raises ModelError, for a cut file too."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ValueError("it is no regular file")
        with path.open("rb") as file:
            begin = file.read(8)
            [num_bytes] = unpack("<Q", begin) if len(begin) == 8 else [MAX_HEADER_BYTES + 1]
            if num_bytes > MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {num_bytes} bytes")
            header = json.loads(file.read(num_bytes))
            there = file.seek(0, SEEK_END)
        header.pop("__metadata__", None)
        ends = (int(entry["data_offsets"][1]) for entry in header.values())
        expected = 8 + num_bytes + max(ends, default=0)
        if there < expected:
            raise ValueError(f"it is cut: {there} bytes are there, {expected} are expected")
        return {
            name: Info(str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in header.items()
        }
    except _FAULTS as error:
        raise ModelError(f"{path}: not a readable safetensors file: {error}") from None


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
WEIGHT = ".weight"
STORED_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them


class Safetensors:
    """See luceasync.models.formats.Format."""

    def is_at(self, model_dir: Path) -> bool:
        """See Format."""
        return (model_dir / INDEX).exists() or (model_dir / SINGLE).exists()

    def weight_files(self, model_dir: Path) -> list[Path]:
        """See Format."""
        return weight_files(model_dir)

    def encodings(self, model_dir: Path) -> Callable[[str], Encoding]:
        """See Format."""
        scheme = scheme_at(model_dir)
        if scheme is None:
            return lambda name: DenseEncoding()
        modules = Modules(scheme, infos_of(model_dir), model_dir)
        return lambda name: found.form if (found := modules.find(name)) else DenseEncoding()

    def check(self, model_dir: Path, shapes: Mapping[str, Shape]) -> None:
        """See Format."""
        infos = infos_of(model_dir)
        modules = Modules(scheme_at(model_dir), infos, model_dir)
        for name, shape in shapes.items():
            if (found := modules.find(name)) is None:
                check_plain(model_dir, name, infos.get(name), shape)
            else:
                check_stored(model_dir, name, found.shape, shape)

    def open(self, model_dir: Path) -> AbstractContextManager[Checkpoint]:
        """See Format."""
        return open_checkpoint(model_dir)


class Modules:
    """What of a checkpoint is quantised."""

    def __init__(self, scheme: Scheme | None, infos: Infos, model_dir: Path) -> None:
        self._scheme = scheme
        self._infos = infos
        self._model_dir = model_dir

    def find(self, name: str) -> Found | None:
        """The quantised matrix that `name` would be; None: a plain tensor. Raises ModelError."""
        if self._scheme is None or not name.endswith(WEIGHT):
            return None
        try:
            return self._scheme.find(name.removesuffix(WEIGHT), self._infos)
        except ModelError as error:
            raise ModelError(f"{self._model_dir}: {error}") from None


class Checkpoint:
    """A TensorSource: the files of one directory. Use `open_checkpoint`."""

    def __init__(self, model_dir: Path, files: Mapping[str, Any], modules: Modules) -> None:
        self._model_dir = model_dir
        self._files = files  # tensor name -> open safetensors file
        self._modules = modules

    @property
    def names(self) -> list[str]:
        """Of all tensors that are stored."""
        return list(self._files)

    def encoding(self, name: str) -> Encoding:
        """See luceasync.models.loader.TensorSource."""
        found = self._modules.find(name)
        return DenseEncoding() if found is None else found.form

    def read(self, name: str, shape: Shape) -> Tensor | StoredModule:
        """See luceasync.models.loader.TensorSource."""
        found = self._modules.find(name)
        if found is None:
            return self.plain(name, shape)
        check_stored(self._model_dir, name, found.shape, shape)
        try:
            tensors = {key: self._files[own].get_tensor(own) for key, own in found.names.items()}
        except SafetensorError as error:
            raise ModelError(f"{self._model_dir}: {name!r} cannot be read: {error}") from None
        return StoredModule(name, found, tensors)

    def plain(self, name: str, shape: Shape) -> Tensor:
        """A tensor that is stored as it is. Raises ModelError."""
        file, info = self._files.get(name), None
        try:
            if file is not None:
                stored = file.get_slice(name)
                info = Info(stored.get_dtype(), tuple(stored.get_shape()))
            check_plain(self._model_dir, name, info, shape)
            tensor: Tensor = self._files[name].get_tensor(name)
            return tensor
        except SafetensorError as error:
            raise ModelError(f"{self._model_dir}: {name!r} cannot be read: {error}") from None


def infos_of(model_dir: Path) -> dict[str, Info]:
    """What the headers of all files say. Raises ModelError."""
    return {k: v for path in weight_files(model_dir) for k, v in read_infos(path).items()}


def check_plain(model_dir: Path, name: str, info: Info | None, shape: Shape) -> None:
    """Whether a tensor of plain numbers is there as it is wanted. Raises ModelError."""
    if info is None:
        raise ModelError(f"{model_dir}: the weights have no tensor {name!r}")
    check_stored(model_dir, name, info.shape, shape)
    if info.dtype not in STORED_DTYPES:  # quantized values, whose scales we would not apply
        raise ModelError(
            f"{model_dir}: {name!r} is stored as {info.dtype}; "
            f"{', '.join(STORED_DTYPES)} are supported"
        )


def check_stored(model_dir: Path, name: str, found: Shape, shape: Shape) -> None:
    """Raises ModelError where the shapes differ."""
    if found != shape:
        raise ModelError(f"{model_dir}: {name!r} has shape {found}, expected {shape}")


@contextmanager
def open_checkpoint(model_dir: Path) -> Iterator[Checkpoint]:
    """Open every weight file of `model_dir` (mapped, not read). Raises ModelError."""
    scheme = scheme_at(model_dir)
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        infos: dict[str, Info] = {}
        for path in weight_files(model_dir):
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path}: not a readable safetensors file: {error}") from None
            files.update(dict.fromkeys(file.keys(), file))
            if scheme is not None:
                infos |= read_infos(path)
        yield Checkpoint(model_dir, files, Modules(scheme, infos, model_dir))


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
