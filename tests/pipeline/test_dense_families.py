"""Families of dense layers and of experts say what transformers says, however the work is cut,
shared out or drafted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from luceasync.models.encodings import WeightPlacement
from luceasync.models.families import family_of
from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.loader import TensorReader
from luceasync.models.ops import TorchOps
from luceasync.pipeline.backend import LayerSplitBackend
from tests import tiny

if TYPE_CHECKING:  # else only tests that build a model pay for it
    from transformers import PreTrainedModel

NUM_PROMPT, NUM_ANSWER = 130, 64
PROMPT = [(7 * i) % 500 + 3 for i in range(NUM_PROMPT)]
PROMPTS = {0: PROMPT} | {
    lane: [(11 * i + lane) % 500 + 3 for i in range(20 + 40 * lane)] for lane in (1, 2, 3)
}
SHUFFLED = [5, 2, 7, 0, 3, 6, 1, 4]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3}
DELTA = {
    "shared_expert_intermediate_size": 48,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25},
}
LAGUNA = EXPERTS | {"shared_expert_intermediate_size": 48, "moe_routed_scaling_factor": 2.5}
WINDOWS = {
    "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
    "num_attention_heads_per_layer": [4, 6, 6, 4],
    "sliding_window": 24,
    "rope_parameters": {
        "full_attention": YARN | {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "moe_router_logit_softcapping": 3.0,
}
# By name: the model type, and what differs from tests.tiny.COMMON.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma 3": (
        "gemma3_text",
        {
            "layer_types": MIXED,
            "sliding_window": 24,
            "query_pre_attn_scalar": 40,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma 4": (
        "gemma4_text",
        {
            "layer_types": MIXED[::2] + MIXED[1:3],
            "sliding_window": 24,
            "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma 4, experts": (
        "gemma4_text",
        {
            "layer_types": [MIXED[0], MIXED[2]] * 2,
            "sliding_window": 24,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 32,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma 4, inputs and borrowed keys": (
        "gemma4_text",
        {
            "layer_types": [MIXED[0], MIXED[2], MIXED[0], MIXED[2]],
            "sliding_window": 24,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 512,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma 4, all of it": (
        "gemma4_text",
        {
            "layer_types": [MIXED[0], MIXED[2], MIXED[0], MIXED[2]],
            "sliding_window": 24,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 512,
            "num_kv_shared_layers": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma 4, values of their own": (
        "gemma4_unified_text",
        {"layer_types": [MIXED[0], MIXED[2]] * 2, "sliding_window": 24, "global_head_dim": 32},
    ),
    "llama 3.2": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "ministral": ("ministral", {"layer_types": ["full_attention"] * 4}),
    "ministral, windows": ("ministral", {"layer_types": MIXED, "sliding_window": 24}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral, windows alone": ("mistral", {"sliding_window": 24, "head_dim": 32}),
    "qwen2": ("qwen2", {"head_dim": 32}),
    "qwen2, tied, yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2, windows above": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 2},
    ),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen3_moe, as is": ("qwen3_moe", EXPERTS | {"mlp_only_layers": [2]}),
    "qwen3_5_moe": ("qwen3_5_moe_text", EXPERTS | DELTA),
    "laguna": ("laguna", LAGUNA | WINDOWS),
    "laguna, a gate of each number": ("laguna", LAGUNA | {"gating": "per-element"}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1, 1]}),
    "smollm3, by interval": ("smollm3", {"no_rope_layer_interval": 2, "head_dim": 32}),
}


@pytest.fixture(scope="module", params=MODELS)
def peer(request: pytest.FixtureRequest) -> PreTrainedModel:
    """The model as transformers runs it, float32, with norms and biases that are not all alike."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model_type, fields = MODELS[request.param]
    sizes = tiny.COMMON | {"num_hidden_layers": 4, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **sizes | fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += torch.randn_like(parameter) * (1.0 if "bias" in name else 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer *= 1 + torch.rand(1).item()
    return model


@pytest.fixture(scope="module")
def model_dir(peer: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    peer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(peer: PreTrainedModel) -> Tensor:
    """Logits of every token of the prompt and of its greedy answer."""
    with torch.inference_mode():
        answer = peer.generate(
            torch.tensor([PROMPT]), max_new_tokens=NUM_ANSWER, do_sample=False, eos_token_id=None
        )
        logits: Tensor = peer(answer).logits[0]
    assert answer[0, NUM_PROMPT:].tolist() == logits[NUM_PROMPT - 1 : -1].argmax(-1).tolist()
    return logits


def most_shards(model_dir: Path, num_shards: int) -> int:
    """`num_shards`, or 1 if no layer can be on another device than the others."""
    return 1 if read_spec(model_dir).layer_inputs else num_shards


def prefilled(backend: LayerSplitBackend, lane: int, ids: list[int], chunk: int) -> Tensor:
    """Logits after each chunk."""
    backend.reset(lane)
    return torch.stack(
        [
            backend.prefill(lane, begin, ids[begin : begin + chunk], project=True).flatten()
            for begin in range(0, len(ids), chunk)
        ]
    )


def greedy(backend: LayerSplitBackend, prompts: dict[int, list[int]], num_tokens: int) -> dict:
    """Answers of lanes that step together."""
    out = {
        lane: [int(prefilled(backend, lane, ids, 64)[-1].argmax())] for lane, ids in prompts.items()
    }
    for step in range(num_tokens - 1):
        positions = [len(ids) + step for ids in prompts.values()]
        logits = backend.decode([*prompts], positions, [out[lane][-1] for lane in prompts]).whole()
        for lane, token in zip(prompts, logits.argmax(-1).tolist(), strict=True):
            out[lane].append(token)
    return out


@pytest.mark.slow
def test_logits_are_the_peers_for_every_chunking(make_backend, model_dir: Path, expected: Tensor):
    backend = make_backend(model_dir)
    for chunk in (1, 7, 63, 64, 65, NUM_PROMPT):
        num_tokens = min(NUM_PROMPT, 66 * chunk)
        ends = [min(at + chunk, num_tokens) - 1 for at in range(0, num_tokens, chunk)]
        logits = prefilled(backend, 0, PROMPT[:num_tokens], chunk)
        torch.testing.assert_close(logits, expected[ends], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_greedy_tokens_are_the_peers_on_any_split(
    make_backend, model_dir: Path, expected: Tensor, num_shards: int
):
    num_shards = most_shards(model_dir, num_shards)
    backend = make_backend(model_dir, num_shards=num_shards, page_order=SHUFFLED)
    tokens = expected[NUM_PROMPT - 1 :].argmax(-1).tolist()[:NUM_ANSWER]
    assert greedy(backend, {2: PROMPT}, NUM_ANSWER) == {2: tokens}


def test_lanes_that_step_together_are_each_as_alone(make_backend, model_dir: Path):
    backend = make_backend(model_dir)
    alone = {lane: greedy(backend, {lane: ids}, 10)[lane] for lane, ids in PROMPTS.items()}
    assert greedy(backend, PROMPTS, 10) == alone


@pytest.mark.slow
def test_drafts_right_or_wrong_change_no_token(make_backend, model_dir: Path, expected: Tensor):
    backend = make_backend(model_dir, num_shards=most_shards(model_dir, 2), verify_rows=(4,))
    tokens = expected[NUM_PROMPT - 1 :].argmax(-1).tolist()
    spoken, rounds = [int(prefilled(backend, 1, PROMPT, 64)[-1].argmax())], 0
    while len(spoken) < 24:
        draft = tokens[len(spoken) : len(spoken) + 3]
        draft[rounds % 3] = (draft[rounds % 3] + 1) % tiny.VOCAB_SIZE
        begin = NUM_PROMPT + len(spoken) - 1
        logits = backend.verify([1], [begin], torch.tensor([[spoken[-1], *draft]])).whole()[0]
        found = logits.argmax(-1).tolist()
        num_right = rounds % 3
        assert found[:num_right] == draft[:num_right]
        backend.commit([[*range(num_right + 1)]])
        spoken += found[: num_right + 1]
        rounds += 1
    assert spoken == tokens[: len(spoken)]


@pytest.mark.slow
def test_a_prompt_that_exceeds_its_pool_is_what_it_is_without(
    make_backend, peer: PreTrainedModel, model_dir: Path
):
    prompt = [(13 * i) % 500 + 3 for i in range(700)]
    sizes = {"max_ctx_tokens": 1024, "chunk_tokens": 192, "pool_tokens": 512}
    backend = make_backend(model_dir, num_shards=most_shards(model_dir, 2), **sizes)
    logits = prefilled(backend, 1, prompt, 192)[-1]
    with torch.inference_mode():
        expected = peer(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    backend.decode([1], [700], [int(logits.argmax())]).whole()  # with absent chunks


def test_the_bytes_that_are_held_are_those_planned(make_backend, model_dir: Path):
    [shard] = make_backend(model_dir).plan.shards
    spec, place = (
        read_spec(model_dir),
        WeightPlacement(TorchOps(), torch.device("cpu"), torch.float32),
    )
    with ModelFiles(model_dir).weights.open() as source:
        reader, family = TensorReader(source, spec, place), family_of(spec)
        layers = [family.read_layer(reader, layer) for layer in range(spec.num_layers)]
        ends = family.read_ends(reader, is_first=True, is_last=True)
    assert sum(layer.num_bytes for layer in layers) + ends.num_bytes == shard.weight_bytes
