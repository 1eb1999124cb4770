"""Captured passes on a CPU, with a GPU's kernels in Triton's interpreter: they return what plain
passes do, whatever happens between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from luceasync.kernels import attention, gemv, tree_attention, window_attention
from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.precision import Precision
from luceasync.models.trees import ROOT
from luceasync.pipeline import stage
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import make_plan
from luceasync.ranking.logits import RankRequest
from tests import tiny
from tests.kernels.interpreted import InterpretedPlatform

PROMPT = [5, 7, 11, 13, 17]
VERIFY_ROWS = 3
NUM_SPLITS = 2  # of a context: empty splits cost the interpreter time too
WEIGHT_ROWS = 256  # at a time, for the same reason
KINDS = ("linear_attention", "full_attention")

Load = Callable[..., LayerSplitBackend]


@pytest.fixture
def load(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Backends of a model of two layers with two lanes, captured or not; closed after the test."""
    tiny_dir = tiny.save(tiny.build(family, len(KINDS), kinds=KINDS), tmp_path)
    loaded = []
    for each in (attention, tree_attention, window_attention):
        monkeypatch.setattr(each, "NUM_SPLITS", NUM_SPLITS)
    tile = gemv.tile
    monkeypatch.setattr(
        gemv, "tile", lambda *sizes, **more: replace(tile(*sizes, **more), block_n=WEIGHT_ROWS)
    )

    def load_one(
        *, captured: bool, model_dir: Path = tiny_dir, num_slots: int = 0
    ) -> LayerSplitBackend:
        spec = read_spec(model_dir)
        plan = make_plan(
            spec,
            [offer_of("cpu:0", 2**33)],
            precision=Precision.of("fp32"),
            weights=[1.0],
            parallel=2,
            max_ctx_tokens=128,
            prefill_chunk_tokens=None,
            verify_rows=[VERIFY_ROWS],
        )
        with monkeypatch.context() as patched:
            if captured:
                shard = replace(plan.shards[0], expert_slots=num_slots)
                plan = replace(plan, decode_sizes=(1, 2), shards=(shard,))
                patched.setattr(stage, "open_platform", InterpretedPlatform)
            loaded.append(LayerSplitBackend.open(ModelFiles(model_dir), plan))
        return loaded[-1]

    yield load_one
    for backend in loaded:
        backend.close()


def greedy(backend: LayerSplitBackend, lanes, positions, tokens, num_steps: int) -> list[list[int]]:
    """Consecutive steps and their tokens; before some, the next step is announced."""
    found = []
    for step in range(num_steps):
        logits = backend.decode(lanes, [position + step for position in positions], tokens)
        ranking = logits.rank(RankRequest())
        if step != 1:
            backend.run_ahead()
        tokens = ranking.candidates().best.tolist()
        found.append(tokens)
    return found


def everything(backend: LayerSplitBackend, *, goes_back: bool = True) -> list[list[int]]:
    """Steps, with other calls between them. `goes_back`: one is run a second time."""
    found = []
    for lane in (0, 1):
        backend.prefill(lane, 0, PROMPT[lane:], project=True)
    found += greedy(backend, [0, 1], [5, 4], [3, 4], 3)
    found += greedy(backend, [0], [8], [found[-1][0]], 2)  # of another size
    found += greedy(backend, [0, 1], [10, 7], [found[-1][0], found[2][1]], 2)
    found += greedy(backend, [0, 1], [12, 9], [9, found[-1][1]], 1)  # one token is not the best
    if goes_back:
        found += greedy(backend, [0, 1], [12, 9], [9, 9], 1)  # the same positions again
    found += greedy(backend, [1, 0], [10, 13], [6, 8], 1)  # lanes the other way round
    rows = torch.tensor([[found[-1][1], 3, 4]])
    logits = backend.verify([0], [14], rows, torch.tensor([[ROOT, 0, 1]], dtype=torch.int32))
    found.append(logits.rank(RankRequest()).candidates().best.tolist())
    backend.commit([[0, 1]])
    found += greedy(backend, [0, 1], [16, 11], [5, found[-2][0]], 2)
    backend.reset(0)
    backend.prefill(0, 0, PROMPT, project=True)
    found += greedy(backend, [0, 1], [5, 13], [3, found[-1][1]], 2)
    return found


