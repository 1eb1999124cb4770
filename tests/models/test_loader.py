"""Weights are checked, then read once, where they are needed, in the requested dtype."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from luceasync.errors import ModelError, Unavailable
from luceasync.host_cache.arena import PlainMemory
from luceasync.models import encodings
from luceasync.models.encodings import (
    Encoding,
    HostTransfer,
    StoredRows,
    WeightFile,
    WeightPlacement,
)
from luceasync.models.files import read_spec
from luceasync.models.formats.safetensors import open_checkpoint
from luceasync.models.layer_reader import TensorPart
from luceasync.models.loader import RandomSource, TensorReader, TensorSource
from luceasync.models.ops import TorchOps
from luceasync.models.precision import Precision
from luceasync.models.spec import Shape
from luceasync.pipeline.cpu_platform import CpuPlatform
from luceasync.pipeline.gpu_platform import TRANSIT_BYTES, CudaPlatform
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import Plan, make_plan
from luceasync.pipeline.shard import Shard
from tests.pipeline import plans
from tests.pipeline.specs import make_spec

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


class NotingSource:
    """Reads from the source inside, and records the names."""

    def __init__(self, inner: TensorSource) -> None:
        self.inner, self.names = inner, set[str]()

    def encoding(self, name: str) -> Encoding:
        return self.inner.encoding(name)

    def read(self, name: str, shape: Shape) -> Tensor:
        self.names.add(name)
        return self.inner.read(name, shape)

    def stored(self, name: str, shape: Shape) -> object:
        self.names.add(name)
        return self.inner.stored(name, shape)


def write_index(folder: Path, weight_map: object) -> Path:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def two_files(tmp_path: Path) -> Path:
    """Two shards: `a` [2, 3] in the first, `b` [4] in the second."""
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.arange(4.0)}, tmp_path / "two.safetensors")
    return write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})


def reader_of(folder: Path, dtype: torch.dtype, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`m0`, `m1` stacked as a matrix and `v` as a vector, from a checkpoint with `tensors`."""
    save_file(tensors, folder / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with open_checkpoint(folder) as checkpoint:
        reader = TensorReader(checkpoint, None, WeightPlacement(TorchOps(), CPU, dtype))
        return {
            "matrix": reader.stacked([TensorPart("m0"), TensorPart("m1")], shapes).rows,
            "vector": reader.vector("v", shapes["v"], offset=1.0),
        }


# --- files --------------------------------------------------------------------------------------


def test_a_single_file_is_read(tmp_path: Path):
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("a", (2, 3)), torch.arange(6.0).view(2, 3))


def test_the_files_of_an_index_are_one_checkpoint(two_files: Path):
    with open_checkpoint(two_files) as checkpoint:
        assert torch.equal(checkpoint.read("a", (2, 3)), torch.arange(6.0).view(2, 3))
        assert torch.equal(checkpoint.read("b", (4,)), torch.arange(4.0))


def test_a_sharded_model_is_the_single_one(tiny_dir: Path, tmp_path: Path):
    whole = load_file(tiny_dir / "model.safetensors")
    files = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(sorted(whole))}
    for file in set(files.values()):
        save_file({n: t for n, t in whole.items() if files[n] == file}, tmp_path / file)
    with open_checkpoint(write_index(tmp_path, files)) as checkpoint:
        for name, tensor in whole.items():
            assert torch.equal(checkpoint.read(name, tuple(tensor.shape)), tensor)


def test_a_file_that_the_index_names_must_be_there(two_files: Path):
    (two_files / "two.safetensors").unlink()
    with (
        pytest.raises(ModelError, match=r"two\.safetensors: not a readable"),
        open_checkpoint(two_files),
    ):
        pass


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(64)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with (
        pytest.raises(ModelError, match=r"model\.safetensors: not a readable"),
        open_checkpoint(tmp_path),
    ):
        pass


def test_garbage_is_refused(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 500)
    with (
        pytest.raises(ModelError, match="not a readable safetensors file"),
        open_checkpoint(tmp_path),
    ):
        pass


# --- tensors ------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named(two_files: Path):
    with open_checkpoint(two_files) as checkpoint, pytest.raises(ModelError, match="no tensor 'c'"):
        checkpoint.read("c", (1,))


