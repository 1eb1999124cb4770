"""A format of weights of its own, made here: nothing else has to know of it.

A matrix is bytes and a scale for each row; it stays so where it runs, and is multiplied from there.
Norms are plain numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from luceasync.config import Config, ModelConfig
from luceasync.errors import ModelError
from luceasync.models.encodings import (
    DenseEncoding,
    Encoding,
    NumbersInMemory,
    Select,
    Shape,
    WeightPlacement,
)
from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.formats import FORMATS
from luceasync.models.ops import TorchTable
from luceasync.models.precision import Precision
from luceasync.models.weights import InputNorm
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import make_plan
from luceasync.pipeline.report import plan_report
from tests import tiny
from tests.engines import ask, running, written

QUESTION = "to be or not to be, that is the question. " * 6
FILE = "model.bytes"
NUM_SPELLED = 256


@dataclass(frozen=True)
class Stored:
    """codes int8 [out, dim], scales float32 [out]."""

    codes: Tensor
    scales: Tensor


class BytesWeight(TorchTable):
    """A Table whose rows are made when they are wanted; `rows` [out, dim] are the codes."""

    def __init__(self, stored: Stored, dtype: torch.dtype) -> None:
        super().__init__(stored.codes)
        self._scales = stored.scales
        self._dtype = dtype

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + self._scales.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def linear(self, x: Tensor, norm: InputNorm | None = None) -> Tensor:
        x = x if norm is None else norm(x)
        return (x.float() @ self.rows.float().t() * self._scales).to(x.dtype)

    def lookup(self, ids: Tensor) -> Tensor:
        return (self.rows[ids].float() * self._scales[ids][..., None]).to(self._dtype)


class BytesStack:
    """See luceasync.models.encodings.Stack."""

    def __init__(self, shape: Shape, place: WeightPlacement) -> None:
        self._place = place
        codes = torch.empty(shape, dtype=torch.int8, device=place.device)
        self._stored = Stored(codes, torch.empty(shape[0], device=place.device))

    def fill(self, begin: int, stored: Stored, select: Select) -> int:
        codes, scales = select(stored.codes), select(stored.scales[:, None])
        self._stored.codes[begin : begin + len(codes)] = codes
        self._stored.scales[begin : begin + len(codes)] = scales[:, 0]
        return codes.nbytes + scales.nbytes

    def weight(self) -> BytesWeight:
        return BytesWeight(self._stored, self._place.dtype)

    table = weight


@dataclass(frozen=True)
class BytesEncoding:
    """See luceasync.models.encodings.Encoding."""

    def num_bytes(self, shape: Shape, precision: Precision) -> int:
        return shape[0] * shape[1] + 4 * shape[0]

    def type_name(self, shape: Shape, precision: Precision) -> str:
        return "bytes"

    def stack(self, shape: Shape, place: WeightPlacement) -> BytesStack:
        return BytesStack(shape, place)


class BytesSource:
    """See luceasync.models.loader.TensorSource."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def encoding(self, name: str) -> Encoding:
        assert name in self._tensors
        return BytesEncoding() if f"{name}.scales" in self._tensors else DenseEncoding()

    def read(self, name: str, shape: Shape) -> Tensor:
        found = self._tensors[name]
        if found.shape != shape:
            raise ModelError(f"{name}: {tuple(found.shape)}, expected {shape}")
        return found

    def stored(self, name: str, shape: Shape) -> Stored | NumbersInMemory:
        found = self.read(name, shape)
        scales = self._tensors.get(f"{name}.scales")
        return NumbersInMemory(name, found) if scales is None else Stored(found, scales)


class BytesEncodingat:
    """A Format."""

    def is_at(self, model_dir: Path) -> bool:
        return (model_dir / FILE).exists()

    def weights(self, model_dir: Path, scheme: object) -> BytesWeights:
        return BytesWeights(model_dir / FILE)


