"""On a GPU: where experts lie changes no bit of what a model gives, and slots take what was planned
for them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from luceasync.bench.shapes import encoding_of
from luceasync.kernels.experts_slots import COUNTS
from luceasync.models.feed_forward.feed_forward import RoutedFeedForward
from luceasync.models.files import parse_spec
from luceasync.models.precision import Precision
from luceasync.models.spec import ModelSpec
from luceasync.models.trees import ROOT
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import find_devices
from luceasync.pipeline.expert_plan import ExpertRequest, expert_layers
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import Plan, make_plan
from tests.pipeline.test_windows_gpu import TREE, CloseToReal, logits_of_all_passes

pytestmark = pytest.mark.gpu
NUM_EXPERTS, NUM_CHOSEN, NUM_LANES = 32, 4, 2
MODEL: dict[str, object] = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 512,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "full_attention_interval": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": NUM_CHOSEN,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"},
}
FLOAT32: dict[str, dict[str, object]] = {
    "qwen3.5": {},
    "qwen3": {"model_type": "qwen3_moe", "norm_topk_prob": True, "decoder_sparse_step": 2}
    | {"intermediate_size": 512, "mlp_only_layers": []},
}
KINDS = ["sliding_attention", "full_attention"] * 2
WINDOWS = MODEL | {"layer_types": KINDS, "sliding_window": 64, "rope_parameters": {}}
# A network beside the experts, with norms of its own; sigmoids with a bias behind a dense layer.
OTHERS: dict[str, dict[str, object]] = {
    "gemma 4": WINDOWS
    | {"model_type": "gemma4_text", "enable_moe_block": True, "top_k_experts": NUM_CHOSEN}
    | {"global_head_dim": 256, "hidden_size_per_layer_input": 0, "intermediate_size": 512},
    "laguna": WINDOWS
    | {"model_type": "laguna", "intermediate_size": 512, "moe_routed_scaling_factor": 2.5},
}
SPEC = parse_spec(MODEL)
MIXES = ("plain", "Q4_K_M", "Q8_0")


def loaded(
    mix: str, num_slots: int | None, spec: ModelSpec = SPEC
) -> tuple[LayerSplitBackend, Plan]:
    """`num_slots` None: all experts are on the device. Norms are about 1: behind small ones a bias
    alone would decide, and rows would choose the same few experts.
    """
    encoding, precision = encoding_of(mix, spec.num_layers), Precision.of("bf16")
    layers = expert_layers(spec, 0, spec.num_layers, precision, encoding)
    asked = None
    if num_slots is not None:
        num_bytes = sum(layer.slots_bytes(num_slots) for layer in layers)
        asked = ExpertRequest(num_bytes, 1 << 40)
    plan = make_plan(
        spec,
        find_devices(["cuda:0"]),
        precision=precision,
        weights=None,
        parallel=NUM_LANES,
        max_ctx_tokens=512,
        prefill_chunk_tokens=None,
        verify_rows=[6],
        encoding_of=encoding,
        experts=asked,
    )
    source = CloseToReal(torch.bfloat16, torch.device("cuda:0"), encoding_of=encoding)
    return LayerSplitBackend.load(spec, plan, source), plan


def everything(backend: LayerSplitBackend) -> Iterator[Tensor]:
    """Logits of prompts of many rows and of few, of steps of one lane and of two, of trees, and of
    a lane that begins anew.
    """
    random = torch.Generator().manual_seed(4)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 512, (count,), generator=random).tolist()

    ends = [200, 9]
    for _ in range(2):
        for lane, end in enumerate(ends):
            backend.reset(lane)
            found = backend.prefill(lane, 0, tokens(end), project=True)
            assert found is not None
            yield found.clone()
        at = list(ends)
        for step in range(12):
            lanes = [0, 1] if step % 3 else [step % 2]
            yield backend.decode(lanes, [at[n] for n in lanes], tokens(len(lanes))).whole().clone()
            for lane in lanes:
                at[lane] += 1
        tree = torch.tensor([[ROOT, 0, 0, 1, 1, 2]] * 2, dtype=torch.int32)
        rows = torch.tensor([tokens(6), tokens(6)])
        yield backend.verify([0, 1], at, rows, tree).whole().clone()
        backend.commit([[0, 1, 3], [0]])
        yield backend.decode([0, 1], [at[0] + 3, at[1] + 1], tokens(2)).whole().clone()
        ends.reverse()


@pytest.mark.parametrize(
    ("mix", "fields"),
    [*((mix, MODEL) for mix in MIXES), *(("plain", fields) for fields in OTHERS.values())],
    ids=[*MIXES, *OTHERS],
)
def test_every_budget_gives_the_same_bits(mix: str, fields: dict[str, object]) -> None:
    spec = parse_spec(fields)
    num_layers = sum(isinstance(each.feed_forward, RoutedFeedForward) for each in spec.layers)
    backend, _ = loaded(mix, None, spec)
    expected = list(everything(backend))
    backend.close()
    totals = set()
    for num_slots in (NUM_EXPERTS, NUM_EXPERTS // 2, NUM_CHOSEN * NUM_LANES):
        backend, plan = loaded(mix, num_slots, spec)
        assert plan.shards[0].expert_slots == num_slots
        for number, found in enumerate(everything(backend)):
            assert torch.equal(found, expected[number]), (num_slots, number)
        torch.cuda.synchronize()
        counts = backend.expert_counts()
        assert counts["hits"] > 0 and counts["misses"] >= num_layers * min(num_slots, 8)
        assert (counts["read through"] > 0) == (num_slots < NUM_EXPERTS)
        totals.add(sum(counts[name] for name in COUNTS))
        backend.close()
    assert len(totals) == 1, "rows choose the same experts at every budget"


def test_slots_take_what_was_planned() -> None:
    backend, plan = loaded("plain", 16)
    [stage] = backend._stages
    assert stage.device_bytes == {"cuda:0": plan.device_bytes(plan.shards[0])}
    backend.close()


def in_float32(fields: dict[str, object], device: str) -> LayerSplitBackend:
    """The same random weights on any device."""
    plan = make_plan(
        parse_spec(fields),
        [offer_of("cpu:0", 2**33)] if device == "cpu" else find_devices([device]),
        precision=Precision.of("fp32"),
        weights=None,
        parallel=4,
        max_ctx_tokens=512,
        prefill_chunk_tokens=128,
        verify_rows=(len(TREE),),
    )
    source = CloseToReal(torch.float32, torch.device("cpu"))
    return LayerSplitBackend.load(parse_spec(fields), plan, source)


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_logits_are_those_of_the_cpu(name: str) -> None:
    with torch.inference_mode():
        cpu, gpu = (in_float32(MODEL | FLOAT32[name], each) for each in ("cpu", "cuda:0"))
        expected, found = logits_of_all_passes(cpu), logits_of_all_passes(gpu)
    cpu.close()
    gpu.close()
    apart = {place: float((found[place] - own).abs().max()) for place, own in expected.items()}
    print(name, apart)
    assert max(apart.values()) < 2e-3, apart
