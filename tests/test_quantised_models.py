"""A quantised Hugging Face directory says what the same numbers say in a plain one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from luceasync.cli.doctor import examine
from luceasync.config import Config, ModelConfig
from luceasync.errors import ModelError
from luceasync.models.files import read_spec
from luceasync.pipeline.report import plan_report
from tests import tiny
from tests.engines import ask, running, written
from tests.models.quant.checkpoints.test_schemes import FP4, FP8_BLOCKS, INT4, compressed
from tests.reference import quantised as truth

QUESTION = "to be or not to be, that is the question. " * 6
NUM_TOKENS = 16
INT4_32 = INT4 | {"group_size": 32, "symmetric": False}
MODELS: dict[str, tuple[str, dict[str, Any], Callable[..., truth.Module]]] = {
    "awq": (
        "qwen2",
        {"quant_method": "awq", "bits": 4, "group_size": 32},
        lambda rows, columns, seed: truth.awq(rows, columns, 32, seed),
    ),
    "gptq": (
        "qwen3",
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False},
        lambda rows, columns, seed: truth.gptq(rows, columns, 64, seed=seed),
    ),
    "pack-quantized": (
        "qwen3_5",
        compressed("pack-quantized", **INT4_32),
        lambda rows, columns, seed: truth.pack_quantized(rows, columns, 32, zeros=True, seed=seed),
    ),
    "fp8": (
        "qwen3_5",
        FP8_BLOCKS,
        lambda rows, columns, seed: truth.fp8_blocks(rows, columns, 128, torch.bfloat16, seed),
    ),
    "nvfp4": (
        "qwen3",
        compressed("nvfp4-pack-quantized", **FP4),
        partial(truth.nvfp4, divided=True),
    ),
}
# As numbers: the middle too, since what is quantised is made number by number here.
LEFT = ("embed_tokens", "lm_head", "in_proj_a", "in_proj_b", "layers.0.mlp.up_proj")
LEFT += ("layers.1.", "layers.2.")


@pytest.fixture(scope="module", params=MODELS)
def dirs(request: pytest.FixtureRequest, tmp_path_factory) -> tuple[Path, Path]:
    """(quantised, the same numbers in float32)."""
    family, config, quantised = MODELS[request.param]
    plain = tiny.save(tiny.build(family), tmp_path_factory.mktemp("plain"))
    quant = shutil.copytree(plain, tmp_path_factory.mktemp("quant"), dirs_exist_ok=True)
    stored, numbers = {}, {}
    for seed, (name, tensor) in enumerate(load_file(plain / "model.safetensors").items()):
        stored[name] = numbers[name] = tensor
        if tensor.ndim == 2 and not any(left in name for left in LEFT):
            del stored[name]
            parts, numbers[name] = quantised(*tensor.shape, seed=seed)
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{part}": own.contiguous() for part, own in parts.items()}
    save_file(stored, quant / "model.safetensors")
    save_file(numbers, plain / "model.safetensors")
    path = quant / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return quant, plain


@pytest.mark.slow
async def test_answers_are_those_of_the_same_numbers_and_are_kept(
    dirs: tuple[Path, Path], tmp_path: Path
):
    quant, plain = dirs
    async with running(quant, tmp_path, shards=3) as engine:
        cold = await ask(engine, QUESTION, NUM_TOKENS, keep_prefix=True)
        await written(engine)
    async with running(quant, tmp_path) as engine:
        again = await ask(engine, QUESTION, NUM_TOKENS)
    assert (again.finish.restore.tier, again.num_prefilled) == ("disk", 0)
    async with running(plain) as engine:
        other = await ask(engine, QUESTION, NUM_TOKENS)
    assert cold.ids == again.ids == other.ids


@pytest.mark.slow
def test_matrices_stay_as_small_as_they_are_stored(dirs: tuple[Path, Path]):
    reports = [
        plan_report(Config(model=ModelConfig(path, dtype="fp32"))).shards[0] for path in dirs
    ]
    quantised = {words: size for words, size in reports[0].weight_types.items() if words != "fp32"}
    assert len(quantised) == 1
    plain_bytes = reports[1].shard.weight_bytes - reports[0].weight_types["fp32"]
    assert sum(quantised.values()) < 0.32 * plain_bytes


@pytest.mark.slow
def test_the_doctor_says_that_activations_are_not_quantised(dirs: tuple[Path, Path]):
    [finding] = [
        found
        for found in examine(Config(model=ModelConfig(dirs[0], dtype="fp32")))
        if found.subject == "quantisation"
    ]
    assert finding.state == "ok"
    assert "activations in fp32, whatever quantization_config says" in finding.words


def test_what_cannot_be_read_is_refused_before_anything_is_loaded(tmp_path: Path):
    tiny.save(tiny.build("qwen3_5", 4), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    wrapper = {"model_type": "qwen3_5", "text_config": config}
    wrapper["quantization_config"] = {"quant_method": "bitsandbytes"}
    path.write_text(json.dumps(wrapper))
    with pytest.raises(ModelError, match="quant_method = 'bitsandbytes' is not supported"):
        read_spec(tmp_path)
