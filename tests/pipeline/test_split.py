"""A split changes where layers run and nothing else: the same bits, the same bytes, no leaks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from luceasync.errors import PlacementError, Unsupported
from luceasync.models.encodings import DenseEncoding, Encoding
from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.formats.safetensors import open_checkpoint
from luceasync.models.precision import Precision
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import make_plan
from luceasync.pipeline.shard import Shard
from luceasync.pipeline.stage import LocalStage
from luceasync.pipeline.transfer import choose_transfer, direct, staged
from tests import tiny

NUM_LAYERS = 8
NUM_LIVES = 6
SPLITS = {
    "2 even": (1, 1),
    "2 uneven": (0.1, 0.9),
    "3 even": (1, 1, 1),
    "3 uneven": (0.08, 0.46, 0.46),
    "5 even": (1, 1, 1, 1, 1),
    "5 uneven": (5, 1, 1, 2, 3),
}
SHUFFLED = [5, 2, 7, 0, 3, 6, 1, 4]


@pytest.fixture(scope="module")
def deep_dir(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.build(family, NUM_LAYERS)
    return tiny.save(model, tmp_path_factory.mktemp(f"deep_{family}"))


def prompt(seed: int, num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny.VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


def run(backend: LayerSplitBackend, chunk: int = 64) -> Tensor:
    """Logits of three prompts in chunks, then of decode steps of all lanes."""
    seen = []
    lanes = {0: prompt(0, 130), 1: prompt(1, 5), 3: prompt(3, 70)}
    lanes = {lane: ids for lane, ids in lanes.items() if lane < backend.plan.parallel}
    for lane, ids in lanes.items():
        backend.reset(lane)
        for begin in range(0, len(ids), chunk):
            seen.append(backend.prefill(lane, begin, ids[begin : begin + chunk], project=True))
    for step in range(8):
        positions = [len(ids) + step for ids in lanes.values()]
        logits = backend.decode(list(lanes), positions, [step + lane for lane in lanes]).whole()
        seen.extend(logits.clone())
    return torch.stack(seen)


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("split", SPLITS)
def test_every_split_gives_the_same_bits(deep_dir: Path, make_backend, split: str):
    weights = SPLITS[split]
    whole = run(make_backend(deep_dir))
    divided = run(make_backend(deep_dir, num_shards=len(weights), weights=weights))
    assert torch.equal(divided, whole)


OPTIONS = {
    "page order": {"page_order": SHUFFLED},
    "one lane": {"parallel": 1},
    "six lanes": {"parallel": 6},
    "another context": {"max_ctx_tokens": 200},
    "page order, two lanes": {"page_order": SHUFFLED, "parallel": 2},
}


@pytest.mark.slow
@pytest.mark.covered(2)
@pytest.mark.parametrize("chunk", [63, 128])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_holds_on_every_shard(deep_dir: Path, make_backend, options: dict, chunk: int):
    whole = run(make_backend(deep_dir, **options), chunk)
    divided = make_backend(deep_dir, num_shards=3, weights=(1, 2, 1), **options)
    assert torch.equal(run(divided, chunk), whole)


@pytest.mark.slow
def test_reset_reaches_every_shard(deep_dir: Path, make_backend):
    backend = make_backend(deep_dir, num_shards=3)
    first = run(backend)
    assert torch.equal(run(backend), first)


@pytest.mark.slow
def test_tied_embeddings_are_held_by_both_ends(family: str, tmp_path: Path, make_backend):
    folder = tiny.save(tiny.build(family, NUM_LAYERS, tied=True), tmp_path)
    assert torch.equal(run(make_backend(folder, num_shards=2)), run(make_backend(folder)))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_loading_holds_one_stored_tensor_beside_the_model(deep_dir: Path, num_shards: int):
    """A source that counts the tensors it returned that are still alive."""
    alive: list[weakref.ref] = []
    most = 0

    def counted(tensor: Tensor) -> Tensor:
        nonlocal most
        alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    class Counting:
        def __init__(self, checkpoint) -> None:
            self._checkpoint = checkpoint

        def encoding(self, name: str) -> Encoding:
            return DenseEncoding()

        def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
            return counted(self._checkpoint.read(name, shape))

        def stored(self, name: str, shape: tuple[int, ...]) -> Pieces:
            return Pieces(self._checkpoint.stored(name, shape))

    class Pieces:
        def __init__(self, stored) -> None:
            self.label = stored.label
            self._stored = stored

        def numbers(self, select, place) -> Iterator[Tensor]:
            for piece in self._stored.numbers(select, place):
                yield counted(piece)

    spec = read_spec(deep_dir)
    plan = _plan(deep_dir, num_shards)
    with open_checkpoint(deep_dir) as checkpoint:
        stage = LocalStage(spec, plan, Counting(checkpoint))
    assert sum(ref() is not None for ref in alive) == 0
    assert most == 1
    stage.close()


@pytest.mark.covered(0)
@pytest.mark.slow
def test_many_lives_leave_nothing_behind(deep_dir: Path):
    shards: list[weakref.ref] = []
    plan = _plan(deep_dir, 3)
    for _ in range(NUM_LIVES):
        backend = LayerSplitBackend.open(ModelFiles(deep_dir), plan)
        shards.extend(weakref.ref(shard) for shard in backend._stages[0]._shards)
        run(backend)
        backend.close()
        backend.close()
        del backend
    gc.collect()
    assert len(shards) == 3 * NUM_LIVES
    assert not any(ref() for ref in shards)


@pytest.mark.slow
def test_a_failure_half_way_leaves_nothing_behind(deep_dir: Path, monkeypatch):
    made: list[weakref.ref] = []
    original = Shard.__init__

    def failing(self, *args, **kwargs) -> None:
        if len(made) == 2:
            raise MemoryError("the third shard does not fit")
        original(self, *args, **kwargs)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Shard, "__init__", failing)
    with pytest.raises(MemoryError):
        LayerSplitBackend.open(ModelFiles(deep_dir), _plan(deep_dir, 3))
    gc.collect()
    assert not any(ref() for ref in made)


def _plan(model_dir: Path, num_shards: int):
    return make_plan(
        read_spec(model_dir),
        [offer_of(f"cpu:{i}", 2**33) for i in range(num_shards)],
        precision=Precision.of("fp32"),
        weights=None,
        parallel=4,
        max_ctx_tokens=512,
        prefill_chunk_tokens=None,
    )


@pytest.mark.parametrize("keep_ratio", [0.0, -0.5, 1.01, float("nan"), float("inf")])
def test_a_keep_ratio_is_checked_before_an_adapter_sees_it(tiny_dir, make_backend, keep_ratio):
    with pytest.raises(ValueError, match="keep_ratio"):
        make_backend(tiny_dir).compress([1, 2, 3], keep_ratio)


def test_a_family_without_compression_says_so(tiny_dir, make_backend, family):
    with pytest.raises(Unsupported, match=f"not supported for models of family {family}"):
        make_backend(tiny_dir).compress([1, 2, 3], 0.5)


def _gpus(*indices: int) -> Sequence[torch.device]:
    return [torch.device("cuda", index) for index in indices]


def test_peer_access_is_taken_where_it_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    assert choose_transfer("auto", _gpus(0, 1)) is direct
    assert choose_transfer("off", _gpus(0, 1)) is staged


def test_peer_access_that_is_not_there_is_staged_or_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    assert choose_transfer("auto", _gpus(0, 1)) is staged
    assert choose_transfer("on", _gpus(0, 0)) is direct  # no copy between GPUs
    with pytest.raises(PlacementError, match=r"--peer-access on: cuda:0 cannot reach cuda:1"):
        choose_transfer("on", _gpus(0, 1))
