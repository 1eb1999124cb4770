"""What a drafter's config.json says, and what is refused because it does not fit the target."""

import json

import pytest

from luceasync.errors import ConfigError, ModelError
from luceasync.models.files import parse_spec
from luceasync.speculation.dflash.draft_config import (
    adjusted,
    default_taps,
    parse_draft_spec,
    read_draft_spec,
)
from luceasync.speculation.dflash.draft_spec import DraftLayerSpec
from tests import tiny

TARGET = parse_spec(
    {
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "eos_token_id": 2,
    }
)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}


def parse(**fields):
    return parse_draft_spec(tiny.draft_config(**fields), TARGET)


def test_a_published_config_is_read():
    spec = parse()
    assert (spec.block, spec.trained_block, spec.mask_token) == (8, 8, tiny.MASK_TOKEN)
    assert (spec.taps, spec.feature_size, spec.num_layers) == ((0, 1, 2), 192, 2)
    assert (spec.attention.rope_theta, spec.attention.rotary_dim) == (10000.0, 16)
    assert spec.layers == (DraftLayerSpec(None, is_causal=False),) * 2


def test_block_size_may_be_inside_and_the_rest_outside():
    inside = {"block_size": 6, "mask_token_id": 3}
    inner = parse(num_hidden_layers=1, block_size=None, dflash_config=inside)
    outer = parse(dflash_config=None, mask_token_id=9, target_layer_ids=[3])
    assert (inner.block, inner.taps) == (6, (2,))
    assert (outer.mask_token, outer.taps) == (9, (3,))


def test_sliding_layers_are_causal_in_the_block_unless_told():
    assert parse(**SLIDING).layers == (DraftLayerSpec(24, True), DraftLayerSpec(None, False))
    told = parse(**SLIDING, is_causal=False).layers
    assert told == (DraftLayerSpec(24, False), DraftLayerSpec(None, False))


def test_the_drafters_of_laguna_are_read():
    kind = "sliding_attention"
    nested = {"full_attention": {"rope_type": "yarn", "factor": 32.0}}
    nested[kind] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    fields = {"layer_types": [kind] * 2, "sliding_window": 24, "rope_parameters": nested}
    fields |= {"architectures": ["DFlashLagunaForCausalLM"], "rope_theta": None}
    spec = parse(**fields)
    assert (spec.gate, spec.norms_context, spec.attention.rope_theta) == ("head", True, 10000.0)
    assert spec.layers == (DraftLayerSpec(24, True),) * 2
    assert spec.shapes["layers.1.self_attn.g_proj.weight"] == (4, 64)
    assert parse(**fields, gating="per-element").gate == "element"
    assert (parse(**fields, gating=False).gate, parse().gate) == ("", "")


def test_layer_types_follow_from_max_window_layers():
    fields = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 24}
    assert [layer.window for layer in parse(**fields).layers] == [None, 24]
    assert [layer.window for layer in parse(sliding_window=24).layers] == [None, None]


def test_rope_parameters_hold_the_theta():
    rope = {"rope_theta": 1e7, "rope_type": "default"}
    assert parse(rope_parameters=rope).attention.rope_theta == 1e7


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 128}, "hidden_size = 128, but the target has 64"),
        ({"vocab_size": 600}, "vocab_size = 600, but the target has 512"),
        ({"num_target_layers": 5}, "num_target_layers = 5, but the target has 4"),
        ({"target_layer_ids": [0, 4]}, "from 0 to 3"),
        ({"target_layer_ids": [1, 1]}, "different layers"),
        ({"target_layer_ids": "all"}, "a list of layer numbers"),
        ({"mask_token_id": 512}, "from 0 to 511"),
        ({"mask_token_id": None}, "mask_token_id = None"),
        ({"mask_token_id": 2}, "stop token"),
        ({"block_size": 1}, "at least 2"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window = None"),
        ({"num_key_value_heads": 3}, "equal groups"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "0.25"),
        ({"is_causal": "yes"}, "is_causal = 'yes'"),
        ({"dflash_config": [1]}, "dflash_config"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(fields, words):
    config = tiny.draft_config(**fields)
    inner = {name: fields[name] for name in fields if name in tiny.DRAFT["dflash_config"]}
    config["dflash_config"] = fields.get("dflash_config") or {**config["dflash_config"], **inner}
    with pytest.raises(ModelError, match=words.replace("(", r"\(")):
        parse_draft_spec(config, TARGET)


def test_a_refusal_names_the_file(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_draft_spec(tmp_path, TARGET)
    (tmp_path / "config.json").write_text(json.dumps(tiny.draft_config(block_size=0)))
    with pytest.raises(ModelError, match=r"config\.json: block_size = 0"):
        read_draft_spec(tmp_path, TARGET)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        read_draft_spec(tmp_path, TARGET)


@pytest.mark.parametrize(
    ("num_target_layers", "taps"),
    [
        (24, (1, 6, 11, 16, 21)),
        (32, (1, 8, 15, 22, 29)),
        (36, (1, 9, 17, 25, 33)),
        (40, (1, 10, 19, 28, 37)),
        (64, (1, 16, 31, 46, 61)),
    ],
)
def test_taps_that_are_not_told_are_the_published_ones(num_target_layers, taps):
    assert default_taps(num_target_layers, 5) == taps
    assert default_taps(num_target_layers, 1) == (num_target_layers // 2,)


def test_rings_follow_windows_and_limits():
    spec = parse(**SLIDING)
    assert [spec.capacity(layer, 4000) for layer in (0, 1)] == [64, 4032]
    assert adjusted(spec, ctx_max_tokens=100).capacity(1, 4000) == 128
    assert adjusted(spec, swa_window_tokens=1000).capacity(0, 512) == 512


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"block": 9}, "--draft-block 9: this drafter proposes blocks of 2 to 8"),
        ({"block": 1}, "--draft-block 1"),
        ({"swa_window_tokens": 64}, "--draft-swa-window 64: this drafter has no sliding layers"),
    ],
)
def test_a_flag_that_cannot_be_honoured_is_named(flags, words):
    with pytest.raises(ConfigError, match=words):
        adjusted(parse(), **flags)


def test_flags_adjust_what_they_name_only():
    spec = adjusted(parse(**SLIDING), block=4, swa_window_tokens=12, ctx_max_tokens=512)
    assert (spec.block, spec.trained_block, spec.ctx_max_tokens) == (4, 8, 512)
    assert [layer.window for layer in spec.layers] == [12, None]


def test_a_drafter_says_how_far_it_has_learned_to_look_back():
    told = tiny.draft_config()["dflash_config"] | {"ctx_max_tokens": 512}
    spec = parse(dflash_config=told)
    assert (parse().ctx_max_tokens, spec.ctx_max_tokens) == (None, 512)
    assert spec.capacity(0, 4000) == 512
    assert adjusted(spec, ctx_max_tokens=1024).ctx_max_tokens == 1024
    with pytest.raises(ModelError, match="ctx_max_tokens = 0"):
        parse(dflash_config=told | {"ctx_max_tokens": 0})