@pytest.mark.first
def test_captured_steps_give_what_plain_ones_give(load: Load) -> None:
    assert everything(load(captured=True)) == everything(load(captured=False))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3"])
def test_biases_and_a_scaled_rope_are_captured(load: Load, tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    rope = {"rope_type": "yarn", "factor": 4.0}  # with a magnitude
    sizes = tiny.COMMON | {"num_hidden_layers": 1, "rope_parameters": rope}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "qwen2")
    found, expected = (
        few(load(captured=captured, model_dir=tmp_path / "qwen2")) for captured in (True, False)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3"])
def test_windows_and_what_gemma_adds_are_captured(load: Load, tmp_path: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"]
    sizes = tiny.COMMON | {"num_hidden_layers": 2, "layer_types": kinds, "sliding_window": 4}
    torch.manual_seed(0)
    Gemma3ForCausalLM(Gemma3TextConfig(**sizes)).save_pretrained(tmp_path / "gemma3")
    found, expected = (
        few(load(captured=captured, model_dir=tmp_path / "gemma3")) for captured in (True, False)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.covered(0)
@pytest.mark.parametrize("family", ["qwen3"])
@pytest.mark.parametrize("num_slots", [3, 0], ids=lambda n: f"{n} slots" if n else "none")
def test_inputs_of_layers_and_borrowed_keys_are_captured(
    load: Load, tmp_path: Path, num_slots: int
) -> None:
    """Beside experts, as no published Gemma 4 has them, in slots or not."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    kinds = ["sliding_attention", "full_attention", "full_attention"]
    sizes = tiny.COMMON | {"num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 4}
    sizes |= {"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 16, "global_head_dim": 32}
    sizes |= {"vocab_size_per_layer_input": tiny.VOCAB_SIZE, "enable_moe_block": True}
    sizes |= {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    torch.manual_seed(0)
    Gemma4ForCausalLM(Gemma4TextConfig(**sizes)).save_pretrained(tmp_path / "gemma4")
    found, expected = (
        few(load(captured=captured, model_dir=tmp_path / "gemma4", num_slots=num_slots))
        for captured in (True, False)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3"])
def test_steps_run_ahead_of_windows_too(load: Load, tmp_path: Path) -> None:
    """Whether the next step is the one that was announced or not."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = tiny.COMMON | {"num_hidden_layers": 1, "sliding_window": 3}
    torch.manual_seed(0)
    MistralForCausalLM(MistralConfig(**sizes)).save_pretrained(tmp_path / "mistral")
    found, expected = (
        everything(load(captured=captured, model_dir=tmp_path / "mistral"), goes_back=False)
        for captured in (True, False)
    )
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3"])
@pytest.mark.parametrize(
    "num_slots",
    [0, pytest.param(4, marks=pytest.mark.thorough), 1],
    ids=lambda n: f"{n} slots" if n else "none",
)
def test_experts_are_captured_and_need_not_be_there(
    load: Load, tmp_path: Path, num_slots: int
) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes = tiny.COMMON | experts | {"num_hidden_layers": 1, "decoder_sparse_step": 1}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(tmp_path / "moe")
    own = load(captured=True, model_dir=tmp_path / "moe", num_slots=num_slots)
    plain = load(captured=False, model_dir=tmp_path / "moe")
    assert everything(own, goes_back=False) == everything(plain, goes_back=False)


def few(backend: LayerSplitBackend) -> torch.Tensor:
    """Logits of a prompt, a step, a verified tree and a step after its commit: [rows, vocab]."""
    logits = [backend.prefill(0, 0, PROMPT, project=True).view(1, -1).clone()]
    logits.append(backend.decode([0], [5], [3]).whole().clone())
    parents = torch.tensor([[ROOT, 0, 0]], dtype=torch.int32)
    logits.append(backend.verify([0], [6], torch.tensor([[4, 5, 6]]), parents).whole()[0].clone())
    backend.commit([[0, 2]])
    logits.append(backend.decode([0], [8], [3]).whole().clone())
    return torch.cat(logits)