@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 3, 1), ()])
def test_a_wrong_shape_is_refused_with_the_expected_one(two_files: Path, shape: Shape):
    with open_checkpoint(two_files) as checkpoint, pytest.raises(ModelError) as caught:
        checkpoint.read("a", shape)
    assert f"'a' has shape (2, 3), expected {shape}" in str(caught.value)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_matrices_are_stacked_in_the_wanted_dtype_and_vectors_are_float32(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
):
    m0, m1, v = (torch.randn(*shape).to(stored) for shape in [(2, 3), (1, 3), (5,)])
    found = reader_of(tmp_path, wanted, {"m0": m0, "m1": m1, "v": v})
    assert found["matrix"].dtype == wanted and found["vector"].dtype == torch.float32
    assert torch.equal(found["matrix"], torch.cat([m0, m1]).to(wanted))
    assert torch.equal(found["vector"], v.float() + 1.0)


@pytest.mark.parametrize(
    ("stored", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.bool, "BOOL")]
)
def test_quantized_values_are_refused(tmp_path: Path, stored: torch.dtype, name: str):
    tensors = {key: torch.ones(2, 2).to(stored) for key in ("m0", "m1", "v")}
    with pytest.raises(ModelError, match=f"'m0' is stored as {name}; F64, .* are supported"):
        reader_of(tmp_path, torch.float32, tensors)


# --- what a shard reads -------------------------------------------------------------------------


def plan_of(model_dir: Path) -> Plan:
    return make_plan(
        read_spec(model_dir),
        [offer_of(f"cpu:{i}", 2**33) for i in range(3)],
        precision=Precision.of("fp32"),
        weights=(1, 2, 1),
        parallel=1,
        max_ctx_tokens=64,
        prefill_chunk_tokens=None,
    )


def wanted_bytes(model_dir: Path, layers: range, ends: tuple[str, ...]) -> dict[str, int]:
    """The tensors of a range and their stored bytes."""
    prefixes = tuple(f"model.layers.{layer}." for layer in layers) + ends
    stored = load_file(model_dir / "model.safetensors")
    return {name: t.nbytes for name, t in stored.items() if name.startswith(prefixes)}


@pytest.mark.parametrize(
    ("index", "layers", "ends"),
    [
        (0, range(0, 1), ("model.embed_tokens.",)),
        (1, range(1, 3), ()),
        (2, range(3, 4), ("model.norm.", "lm_head.")),
    ],
)
def test_only_the_tensors_of_the_range_are_read_and_each_byte_is_reported_once(
    tiny_dir: Path, index, layers, ends
):
    read: list[int] = []
    plan = plan_of(tiny_dir)
    with open_checkpoint(tiny_dir) as checkpoint:
        source = NotingSource(checkpoint)
        shard = Shard(
            read_spec(tiny_dir),
            plan,
            plan.shards[index],
            CpuPlatform(),
            source,
            read.append,
            memory=PlainMemory(),
        )
    shard.close()
    wanted = wanted_bytes(tiny_dir, layers, ends)
    assert source.names == set(wanted)
    assert sum(read) == sum(wanted.values())


