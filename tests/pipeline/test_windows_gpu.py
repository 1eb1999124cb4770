"""On a GPU: families with windows say what they say on the CPU, in prompts, steps and trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from luceasync.models.files import parse_spec
from luceasync.models.loader import RandomSource
from luceasync.models.precision import Precision
from luceasync.models.trees import ROOT
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import find_devices
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import make_plan
from tests import tiny

pytestmark = pytest.mark.gpu
MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
SIZES = tiny.COMMON | {"num_hidden_layers": 4, "layer_types": MIXED, "sliding_window": 24}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3}
GEMMA4 = {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0}
# By name: the model type, and what differs from SIZES.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma 4": (
        "gemma4_text",
        GEMMA4
        | {"head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 1},
    ),
    "gemma 4, experts": (
        "gemma4_text",
        GEMMA4 | EXPERTS | {"enable_moe_block": True, "top_k_experts": 2, "global_head_dim": 64},
    ),
    "gemma 4, inputs": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": tiny.VOCAB_SIZE}
        | {"layer_types": [MIXED[1], MIXED[0]] * 2, "num_kv_shared_layers": 2}
        | {"global_head_dim": 32},
    ),
    "gemma 3": ("gemma3_text", {"head_dim": 64}),
    "laguna": (
        "laguna",
        EXPERTS
        | {"shared_expert_intermediate_size": 48, "num_attention_heads_per_layer": [4, 6, 6, 4]}
        | {"head_dim": 128, "sliding_window": 70},
    ),
    "ministral": ("ministral", {"num_attention_heads": 2, "num_key_value_heads": 1}),
}
PROMPTS = {0: 5, 1: 70, 2: 150, 3: 24}
TREE = [ROOT, 0, 0, 1, 2, 3, 4, 5]  # parents: two branches, one of which is kept
KEPT = [0, 1, 3, 5]


def load(name: str, device: str) -> LayerSplitBackend:
    """The model with the same random weights on any device, in float32."""
    model_type, fields = MODELS[name]
    spec = parse_spec(SIZES | fields | {"model_type": model_type})
    plan = make_plan(
        spec,
        [offer_of("cpu:0", 2**33)] if device == "cpu" else find_devices([device]),
        precision=Precision.of("fp32"),
        weights=None,
        parallel=4,
        max_ctx_tokens=512,
        prefill_chunk_tokens=64,
        verify_rows=(len(TREE),),
    )
    return LayerSplitBackend.load(spec, plan, CloseToReal(torch.float32, torch.device("cpu")))


class CloseToReal(RandomSource):
    """Random weights whose norms are about 1, so that no half of a layer is small."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        numbers = super().read(name, shape)
        return numbers + 1 if len(shape) == 1 else numbers


def tokens(lane: int, num_tokens: int) -> list[int]:
    return [(7 * i + lane) % 500 + 3 for i in range(num_tokens)]


def logits_of_all_passes(backend: LayerSplitBackend) -> dict[str, Tensor]:
    """Of prompts in chunks, of steps of all lanes, of a tree, and of steps after what is kept."""
    found = {}
    for lane, length in PROMPTS.items():
        prompt = tokens(lane, length)
        for begin in range(0, length, 64):
            chunk = prompt[begin : begin + 64]
            logits = backend.prefill(lane, begin, chunk, project=begin + len(chunk) == length)
        found[f"prompt of {length}"] = logits.flatten().clone()  # valid until the next pass
    for step in range(26):  # longer than a window
        positions = [length + step for length in PROMPTS.values()]
        logits = backend.decode([*PROMPTS], positions, [step + 3] * len(PROMPTS)).whole()
        found[f"step {step}"] = logits.clone()
    positions = [length + 26 for length in PROMPTS.values()]
    rows = torch.tensor([tokens(lane, len(TREE)) for lane in PROMPTS])
    parents = torch.tensor([TREE] * len(PROMPTS), dtype=torch.int32)
    found["tree"] = backend.verify([*PROMPTS], positions, rows, parents).whole().clone()
    backend.commit([KEPT] * len(PROMPTS))
    for step in range(3):
        after = [position + len(KEPT) + step for position in positions]
        logits = backend.decode([*PROMPTS], after, [9] * len(PROMPTS)).whole()
        found[f"after {step}"] = logits.clone()
    return {name: logits.cpu() for name, logits in found.items()}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_cpu(name: str):
    with torch.inference_mode():
        cpu, gpu = load(name, "cpu"), load(name, "cuda:0")
        expected, found = logits_of_all_passes(cpu), logits_of_all_passes(gpu)
    cpu.close()
    gpu.close()
    apart = {place: float((found[place] - own).abs().max()) for place, own in expected.items()}
    assert max(apart.values()) < 2e-3, apart


@pytest.mark.parametrize("name", MODELS)
def test_a_lane_alone_has_the_bits_that_it_has_among_others(name: str):
    with torch.inference_mode():
        backend = load(name, "cuda:0")
        among = logits_of_all_passes(backend)["step 0"]
        for place, (lane, length) in enumerate(PROMPTS.items()):
            backend.reset(lane)
            prompt = tokens(lane, length)
            for begin in range(0, length, 64):
                backend.prefill(lane, begin, prompt[begin : begin + 64], project=False)
            alone = backend.decode([lane], [length], [3]).whole()[0].cpu()
            assert torch.equal(alone, among[place])
    backend.close()
