"""Weights in safetensors files of a Hugging Face directory: a single file, or those listed in an
index.

Knows the names, shapes and dtypes of stored tensors, but not what they are for.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from math import prod
from os import SEEK_END
from pathlib import Path
from struct import unpack
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from luceasync.errors import ModelError
from luceasync.gguf.paths import FileIdentity, identity_of
from luceasync.models.encodings import (
    DenseEncoding,
    Encoding,
    NumbersInFile,
    Shape,
    StoredRows,
    WeightFile,
    check_finite,
)
from luceasync.models.quant.checkpoints.module import (
    ModuleTensors,
    QuantMatrix,
    Scheme,
    TensorInfo,
    TensorInfos,
)
from luceasync.models.quant.checkpoints.scheme import scheme_at

if TYPE_CHECKING:
    import torch
    from torch import Tensor


MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
# What parsing an arbitrary header can raise: it may be nested too deeply, or contain huge numbers.
_FAULTS = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError),
    *(RecursionError, OverflowError),
)


def read_infos(path: Path) -> dict[str, TensorInfo]:
    """The dtype and shape of each tensor. Does not use the safetensors library, which would load
    torch. Raises ModelError, also for a truncated file."""
    return _read_header(path)[0]


def _read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, range]]:
    """The dtype and shape of each tensor, and where its bytes are in the file."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise ValueError("it is not a regular file")
        with path.open("rb") as file:
            begin = file.read(8)
            [num_bytes] = unpack("<Q", begin) if len(begin) == 8 else [MAX_HEADER_BYTES + 1]
            if num_bytes > MAX_HEADER_BYTES:
                raise ValueError(f"its header claims {num_bytes} bytes")
            header = json.loads(file.read(num_bytes))
            there = file.seek(0, SEEK_END)
        header.pop("__metadata__", None)
        ends = (int(entry["data_offsets"][1]) for entry in header.values())
        expected = 8 + num_bytes + max(ends, default=0)
        if there < expected:
            raise ValueError(f"truncated: it has {there} bytes, expected {expected}")
        infos = {
            name: TensorInfo(str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in header.items()
        }
        places = {
            name: range(*(8 + num_bytes + int(offset) for offset in entry["data_offsets"]))
            for name, entry in header.items()
        }
        return infos, places
    except _FAULTS as error:
        raise ModelError(f"{path}: not a readable safetensors file: {error}") from None


def _stored_bytes(path: Path, name: str) -> Iterator[bytes]:
    """The bytes of a tensor, piece by piece. Raises ModelError."""
    place = _read_header(path)[1][name]
    try:
        with path.open("rb") as file:
            file.seek(place.start)
            for begin in range(place.start, place.stop, PIECE_BYTES):
                yield file.read(min(PIECE_BYTES, place.stop - begin))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {name!r} cannot be read: {error}") from None


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
WEIGHT = ".weight"
PIECE_BYTES = 1 << 20
# Parts that are not served, constants that are computed, and a tied head, which is compared with
# the embedding when the spec is read.
NOT_READ = re.compile(
    r"(model\.)?(mtp|visual|(vision|audio)_tower|embed_(vision|audio)|multi_modal_projector)\..*"
    r"|.*\.rotary_emb\.inv_freq|lm_head\.weight",
    re.DOTALL,
)
# Stored beside a quantised matrix: scales of activations and of a quantised KV cache, neither of
# which is quantised here; an order of columns that equals the stored one; a shape that is
# redundant.
BESIDE_MATRIX = (
    *("g_idx", "weight_shape", "input_scale", "input_global_scale", "input_scale_ub"),
    *("output_scale", "k_scale", "v_scale"),
)
CACHE_SCALES = (".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".prob_scale")
IF_ZERO = (".bias", ".weight_zero_point", ".input_zero_point")  # only then may these be ignored
STORED_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FusedPart:
    """A matrix among those of all experts, which are stored as one tensor [experts, rows, columns]:
    `part` of `num_parts` of each expert's rows.
    """

    tensor: str
    expert: int
    part: int
    num_parts: int

    @classmethod
    def of(cls, name: str) -> FusedPart | None:
        """Where an expert's matrix `name` is if it is fused with others; None for other tensors."""
        if (found := EXPERT.fullmatch(name)) is None:
            return None
        experts, expert, kind = found[1], int(found[2]), found[3]
        if kind == "down":
            return cls(f"{experts}.down_proj", expert, 0, 1)
        return cls(f"{experts}.gate_up_proj", expert, ("gate", "up").index(kind), 2)

    def shape(self, num_experts: int, own: Shape) -> Shape:
        """The shape of the fused tensor, given the shape of a part."""
        return (num_experts, self.num_parts * own[0], *own[1:])


class Safetensors:
    """The Format of a Hugging Face directory."""

    def is_at(self, model_dir: Path) -> bool:
        return (model_dir / INDEX).exists() or (model_dir / SINGLE).exists()

    def weights(self, model_dir: Path, scheme: Scheme | None) -> SafetensorsWeights:
        return SafetensorsWeights(model_dir, scheme)


class SafetensorsWeights:
    """The StoredWeights of a Hugging Face directory."""

    def __init__(self, model_dir: Path, scheme: Scheme | None) -> None:
        self._model_dir = model_dir
        self._scheme = scheme
        self._identities: dict[Path, FileIdentity | None] = {}  # of files whose header is read
        self._files: dict[str, Path] = {}  # of each tensor, once its file's header is read

    @cached_property
    def paths(self) -> list[Path]:
        return weight_files(self._model_dir)

    def encoding(self, name: str) -> Encoding:
        found = self._modules.find(name)
        return DenseEncoding() if found is None else found.encoding

    def holds(self, name: str) -> bool:
        return name in self._infos or self._is_fused(name) or self._modules.find(name) is not None

    def check(self, shapes: Mapping[str, Shape]) -> None:
        infos, modules = self._infos, self._modules
        for name, shape in {**shapes, **self._fused(shapes)}.items():
            if (found := modules.find(name)) is not None:
                check_stored(self._model_dir, name, found.shape, shape)
            elif name in infos or not self._is_fused(name):
                check_plain(self._model_dir, name, infos.get(name), shape)

    def _fused(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """The shapes of tensors that hold the matrices of several experts."""
        parts = {name: FusedPart.of(name) for name in shapes if name not in self._infos}
        fused = {n: part for n, part in parts.items() if part and part.tensor in self._infos}
        numbers = Counter(part.tensor for part in fused.values() if not part.part)
        return {p.tensor: p.shape(numbers[p.tensor], shapes[n]) for n, p in fused.items()}

    def _is_fused(self, name: str) -> bool:
        part = FusedPart.of(name)
        return part is not None and part.tensor in self._infos

    def check_unused(self, shapes: Mapping[str, Shape]) -> None:
        used = {*shapes, *self._fused(shapes)}
        for name in shapes:
            if (found := self._modules.find(name)) is not None:
                module = name.removesuffix(WEIGHT)
                used.update(found.names.values(), (f"{module}.{last}" for last in BESIDE_MATRIX))
        for name in sorted(self._infos.keys() - used):
            if not self._says_nothing(name):
                raise ModelError(f"{self._model_dir}: no layer uses the tensor {name!r}")

    def is_tied(self, head: str, embedding: str) -> bool:
        infos, module = self._infos, head.removesuffix(WEIGHT)
        if not any(name.startswith(f"{module}.") for name in infos):
            return True
        if head not in infos or infos[head] != infos.get(embedding):
            return False
        pieces = (_stored_bytes(self._files[name], name) for name in (head, embedding))
        return all(one == other for one, other in zip_longest(*pieces))

    def _says_nothing(self, name: str) -> bool:
        """Whether the model computes the same without the stored tensor `name`."""
        if NOT_READ.fullmatch(name) or (self._scheme and name.endswith(CACHE_SCALES)):
            return True
        return name.endswith(IF_ZERO) and not any(
            piece.strip(b"\0") for piece in _stored_bytes(self._files[name], name)
        )

    @contextmanager
    def open(self) -> Iterator[Checkpoint]:
        weights = SafetensorsWeights(self._model_dir, self._scheme) if self._has_changed() else self
        with ExitStack() as stack:
            files: dict[str, Any] = {}
            places: dict[str, TensorPlace] = {}
            for path in weights.paths:
                try:
                    file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                except (OSError, SafetensorError) as error:
                    raise ModelError(f"{path}: not a readable safetensors file: {error}") from None
                files.update(dict.fromkeys(file.keys(), file))
                stack.callback((raw := WeightFile(path)).close)
                for name, place in _read_header(path)[1].items():
                    places[name] = TensorPlace(raw, place.start)
            yield Checkpoint(self._model_dir, files, places, weights._modules)

    def _has_changed(self) -> bool:
        return any(identity_of(path) != known for path, known in self._identities.items())

    @cached_property
    def _infos(self) -> TensorInfos:
        """The contents of the headers of all files."""
        infos: dict[str, TensorInfo] = {}
        for path in self.paths:
            identity = identity_of(path)
            own = read_infos(path)
            if twice := infos.keys() & own.keys():
                raise ModelError(
                    f"{path}: {min(twice)!r} is also in {self._files[min(twice)].name}"
                )
            infos |= own
            self._files |= dict.fromkeys(own, path)
            self._identities[path] = identity
        return infos

    @cached_property
    def _modules(self) -> QuantModules:
        # Without a scheme, a plan needs no headers, so the weights may be missing.
        return QuantModules(self._scheme, self._infos if self._scheme else {}, self._model_dir)


class QuantModules:
    """The quantised matrices of a checkpoint."""

    def __init__(self, scheme: Scheme | None, infos: TensorInfos, model_dir: Path) -> None:
        self._scheme = scheme
        self._infos = infos
        self._model_dir = model_dir

    def find(self, name: str) -> QuantMatrix | None:
        """The quantised matrix `name`; None if it is a plain tensor. Raises ModelError."""
        if self._scheme is None or not name.endswith(WEIGHT):
            return None
        try:
            return self._scheme.find(name.removesuffix(WEIGHT), self._infos)
        except ModelError as error:
            raise ModelError(f"{self._model_dir}: {error}") from None


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where the bytes of a tensor begin."""

    file: WeightFile
    begin: int


class Checkpoint:
    """A TensorSource: the open files of one directory."""

    def __init__(
        self,
        model_dir: Path,
        files: Mapping[str, Any],
        places: Mapping[str, TensorPlace],
        modules: QuantModules,
    ) -> None:
        self._model_dir = model_dir
        self._files = files  # tensor name -> open safetensors file
        self._places = places
        self._modules = modules

    @property
    def names(self) -> list[str]:
        """The names of all stored tensors."""
        return list(self._files)

    def encoding(self, name: str) -> Encoding:
        found = self._modules.find(name)
        return DenseEncoding() if found is None else found.encoding

    def names_of(self, name: str) -> list[str]:
        """The names under which the matrix `name` is stored if it is quantised, and those of
        tensors that may accompany it."""
        if (found := self._modules.find(name)) is None:
            return []
        module = name.removesuffix(WEIGHT)
        return [*found.names.values(), *(f"{module}.{last}" for last in BESIDE_MATRIX)]

    def stored(self, name: str, shape: Shape) -> NumbersInFile | ModuleTensors:
        found = self._modules.find(name)
        if found is None:
            part = None if name in self._places else FusedPart.of(name)
            if part is not None and part.tensor in self._places:
                return self._fused_numbers([part], shape)
            return self._numbers(name, shape)
        check_stored(self._model_dir, name, found.shape, shape)
        try:
            tensors = {key: self._files[own].get_tensor(own) for key, own in found.names.items()}
        except SafetensorError as error:
            raise ModelError(f"{self._model_dir}: {name!r} cannot be read: {error}") from None
        return ModuleTensors(self._label(name), found, tensors)

    def stored_together(
        self, names: Sequence[str], shape: Shape
    ) -> Iterator[tuple[int, NumbersInFile | ModuleTensors]]:
        parts = [part for name in names if (part := FusedPart.of(name)) is not None]
        is_fused = (
            len(parts) == len(names) and {part.tensor for part in parts} <= self._places.keys()
        )
        if is_fused and not any(name in self._places for name in names):
            yield len(names), self._fused_numbers(parts, shape)
        else:
            yield from ((1, self.stored(name, shape)) for name in names)

    def _fused_numbers(self, parts: Sequence[FusedPart], shape: Shape) -> NumbersInFile:
        """The rows of parts of one tensor, one after the other. Raises ModelError."""
        import torch

        first = parts[0]
        num_experts = self._files[first.tensor].get_slice(first.tensor).get_shape()[0]
        numbers = self._numbers(first.tensor, first.shape(num_experts, shape))
        begins = [(part.expert * part.num_parts + part.part) * shape[0] for part in parts]
        order = torch.tensor(begins)[:, None] + torch.arange(shape[0])
        row_bytes = numbers.rows.row_bytes // (first.num_parts * shape[0])
        rows = replace(numbers.rows, row_bytes=row_bytes, order=order.flatten())
        return replace(numbers, rows=rows, row_shape=shape[1:])

    def read(self, name: str, shape: Shape) -> Tensor:
        self._check(name, shape)
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{self._model_dir}: {name!r} cannot be read: {error}") from None
        check_finite(tensor, self._label(name))
        return tensor

    def _numbers(self, name: str, shape: Shape) -> NumbersInFile:
        """A matrix that is stored plainly. Raises ModelError."""
        dtype = _torch_dtypes()[self._check(name, shape)]
        place, row_bytes = self._places[name], prod(shape[1:]) * dtype.itemsize
        rows = StoredRows.of(place.file, place.begin, row_bytes, shape[0])
        return NumbersInFile(self._label(name), rows, dtype, shape[1:])

    def _check(self, name: str, shape: Shape) -> str:
        """The dtype of a tensor that is stored plainly, with this shape. Raises ModelError."""
        file, info = self._files.get(name), None
        try:
            if file is not None:
                stored = file.get_slice(name)
                info = TensorInfo(stored.get_dtype(), tuple(stored.get_shape()))
        except SafetensorError as error:
            raise ModelError(f"{self._model_dir}: {name!r} cannot be read: {error}") from None
        return check_plain(self._model_dir, name, info, shape)

    def _label(self, name: str) -> str:
        return f"{self._model_dir}: {name!r}"


def _torch_dtypes() -> dict[str, torch.dtype]:
    """By the names in STORED_DTYPES."""
    import torch

    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return dict(zip(STORED_DTYPES, dtypes, strict=True))


def check_plain(model_dir: Path, name: str, info: TensorInfo | None, shape: Shape) -> str:
    """The dtype of a plain tensor. Raises ModelError unless it exists with this shape."""
    if info is None:
        raise ModelError(f"{model_dir}: the weights have no tensor {name!r}")
    check_stored(model_dir, name, info.shape, shape)
    if info.dtype not in STORED_DTYPES:  # quantised numbers whose scales would be ignored
        raise ModelError(
            f"{model_dir}: {name!r} is stored as {info.dtype}; "
            f"{', '.join(STORED_DTYPES)} are supported"
        )
    return info.dtype


def check_stored(model_dir: Path, name: str, found: Shape, shape: Shape) -> None:
    """Raise ModelError unless the shapes agree."""
    if found != shape:
        raise ModelError(f"{model_dir}: {name!r} has shape {found}, expected {shape}")


def open_checkpoint(model_dir: Path) -> AbstractContextManager[Checkpoint]:
    """Open every weight file of `model_dir` (mapped, not read). Raises ModelError."""
    return SafetensorsWeights(model_dir, scheme_at(model_dir)).open()


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of `model_dir`: those of the index, or the single one."""
    index = model_dir / INDEX
    if not index.exists():
        single = model_dir / SINGLE
        if not single.exists():
            raise ModelError(
                f"{model_dir}: neither model.safetensors nor model.safetensors.index.json exists"
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
