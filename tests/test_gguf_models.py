"""A GGUF file says what the same numbers say in a Hugging Face directory: on any split, kept and
taken up again, with and without a drafter.
"""

from __future__ import annotations

import re
from pathlib import Path
from struct import pack

import pytest
import torch
import transformers

from luceasync.config import Config, DraftConfig, EngineConfig, ModelConfig
from luceasync.engine.start import build_engine
from luceasync.errors import ModelError
from luceasync.gguf.model import read_model
from luceasync.models.encodings import WeightPlacement
from luceasync.models.families import family_of
from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.loader import TensorReader
from luceasync.models.ops import TorchOps
from luceasync.models.precision import Precision
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import make_plan
from luceasync.pipeline.report import plan_report
from luceasync.prefix_cache.namespace import namespace_of
from tests import tiny
from tests.engine.test_processes import running as arranged
from tests.engines import ask, running, written
from tests.gguf.tiny_files import K_MIX, LLAMA3, Tiny, write

pytestmark = pytest.mark.usefixtures("forked_backends")

QUESTION = "to be or not to be, that is the question. " * 6
NUM_TOKENS = 16
FOURS = {"ssm_alpha.weight": "F16", "attn_k.weight": "IQ4_XS", "token_embd.weight": "BF16"}
ODD = FOURS | {"ffn_up.weight": "Q3_K", "ffn_down.weight": "Q2_K", "": "Q5_1"}
# Experts of 26B-A4B have 704 columns: blocks of 256 do not fit, half blocks of 128 neither.
ODD_DOWN = {"ffn_down_exps.weight": "Q5_0", "": "Q4_K"}
SIXES = {"ffn_down.weight": "Q6_K", "ffn_down_exps.weight": "Q6_K", "": "Q4_K"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 8.0}
MODELS = {
    "plain": Tiny(),
    "K-quants": Tiny(types=K_MIX, tensors_a_part=9),
    "experts": Tiny("qwen3_moe", types=K_MIX, tensors_a_part=9),
    "experts hybrid": Tiny("qwen3_5_moe", types=K_MIX, mtp=True, tied=True),
    "odd types hybrid": Tiny("qwen3_5", types=ODD, tensors_a_part=20),
}

K_HYBRID = Tiny("qwen3_5", types=K_MIX, mtp=True, vision=True, tied=True)
# Of which only the numbers are compared: they are served and kept like the others.
RELATIVES = {
    "plain hybrid": Tiny("qwen3_5"),
    "heads in order": Tiny("qwen3_5", value_heads=2, types={"": "Q8_0"}, tied=True),
    "fused": Tiny(types={"": "Q4_0"}, fused=True),
    "K-quants, tied": Tiny(types=K_MIX, tied=True),
    "K-quants hybrid": K_HYBRID,
    "llama": Tiny("llama", types=K_MIX | {"attn_k.weight": "Q4_1", "output.weight": "Q5_0"}),
    "gemma 3": Tiny("gemma3_text", types=K_MIX, tied=True, num_layers=6, rope=LINEAR),
    "gemma 4": Tiny("gemma4_text", types=K_MIX, tied=True),
    "gemma 4, fused": Tiny("gemma4_text", types={"": "Q8_0"}, tied=True, fused=True),
    "gemma 4, experts": Tiny("gemma4_text", types=SIXES, tied=True, experts=True, fused=True),
    "gemma 4, inputs": Tiny("gemma4_text", types=SIXES, tied=True, inputs=256),
    "gemma 4, odd experts": Tiny("gemma4_text", ODD_DOWN, experts=True, expert_dim=192),
    "llama 3.1": Tiny("llama", types={"": "Q8_0"}, rope=LLAMA3, tied=True),
    "mistral": Tiny("mistral", types={"": "Q4_0"}, rope={"rope_type": "linear", "factor": 4.0}),
    "qwen2": Tiny("qwen2", types=K_MIX),
    "qwen2, tied, yarn": Tiny("qwen2", types={"": "Q5_0"}, tied=True, rope=YARN, fused=True),
    "experts, fused": Tiny("qwen3_5_moe", types={"": "Q8_0"}, fused=True),
    "laguna": Tiny("laguna", types=K_MIX, rope=YARN | {"attention_factor": 1.25}),
    "laguna, plain rope": Tiny("laguna", types={"": "Q8_0"}, fused=True),
    "experts, plain": Tiny("qwen3_moe", types={"ffn_down_exps.weight": "Q5_0", "": "F16"}),
    "smollm3": Tiny("smollm3", types=K_MIX, tied=True),
}


