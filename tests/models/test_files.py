"""Each header of a model is read once, and again only if a file has changed before it is opened."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from luceasync.cli.serve import check_load
from luceasync.config import Config, EngineConfig, ModelConfig
from luceasync.engine.start import build_engine
from luceasync.gguf import model as gguf_model
from luceasync.models.files import ModelFiles
from luceasync.models.formats import safetensors
from tests import tiny
from tests.engines import ask
from tests.gguf.tiny_files import Tiny, write


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the header of each file was read, by the file's name."""
    found: Counter[str] = Counter()

    def counted(module: object, name: str) -> None:
        read = getattr(module, name)

        def count(path: Path) -> object:
            found[path.name] += 1
            return read(path)

        monkeypatch.setattr(module, name, count)

    counted(gguf_model, "read_header")
    counted(safetensors, "read_infos")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a split GGUF file", "a directory"])
async def test_a_start_reads_each_header_once(kind: str, tmp_path: Path, reads: Counter[str]):
    if kind == "a directory":
        path = tiny.save(tiny.build("qwen3"), tmp_path)
        expected = {"model.safetensors": 1}
    else:
        path, _ = write(Tiny(num_layers=2, dim=64, tensors_a_part=15), tmp_path)
        expected = {file.name: 1 for file in tmp_path.glob("*.gguf")}
        assert len(expected) == 2
    config = Config(
        model=ModelConfig(path, dtype="fp32"), engine=EngineConfig(max_ctx_tokens=256, parallel=1)
    )
    async with build_engine(config, model=check_load(config)) as engine:
        await engine.load()
        await ask(engine, "to be", 2)
    assert reads == expected


def test_a_gguf_file_that_was_written_again_is_read_again(tmp_path: Path, reads: Counter[str]):
    path, _ = write(Tiny(num_layers=2, dim=64), tmp_path)
    model = ModelFiles(path)
    for _ in range(2):
        with model.weights.open() as source:
            before = source.read("model.norm.weight", (64,)).clone()
    assert reads[path.name] == 1
    write(Tiny(num_layers=2, dim=64, seed=1, mtp=True), tmp_path)  # numbers lie elsewhere
    with model.weights.open() as source:
        after = source.read("model.norm.weight", (64,))
    assert reads[path.name] == 2
    with ModelFiles(path).weights.open() as source:
        assert torch.equal(after, source.read("model.norm.weight", (64,)))
    assert not torch.equal(before, after)


def test_a_safetensors_file_that_was_written_again_is_read_again(
    tmp_path: Path, reads: Counter[str]
):
    weights = safetensors.SafetensorsWeights(tmp_path, None)
    save_file({"a": torch.ones(4)}, tmp_path / safetensors.SINGLE)
    weights.check({"a": (4,)})
    save_file({"a": torch.full((4,), 2.0), "b": torch.ones(3)}, tmp_path / safetensors.SINGLE)
    with weights.open() as source:
        assert source.read("a", (4,)).tolist() == [2.0] * 4
        assert source.read("b", (3,)).tolist() == [1.0] * 3