class BytesWeights:
    """A StoredWeights."""

    def __init__(self, path: Path) -> None:
        self.paths = [path]

    def encoding(self, name: str) -> Encoding:
        return self._source.encoding(name)

    def check(self, shapes: Mapping[str, Shape]) -> None:
        for name in shapes:
            self._source.encoding(name)

    def check_unused(self, shapes: Mapping[str, Shape]) -> None:
        """Nothing else is stored."""

    def is_tied(self, head: str, embedding: str) -> bool:
        return True  # a tied head is not stored

    @contextmanager
    def open(self) -> Iterator[BytesSource]:
        yield self._source

    @cached_property
    def _source(self) -> BytesSource:
        return BytesSource(load_file(self.paths[0]))


# --- a model in it, and the same numbers in plain ones ------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def known_format() -> Iterator[None]:
    """A place in the list."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("luceasync.models.formats.FORMATS", [BytesEncodingat(), *FORMATS])
        yield


@pytest.fixture(scope="module")
def dirs(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(in bytes, the same numbers in float32)."""
    in_bytes, plain = (tmp_path_factory.mktemp(f"{family}_{n}") for n in ("bytes", "plain"))
    for folder in (in_bytes, plain):
        tiny.save(tiny.build(family), folder)
    tensors, numbers = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name == "lm_head.weight":
            tensor[NUM_SPELLED:] = 0  # ids that no text has
        tensors[name] = numbers[name] = tensor
        if tensor.ndim == 2:
            scales = tensor.abs().amax(1).clamp(min=1e-6) / 127
            codes = (tensor / scales[:, None]).round().to(torch.int8)
            tensors |= {name: codes, f"{name}.scales": scales}
            numbers[name] = codes.float() * scales[:, None]
    save_file(tensors, in_bytes / FILE)
    (in_bytes / "model.safetensors").unlink()
    save_file(numbers, plain / "model.safetensors")
    return in_bytes, plain


def open_backend(model_dir: Path, num_shards: int) -> LayerSplitBackend:
    spec = read_spec(model_dir)
    plan = make_plan(
        spec,
        [offer_of(f"cpu:{i}", 2**33) for i in range(num_shards)],
        precision=Precision.of("fp32"),
        weights=None,
        parallel=2,
        max_ctx_tokens=256,
        prefill_chunk_tokens=64,
    )
    return LayerSplitBackend.open(ModelFiles(model_dir), plan)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_it_says_what_the_same_numbers_say(dirs: tuple[Path, Path], num_shards: int):
    prompt = [(7 * i) % 500 + 3 for i in range(70)]
    logits = []
    for folder in dirs:
        backend = open_backend(folder, num_shards)
        logits.append(backend.prefill(0, 0, prompt, project=True))
        backend.close()
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


def test_its_bytes_are_planned_as_they_are_stored(dirs: tuple[Path, Path]):
    in_bytes, plain = (
        sum(
            shard.shard.weight_bytes
            for shard in plan_report(Config(model=ModelConfig(folder, dtype="fp32"))).shards
        )
        for folder in dirs
    )
    assert in_bytes < 0.35 * plain
    sources = load_file(dirs[0] / FILE).values()
    assert in_bytes == sum(tensor.nbytes for tensor in sources)


@pytest.mark.slow
async def test_it_is_kept_and_taken_up_after_a_restart_under_another_split(
    dirs: tuple[Path, Path], tmp_path: Path
):
    in_bytes, plain = dirs
    async with running(in_bytes, tmp_path, shards=3) as engine:
        cold = await ask(engine, QUESTION, keep_prefix=True)
        await written(engine)
    async with running(in_bytes, tmp_path) as engine:
        again = await ask(engine, QUESTION)
    assert (again.finish.restore.tier, again.num_prefilled) == ("disk", 0)
    assert again.ids == cold.ids
    async with running(plain, tmp_path) as engine:
        other = await ask(engine, QUESTION)
    assert other.finish.restore.tier is None, "other files are another namespace"