@pytest.fixture(scope="module", params=MODELS | RELATIVES)
def files(request: pytest.FixtureRequest, tmp_path_factory) -> tuple[Path, Path]:
    """(GGUF, the same numbers in a directory)."""
    return write((MODELS | RELATIVES)[request.param], tmp_path_factory.mktemp("gguf"))


def open_backend(path: Path, num_shards: int, chunk_tokens: int = 64) -> LayerSplitBackend:
    spec = read_spec(path)
    plan = make_plan(
        spec,
        [offer_of(f"cpu:{i}", 2**33) for i in range(num_shards)],
        precision=Precision.of("fp32"),
        weights=None,
        parallel=2,
        max_ctx_tokens=256,
        prefill_chunk_tokens=chunk_tokens,
        encoding_of=ModelFiles(path).weights.encoding,
    )
    return LayerSplitBackend.open(ModelFiles(path), plan)


@pytest.mark.slow
def test_logits_are_those_of_the_same_numbers(files: tuple[Path, Path]):
    """No further than 1e-4 beyond the directory's own distance from transformers' in float64: what
    float32 rounds in these models is as much as that.
    """
    prompt = [(7 * i) % 400 + 3 for i in range(70)]
    # Of its bodies for experts only the eager one computes in float64.
    kinds = {"dtype": torch.float64, "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(files[1], **kinds)
    with torch.no_grad():
        exact = model(torch.tensor([prompt])).logits[0, -1]
    distances = []
    most_shards = 1 if read_spec(files[0]).layer_inputs else 3
    for path, num_shards, chunk_tokens in ((files[1], 1, 128), (files[0], most_shards, 64)):
        backend = open_backend(path, num_shards, chunk_tokens)
        for begin in range(0, len(prompt), chunk_tokens):
            chunk = prompt[begin : begin + chunk_tokens]
            found = backend.prefill(0, begin, chunk, project=begin + len(chunk) == len(prompt))
        assert found is not None
        distances.append(float((found.view(-1) - exact).abs().max()))
        backend.close()
    assert distances[0] < 5e-4
    assert distances[1] < distances[0] + 1e-4


@pytest.mark.slow
def test_the_bytes_that_are_held_are_those_planned(files: tuple[Path, Path]):
    path = files[0]
    [report] = plan_report(Config(model=ModelConfig(path, dtype="fp32"))).shards
    spec, place = read_spec(path), WeightPlacement(TorchOps(), torch.device("cpu"), torch.float32)
    with ModelFiles(path).weights.open() as source:
        reader, family = TensorReader(source, spec, place), family_of(spec)
        layers = [family.read_layer(reader, layer) for layer in range(spec.num_layers)]
        ends = family.read_ends(reader, is_first=True, is_last=True)
    held = sum(layer.num_bytes for layer in layers) + ends.num_bytes
    assert held == report.shard.weight_bytes == sum(report.weight_types.values())


@pytest.mark.slow
@pytest.mark.parametrize("files", MODELS, indirect=True)
async def test_it_is_kept_and_taken_up_after_a_restart_under_another_split(
    files: tuple[Path, Path], tmp_path: Path
):
    path, plain = files
    async with running(path, tmp_path, shards=3) as engine:
        cold = await ask(engine, QUESTION, NUM_TOKENS, keep_prefix=True)
        await written(engine)
    async with running(path, tmp_path) as engine:
        again = await ask(engine, QUESTION, NUM_TOKENS)
    assert (again.finish.restore.tier, again.num_prefilled) == ("disk", 0)
    assert again.ids == cold.ids
    async with running(plain, tmp_path) as engine:
        other = await ask(engine, QUESTION, NUM_TOKENS)
    assert other.finish.restore.tier is None, "other files are another namespace"
    assert other.ids == cold.ids
    assert other.text == cold.text


@pytest.mark.slow
@pytest.mark.parametrize("files", ["K-quants", "experts", "odd types hybrid"], indirect=True)
async def test_a_drafter_changes_no_answer(files: tuple[Path, Path], tmp_path: Path):
    sizes = {"hidden_size": 256, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1]}}
    draft_dir = tiny.save_draft(tmp_path / "draft", tiny.draft_config(**sizes))
    answers = []
    for draft in (DraftConfig(), DraftConfig(draft_dir=draft_dir, ddtree=True, ddtree_budget=9)):
        engine = build_engine(
            Config(
                model=ModelConfig(model_dir=files[0], dtype="fp32"),
                engine=EngineConfig(max_ctx_tokens=512, parallel=2),
                draft=draft,
            )
        )
        async with engine:
            await engine.load()
            answers.append((await ask(engine, QUESTION, NUM_TOKENS)).ids)
    assert answers[0] == answers[1]


