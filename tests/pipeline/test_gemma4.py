"""Gemma 4's configs, as hubs and transformers write them, and what a large one takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from luceasync.config import Config, ModelConfig
from luceasync.errors import ModelError, PlacementError
from luceasync.models.files import parse_spec
from luceasync.models.loader import RandomSource
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.precision import Precision
from luceasync.models.rope import PLAIN, ProportionalRope
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import Plan, make_plan
from luceasync.pipeline.report import plan_report
from luceasync.pipeline.stage import LocalStage
from tests import tiny

# Sizes of the 31B model.
LARGE = {
    "model_type": "gemma4_text",
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision",
}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}
EXPERTS |= {"moe_intermediate_size": 704}


def sizes(attention: AttentionSpec) -> tuple[object, ...]:
    heads = (attention.num_kv_heads, attention.head_dim, attention.window)
    return *heads, attention.shares_keys, attention.rope


def test_layers_have_the_sizes_of_their_kind():
    spec = parse_spec(LARGE)
    window = (16, 256, 1024, False, PLAIN)
    whole = (4, 512, 0, True, ProportionalRope(0.25, 1.0))
    found = [sizes(mixer) for mixer in spec.mixers]
    assert found == [whole if layer % 6 == 5 else window for layer in range(60)]
    assert spec.logit_cap == 30.0 and spec.vocab_size == 262144


def test_the_last_layer_sees_all_tokens_whatever_is_listed():
    spec = parse_spec(LARGE | {"layer_types": ["sliding_attention"] * 60})
    assert [mixer.window for mixer in spec.mixers] == [1024] * 59 + [0]


def test_transformers_saves_the_same_by_layer():
    full = {"head_dim": 512, "num_key_value_heads": 4}
    saved = {str(layer): full for layer in range(5, 60, 6)}
    others = {name: LARGE[name] for name in LARGE if "global" not in name}
    assert parse_spec(others | {"per_layer_config": saved}) == parse_spec(LARGE)


def test_the_text_half_of_a_model_of_several_media_is_read():
    text = {name: LARGE[name] for name in LARGE if name != "model_type"}
    wrapped = parse_spec({"model_type": "gemma4", "text_config": text, "eos_token_id": [1, 106]})
    assert wrapped.prefix == "model.language_model." and wrapped.eos_ids == {1, 106}
    assert wrapped.layers == parse_spec(LARGE).layers


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_kv_shared_layers": 55}, "num_kv_shared_layers = 55: no layer before them has"),
        ({"num_kv_shared_layers": 61}, "num_kv_shared_layers = 61: no layer before them has"),
        ({"enable_moe_block": True}, "num_experts = None: expected a positive integer"),
        (EXPERTS | {"top_k_experts": 9}, "top_k_experts = 9: expected at most num_experts = 8"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not"),
        ({"per_layer_config": {"5": 7}}, r"per_layer_config\[5\] = 7: expected a JSON object"),
    ],
)
def test_what_is_not_computed_is_refused(fields: dict[str, Any], words: str):
    with pytest.raises(ModelError, match=f"^{words}"):
        parse_spec(LARGE | fields)


def keys_of(spec: ModelSpec) -> list[str]:
    return [mixer.keys for mixer in spec.mixers]


def test_later_layers_take_the_keys_of_the_last_of_their_kind():
    spec = parse_spec(LARGE | {"num_hidden_layers": 18, "num_kv_shared_layers": 7})
    assert keys_of(spec) == ["own"] * 5 + ["lent"] + ["own"] * 4 + ["lent"] + ["borrowed"] * 7
    assert spec.uncut == ((5, 18), (10, 18))
    assert "model.layers.11.self_attn.k_proj.weight" in spec.unread
    own = [[bool(mixer.rows), bool(mixer.end)] for mixer in spec.mixers]
    assert own[5] == [True, False] and own[17] == [False, False], "what all tokens left, once"
    assert own[10] == own[12] == [False, True], "rings are each layer's own"


@pytest.mark.parametrize(
    ("fields", "cut", "words"),
    [
        (
            {"num_kv_shared_layers": 7},
            [6.0, 12.0],
            "layers 0 to 5 on a device of their own: later layers take the keys of layer 5, so one "
            "device must have layers 5 to 17",
        ),
        (
            {"hidden_size_per_layer_input": 256},
            [9.0, 9.0],
            "layers 0 to 8 on a device of their own: each of the 18 layers has an input of its own",
        ),
    ],
)
def test_layers_that_need_each_other_are_on_one_device(
    fields: dict[str, int], cut: list[float], words: str
):
    spec = parse_spec(LARGE | {"num_hidden_layers": 18} | fields)
    sizes = {"parallel": 1, "max_ctx_tokens": 8192, "prefill_chunk_tokens": 2048}
    devices = [offer_of(f"cuda:{i}", 140 * 2**30) for i in range(2)]
    with pytest.raises(PlacementError, match=f"^{words}"):
        make_plan(spec, devices, precision=Precision.of("bf16"), weights=cut, **sizes)
    make_plan(spec, devices[:1], precision=Precision.of("bf16"), weights=None, **sizes)


def test_layers_before_those_that_lend_may_be_elsewhere():
    spec = parse_spec(LARGE | {"num_hidden_layers": 18, "num_kv_shared_layers": 7})
    sizes = {"parallel": 1, "max_ctx_tokens": 8192, "prefill_chunk_tokens": 2048}
    devices = [offer_of(f"cuda:{i}", 140 * 2**30) for i in range(2)]
    make_plan(spec, devices, precision=Precision.of("bf16"), weights=[5.0, 13.0], **sizes)


def test_keys_that_nothing_reads_may_be_stored(tmp_path: Path):
    """Published checkpoints have them; any other tensor without a layer is an error."""
    shared = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "head_dim": 16}
    shared |= {"global_head_dim": 16, "attention_k_eq_v": False, "num_key_value_heads": 4}
    kinds = ["sliding_attention", "full_attention"] * 2
    config = LARGE | tiny.COMMON | shared | {"layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = RandomSource(torch.float32, torch.device("cpu"))
    spec = parse_spec(config)
    tensors = {name: source.read(name, shape) for name, shape in spec.shapes().items()}
    unread = "model.layers.3.self_attn.k_proj.weight"
    save_file(tensors | {unread: torch.zeros(64, 64)}, tmp_path / "model.safetensors")
    plan_report(Config(model=ModelConfig(tmp_path)))
    save_file(tensors | {"model.layers.3.k.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no layer uses the tensor 'model\.layers\.3\.k\.weight'"):
        plan_report(Config(model=ModelConfig(tmp_path)))


def planned(max_ctx_tokens: int) -> Plan:
    return make_plan(
        parse_spec(LARGE),
        [offer_of("cuda:0", 140 * 2**30)],
        precision=Precision.of("bf16"),
        weights=None,
        parallel=1,
        max_ctx_tokens=max_ctx_tokens,
        prefill_chunk_tokens=2048,
    )


def test_a_lane_of_the_large_model_stays_small():
    """A GB of windows at any context, and 80 KiB for each token."""
    [short], [long] = planned(8192).shards, planned(131072).shards
    windows = 50 * 1024 * 2 * 16 * 256 * 2
    assert short.lane_state_bytes == long.lane_state_bytes == windows
    assert short.token_bytes == 10 * 2 * 4 * 512 * 2 == 80 * 1024
    at_32k = planned(32768)
    assert at_32k.lane_bytes(at_32k.shards[0]) == windows + 32768 * 80 * 1024 < 4 * 10**9


@pytest.mark.parametrize("max_ctx_tokens", [8192, 131072])
def test_what_is_planned_is_what_is_held(max_ctx_tokens: int):
    """Of the large model, a sixteenth as wide: weights, windows and pages, to the byte."""
    narrow = {name: LARGE[name] // 16 for name in ("hidden_size", "intermediate_size")}
    narrow |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1}
    narrow |= {"head_dim": 16, "global_head_dim": 32, "vocab_size": 512, "num_hidden_layers": 12}
    spec = parse_spec(LARGE | narrow)
    plan = make_plan(
        spec,
        [offer_of("cpu:0", 2**34)],
        precision=Precision.of("fp32"),
        weights=None,
        parallel=2,
        max_ctx_tokens=max_ctx_tokens,
        prefill_chunk_tokens=64,
        verify_rows=(8,),
    )
    source = RandomSource(torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        stage = LocalStage(spec, plan, source)
    [shard] = plan.shards
    assert stage.device_bytes == {"cpu:0": plan.device_bytes(shard)}
    assert shard.lane_state_bytes == 10 * 1024 * 2 * 2 * 16 * 4, "at any context"
    stage.close()