def test_progress_counts_the_bytes_that_are_stored_not_those_made_of_them(tmp_path: Path):
    tensors = {"m": torch.ones(3, 5).double(), "v": torch.ones(7).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors")
    read: list[int] = []
    with open_checkpoint(tmp_path) as checkpoint:
        place = WeightPlacement(TorchOps(), CPU, torch.float32)
        reader = TensorReader(checkpoint, None, place, read.append)
        reader.stacked([TensorPart("m")], {"m": (3, 5)})
        reader.vector("v", (7,))
    assert read == [3 * 5 * 8, 7 * 2]


class ThreeAtOnce(CpuPlatform):
    """Reads three layers at once."""

    def num_layers_at_once(self, room_bytes: int) -> int:
        return 3


class MeetingSource(NotingSource):
    """Holds the first norm of each layer until three layers have asked for theirs."""

    def __init__(self, inner: TensorSource, fault: str = "") -> None:
        super().__init__(inner)
        self.meet, self.fault = threading.Barrier(3), fault

    def read(self, name: str, shape: Shape) -> Tensor:
        if name.endswith(".input_layernorm.weight"):
            self.meet.wait(timeout=30)
        if name == self.fault:
            raise ModelError(f"{name} is damaged")
        return super().read(name, shape)


def plan_of_six_layers() -> Plan:
    return plans.plan_of(spec=make_spec(num_layers=6), parallel=1, max_ctx_tokens=256)


def six_layers(
    source: TensorSource, advance: Callable[[int], None], platform: CpuPlatform
) -> Shard:
    spec, plan = make_spec(num_layers=6), plan_of_six_layers()
    return Shard(spec, plan, plan.shards[0], platform, source, advance, memory=PlainMemory())


def numbers_of(shard: Shard) -> list[Tensor]:
    """A result of each layer, which depends on all of its weights."""
    x, found = torch.arange(256.0).view(1, 1, 256).sin(), []
    for layer in shard._layers:
        x = layer.feed_forward.forward(x)
        found.append(x)
    return found


def test_layers_read_at_once_are_those_read_one_by_one():
    random = RandomSource(torch.float32, CPU)
    read: list[int] = []
    expected = six_layers(random, read.append, CpuPlatform())
    in_threads: list[int] = []
    shard = six_layers(MeetingSource(random), in_threads.append, ThreeAtOnce())
    for one, other in zip(numbers_of(shard), numbers_of(expected), strict=True):
        assert torch.equal(one, other)
    assert sum(in_threads) == sum(read)


def test_a_damaged_layer_among_those_read_at_once_is_the_error():
    fault = "model.layers.4.post_attention_layernorm.weight"
    source = MeetingSource(RandomSource(torch.float32, CPU), fault)
    with pytest.raises(ModelError, match=f"{fault} is damaged"):
        six_layers(source, lambda num_bytes: None, ThreeAtOnce())


def test_loading_that_is_stopped_leaves_no_thread_behind():
    def stop(num_bytes: int) -> None:
        raise Unavailable("The server is shutting down.")

    with pytest.raises(Unavailable):
        six_layers(RandomSource(torch.float32, CPU), stop, ThreeAtOnce())
    assert not any(thread.name.startswith("read-layers") for thread in threading.enumerate())


class NotingRoom(CpuPlatform):
    """Notes how much memory layers in transit may take."""

    room_bytes = 0

    def num_layers_at_once(self, room_bytes: int) -> int:
        self.room_bytes = room_bytes
        return 1


def test_layers_in_transit_take_memory_that_is_planned_for_lanes_and_passes():
    platform, plan = NotingRoom(), plan_of_six_layers()
    shard = six_layers(RandomSource(torch.float32, CPU), lambda num_bytes: None, platform)
    weight_bytes = sum(layer.num_bytes for layer in shard._layers) + shard.ends.num_bytes
    planned_bytes = plan.device_bytes(plan.shards[0]) + plan.shards[0].workspace_bytes
    assert platform.room_bytes + weight_bytes == planned_bytes


@pytest.mark.parametrize(("room", "expected"), [(0, 1), (1, 1), (2, 2), (2.9, 2), (9, 4)])
def test_a_gpu_reads_as_many_layers_at_once_as_fit_there(room: float, expected: int):
    platform = CudaPlatform("cuda:0")
    assert platform.num_layers_at_once(int(room * TRANSIT_BYTES)) == expected


# --- rows of files ------------------------------------------------------------------------------

NUM_ROWS, ROW_BYTES, BEGIN = 300, 7, 11
ORDERS = {
    "as stored": torch.arange(NUM_ROWS),
    "runs": torch.arange(NUM_ROWS).view(3, 2, 50)[:, 1].flatten(),
    "neighbours swapped": torch.arange(NUM_ROWS).view(-1, 2).flip(1).flatten(),
    "far apart": torch.tensor([299, 0, 150, 150, 7]),
}


@pytest.fixture
def file_of_rows(tmp_path: Path) -> Iterator[tuple[WeightFile, Tensor]]:
    """A file with rows from BEGIN on, and the rows."""
    rows = torch.randint(0, 256, (NUM_ROWS, ROW_BYTES), dtype=torch.uint8)
    (tmp_path / "rows").write_bytes(b"x" * BEGIN + rows.numpy().tobytes())
    with closing(WeightFile(tmp_path / "rows")) as file:
        yield file, rows


@pytest.mark.parametrize("run_bytes", [0, 1 << 16])
@pytest.mark.parametrize("piece_bytes", [1, 7 * ROW_BYTES + 3, 1 << 16])
@pytest.mark.parametrize("order", ORDERS)
def test_rows_arrive_in_order_whatever_a_piece_holds(
    file_of_rows: tuple[WeightFile, Tensor],
    order: str,
    piece_bytes: int,
    run_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
):
    """`run_bytes`: 0 reads each run of rows alone; otherwise with the rows between them."""
    monkeypatch.setattr(encodings, "RUN_BYTES", run_bytes)
    file, rows = file_of_rows
    stored = StoredRows.of(file, BEGIN, ROW_BYTES, NUM_ROWS).selected(
        lambda each: each[ORDERS[order]]
    )
    with closing(HostTransfer(piece_bytes)) as transfer:
        for _ in range(2):
            found = torch.cat([piece.clone() for piece in transfer.pieces(stored)])
            assert torch.equal(found, rows[ORDERS[order]])


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice")
def test_the_system_is_asked_once_for_what_follows(
    file_of_rows: tuple[WeightFile, Tensor], monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(encodings, "AHEAD_BYTES", 100)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, size, kind: asked.append((at, size)))
    file, _ = file_of_rows
    for begin in (0, 10, 20, 80, 90, 1000, 20):
        file.read_into(memoryview(bytearray(10)), begin)
    assert asked == [(10, 100), (110, 80), (1010, 100), (30, 100)]


def test_a_file_that_ends_early_is_an_error_that_names_it(
    file_of_rows: tuple[WeightFile, Tensor],
):
    file, _ = file_of_rows
    os.truncate(file.path, BEGIN + 100 * ROW_BYTES)
    stored = StoredRows.of(file, BEGIN, ROW_BYTES, NUM_ROWS)
    with closing(HostTransfer(10 * ROW_BYTES)) as transfer:
        with pytest.raises(ModelError, match=r"rows: cannot be read: it ends at byte 711"):
            list(transfer.pieces(stored))
        again = StoredRows.of(file, BEGIN, ROW_BYTES, 100)
        assert sum(map(len, transfer.pieces(again))) == 100


def test_what_is_wrong_with_a_tensor_is_known_once_all_are_read(tmp_path: Path):
    fine, wrong = torch.ones(3, 5), torch.ones(3, 5)
    wrong[1, 2] = torch.inf
    save_file({"a": fine, "b": wrong, "c": fine.clone()}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        place = WeightPlacement(TorchOps(), CPU, torch.float32)
        reader = TensorReader(checkpoint, None, place)
        for name in "abc":
            reader.stacked([TensorPart(name)], {name: (3, 5)})
    with pytest.raises(ModelError, match=r"'b' has a number that is not finite"):
        place.findings.raise_fault()
    place.findings.raise_fault()  # once


# --- random weights -----------------------------------------------------------------------------


def test_random_weights_follow_from_the_seed():
    def read(seed: int) -> list[Tensor]:
        source = RandomSource(torch.float32, CPU, seed)
        return [source.read("m", (4, 6)), source.read("v", (6,))]

    assert all(torch.equal(a, b) for a, b in zip(read(1), read(1), strict=True))
    assert not torch.equal(read(1)[0], read(2)[0])


def test_random_weights_are_the_same_in_whatever_order_they_are_read():
    """So several processes may read the shards of a model."""
    names = ["a", "b", "c"]
    forwards, backwards = RandomSource(torch.float32, CPU), RandomSource(torch.float32, CPU)
    first = {name: forwards.read(name, (4, 6)) for name in names}
    second = {name: backwards.read(name, (4, 6)) for name in reversed(names)}
    assert all(torch.equal(first[name], second[name]) for name in names)
    assert not torch.equal(first["a"], first["b"])


def test_random_matrices_keep_the_size_of_what_they_multiply():
    source = RandomSource(torch.bfloat16, CPU)
    matrix = source.read("m", (512, 256))
    assert matrix.dtype == torch.bfloat16
    out = matrix.float() @ torch.ones(256)
    assert 0.8 < out.std() < 1.2