@pytest.mark.slow
async def test_what_other_processes_have_kept_is_taken_up_by_one(tmp_path: Path):
    path, _ = write(K_HYBRID, tmp_path)
    cache_dir = tmp_path / "cache"
    async with arranged(path, tmp_path / "three", "three", cache_dir=cache_dir) as engine:
        kept = await ask(engine, QUESTION, NUM_TOKENS, keep_prefix=True)
        await written(engine)
    async with arranged(path, tmp_path / "one", "one", cache_dir=cache_dir) as engine:
        again = await ask(engine, QUESTION, NUM_TOKENS)
    assert again.finish.restore.tier == "disk"
    assert again.ids == kept.ids


def test_a_part_that_has_changed_is_another_namespace(tmp_path: Path):
    path, _ = write(Tiny(num_layers=2, dim=64, tensors_a_part=9), tmp_path)
    spec, precision = read_spec(path), Precision.of("fp32")
    before = namespace_of(ModelFiles(path).weights.paths, spec, precision, None)
    assert namespace_of(ModelFiles(tmp_path).weights.paths, spec, precision, None) == before
    last = max(tmp_path.glob("*.gguf"))
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    assert namespace_of(ModelFiles(path).weights.paths, spec, precision, None) != before


def test_a_scale_that_is_no_number_is_told(tmp_path: Path):
    path, _ = write(Tiny(num_layers=2, dim=64, types={"": "Q8_0"}), tmp_path)
    begin = read_model(path).tensors["blk.1.ffn_up.weight"][1].begin
    content = bytearray(path.read_bytes())
    content[begin : begin + 2] = b"\x00\x7c"
    path.write_bytes(content)
    words = r"\.gguf: 'blk\.1\.ffn_up\.weight' has a scale that is not finite"
    with pytest.raises(ModelError, match=words):
        open_backend(path, 1)


@pytest.mark.covered(1)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name", ["blk.0.attn_norm.weight", "blk.1.ffn_up.weight", "token_embd.weight"]
)
def test_a_number_that_is_not_finite_is_told(tmp_path: Path, name: str, number: float):
    path, _ = write(Tiny(num_layers=2, dim=64), tmp_path)
    begin = read_model(path).tensors[name][1].begin
    content = bytearray(path.read_bytes())
    content[begin + 8 : begin + 12] = pack("<f", number)
    path.write_bytes(content)
    words = rf"\.gguf: '{re.escape(name)}' has a number that is not finite"
    with pytest.raises(ModelError, match=words):
        open_backend(path, 1)
