"""A config is understood as transformers understands it, or refused in words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from luceasync.errors import ModelError
from luceasync.models.files import parse_spec, read_spec
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.delta import DeltaSpec
from luceasync.models.rope import LinearRope
from luceasync.models.spec import ModelSpec
from tests import tiny

BOTH = ("qwen3", "qwen3_5_text")


def config_of(model_type: str, **fields: Any) -> dict[str, Any]:
    """A small config of the model type; fields that are None are left out."""
    config = {
        "model_type": model_type,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        **fields,
    }
    return {name: value for name, value in config.items() if value is not None}


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as caught:
        parse_spec(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_as_transformers_counts_them(family, tied, tmp_path: Path):
    model = tiny.build(family, tied=tied)
    model.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    assert spec.tied_embeddings is tied
    assert spec.num_parameters == model.num_parameters()


def test_every_tensor_has_the_name_and_shape_that_transformers_writes(family):
    model = tiny.build(family)
    spec = parse_spec(model.config.to_dict())
    ours = {
        f"{spec.prefix}layers.{layer}.{name}": shape
        for layer in range(spec.num_layers)
        for name, shape in spec.layer_shapes(layer).items()
    }
    theirs = {n: tuple(p.shape) for n, p in model.named_parameters() if ".layers." in n}
    assert ours == theirs


def test_a_saved_config_is_read_in_full(family, tiny_dir: Path):
    spec = read_spec(tiny_dir)
    assert (spec.family, spec.prefix, spec.num_layers) == (family, "model.", 4)
    assert (spec.vocab_size, spec.max_positions, spec.eos_ids) == (512, 2048, {2})
    attention = spec.mixers[-1]
    assert attention.rotary_dim == (16 if family == "qwen3" else 4)
    assert attention.gated is (family == "qwen3_5")
    assert spec.norm_offset == (0.0 if family == "qwen3" else 1.0)


# --- files --------------------------------------------------------------------------------------


def test_a_missing_config_is_named(tmp_path: Path):
    with pytest.raises(ModelError, match=f"{re.escape(str(tmp_path))}: no config.json"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[]", "expected a JSON object, got list"),
        (b'{"model_type": "mamba"}', "model_type 'mamba' is not supported; supported: "),
        (b"{}", "model_type None is not supported"),
    ],
)
def test_a_file_that_is_no_config_we_know_is_named(tmp_path: Path, content: bytes, words: str):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=re.escape(words)) as caught:
        read_spec(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))


def test_a_refused_field_comes_with_the_path_of_its_file(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3", vocab_size=0)))
    with pytest.raises(ModelError, match=r"config\.json: vocab_size = 0"):
        read_spec(tmp_path)


# --- fields -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, [64]])
@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("model_type", BOTH)
def test_sizes_are_positive_integers(model_type: str, name: str, value: object):
    expected = f"{name} = {value!r}: expected a positive integer"
    assert refusal(config_of(model_type, **{name: value})) == expected


@pytest.mark.parametrize("name", ["vocab_size", "intermediate_size", "num_hidden_layers"])
@pytest.mark.parametrize("model_type", BOTH)
def test_a_size_without_default_must_be_there(model_type: str, name: str):
    assert refusal(config_of(model_type, **{name: None})).startswith(f"{name} = None")


@pytest.mark.parametrize("value", [0, -1e-6, float("nan"), "1e-6", True])
def test_the_norms_epsilon_is_a_positive_number(value: object):
    assert f"rms_norm_eps = {value!r}" in refusal(config_of("qwen3", rms_norm_eps=value))


@pytest.mark.parametrize(
    ("model_type", "name", "value"),
    [
        ("qwen3", "attention_bias", True),
        ("qwen3_5_text", "attention_bias", True),
        ("qwen3", "hidden_act", "gelu"),
        ("qwen3_5_text", "hidden_act", "gelu"),
    ],
)
def test_what_is_not_implemented_is_refused(model_type: str, name: str, value: object):
    assert f"{name} = {value!r} is not supported" in refusal(config_of(model_type, **{name: value}))


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_rope_that_follows_the_text_is_refused(field: str, key: str, rope_type: str):
    config = config_of("qwen3", **{field: {key: rope_type, "factor": 4.0}})
    assert refusal(config).startswith(f"rope_type {rope_type!r} is not supported")


def test_key_value_heads_divide_the_heads():
    expected = "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3"
    assert refusal(config_of("qwen3", num_key_value_heads=3)) == expected


def test_linear_key_heads_divide_the_value_heads():
    config = config_of("qwen3_5_text", linear_num_key_heads=3, linear_num_value_heads=4)
    expected = "linear_num_value_heads = 4 is not a multiple of linear_num_key_heads = 3"
    assert refusal(config) == expected


@pytest.mark.parametrize(
    "listed", [["full_attention"] * 3, ["full_attention"] * 5, ["full_attention", "mamba"] * 2]
)
def test_layer_types_of_wrong_length_or_name_are_refused(listed: list[str]):
    words = refusal(config_of("qwen3_5_text", layer_types=listed))
    assert words.startswith(f"layer_types = {listed!r}: expected 4 entries")


@pytest.mark.parametrize("value", ["2", [1, "2"], 1.5, {"id": 2}])
def test_end_tokens_are_integers(value: object):
    assert f"eos_token_id = {value!r}" in refusal(config_of("qwen3", eos_token_id=value))


@pytest.mark.parametrize(
    ("value", "expected"), [(None, frozenset()), (7, {7}), (0, {0}), ([5, 6], {5, 6})]
)
def test_end_tokens_are_none_one_or_many(value: object, expected: set[int]):
    assert parse_spec(config_of("qwen3", eos_token_id=value)).eos_ids == expected


# --- rope, layers, wrapper ----------------------------------------------------------------------

ROPE = {"rope_theta": 5e6, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize("rope", [ROPE, {"rope_parameters": ROPE | {"rope_type": "default"}}])
@pytest.mark.parametrize("model_type", BOTH)
def test_both_ways_to_write_the_rope_mean_the_same(model_type: str, rope: dict):
    attention = parse_spec(config_of(model_type, **rope)).mixers[-1]
    rotary_dim = 8 if model_type == "qwen3_5_text" else 16
    assert (attention.rope_theta, attention.rotary_dim) == (5e6, rotary_dim)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("factor", [0.5, 0.19, 2.0])
def test_whole_heads_are_rotated_where_transformers_does_so(model_type: str, factor: float):
    spec = parse_spec(config_of(model_type, partial_rotary_factor=factor))
    assert spec == parse_spec(config_of(model_type))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "smollm3", *BOTH])
@pytest.mark.parametrize("name", ["head_dim", "num_key_value_heads", "max_position_embeddings"])
def test_a_field_that_is_missing_has_transformers_default(model_type: str, name: str):
    sizes = {"num_attention_heads": 64, "hidden_size": 2048, "max_position_embeddings": 7}
    config = config_of(model_type, **sizes | {name: None})
    windows = {"sliding_window": None} if model_type == "mistral" else {}
    spec = parse_spec(config | windows)
    attention = spec.mixers[-1]
    ours = {
        "num_key_value_heads": attention.num_kv_heads,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tied_embeddings,
    }
    theirs = AutoConfig.for_model(**config)
    assert ours == {field: getattr(theirs, field) for field in ours}
    assert attention.rope_theta == theirs.rope_parameters["rope_theta"]
    assert attention.head_dim == getattr(theirs, "head_dim", None) or 2048 // 64


def test_rope_parameters_win_over_the_top_level():
    config = config_of("qwen3", rope_theta=1.0, rope_parameters={"rope_theta": 2.0})
    assert parse_spec(config).mixers[-1].rope_theta == 2.0


def test_trees_reach_as_far_as_the_widest_convolution():
    assert parse_spec(config_of("qwen3")).reach == 1
    assert parse_spec(config_of("qwen3_5_text", linear_conv_kernel_dim=5)).reach == 5


def test_layer_types_follow_the_interval_where_they_are_not_listed():
    spec = parse_spec(config_of("qwen3_5_text", num_hidden_layers=6, full_attention_interval=3))
    kinds = [type(mixer) for mixer in spec.mixers]
    assert kinds == [DeltaSpec, DeltaSpec, AttentionSpec] * 2


def wrapper(**fields: Any) -> ModelSpec:
    text = config_of("qwen3_5_text", **fields.pop("text", {}))
    return parse_spec({"model_type": "qwen3_5", "text_config": text, **fields})


def test_the_vision_wrapper_has_its_own_prefix_and_the_same_text_model():
    plain = parse_spec(config_of("qwen3_5_text"))
    assert wrapper().prefix == "model.language_model."
    assert wrapper().num_parameters == plain.num_parameters
    assert wrapper().layer_shapes(0) == plain.layer_shapes(0)


def test_the_wrapper_may_say_what_its_text_part_leaves_out():
    spec = wrapper(tie_word_embeddings=True, eos_token_id=9)
    assert (spec.tied_embeddings, spec.eos_ids) == (True, {9})


# --- what would run wrongly without a word ------------------------------------------------------


def test_an_old_scaled_rope_counts_beside_a_new_plain_one():
    plain, scaled = {"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}
    spec = parse_spec(config_of("qwen3", rope_parameters=plain, rope_scaling=scaled))
    assert spec.mixers[-1].rope == LinearRope(4.0)


@pytest.mark.parametrize("value", ["abc", 0, -1.0, True, float("inf")])
@pytest.mark.parametrize("name", ["rope_theta", "partial_rotary_factor"])
def test_the_ropes_numbers_are_positive(name: str, value: object):
    expected = f"{name} = {value!r}: expected a positive number"
    assert refusal(config_of("qwen3", **{name: value})) == expected
    assert refusal(config_of("qwen3", rope_parameters={name: value})) == expected


@pytest.mark.parametrize("factor", [2.0, 0.19, 0.01])
def test_an_even_part_of_the_head_is_rotated(factor: float):
    words = refusal(config_of("qwen3_5_text", partial_rotary_factor=factor))
    assert words.startswith(f"partial_rotary_factor = {factor:g} rotates ")


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("value", ["yarn", [1]])
def test_the_rope_is_an_object(name: str, value: object):
    expected = f"{name} = {value!r}: expected a JSON object"
    assert refusal(config_of("qwen3", **{name: value})) == expected


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        ("llama", "LlamaForCausalLMEagle3"),
        ("llama", "LlamaForSequenceClassification"),
        ("llama", "LlamaModel"),
        ("qwen2", "Qwen2ForRewardModel"),
        ("mistral", "MistralModel"),
        ("qwen3", "DFlashDraftModel"),
        ("qwen3", "Qwen3ForTokenClassification"),
        ("qwen3", "Qwen3ForRewardModel"),
        ("qwen3_5_text", "Qwen3_5ForSequenceClassification"),
        ("qwen3_5", "Qwen3_5Model"),
    ],
)
def test_what_is_no_language_model_is_refused(model_type: str, named: str):
    words = refusal(config_of(model_type, architectures=[named]))
    assert words.startswith(f"architectures = ['{named}'] is not supported; expected ")


@pytest.mark.parametrize("named", ["LlamaForCausalLM", {"a": 1}, 3])
def test_architectures_are_a_list(named: object):
    assert f"architectures = {named!r}: expected a list" in refusal(
        config_of("llama", architectures=named)
    )


@pytest.mark.parametrize("named", [None, [], ["LlamaForCausalLM"], ["X", "LlamaForCausalLM"]])
def test_a_language_model_is_named_or_nothing_is(named: object):
    assert parse_spec(config_of("llama", architectures=named)) == parse_spec(config_of("llama"))


def test_the_wrappers_text_part_is_an_object():
    words = refusal({"model_type": "qwen3_5", "text_config": [1]})
    assert words == "text_config = [1]: expected a JSON object"


@pytest.mark.parametrize("listed", [4, "full", {"a": 1}, [["full_attention"]] * 4])
def test_layer_types_are_a_list_of_names(listed: object):
    assert f"layer_types = {listed!r}" in refusal(config_of("qwen3_5_text", layer_types=listed))


@pytest.mark.parametrize("listed", [["sliding_attention"] * 4, ["full_attention"] * 3])
def test_qwen3_has_full_attention_in_every_layer(listed: list[str]):
    assert f"layer_types = {listed!r}" in refusal(config_of("qwen3", layer_types=listed))


@pytest.mark.parametrize("value", [True, [1, False]])
def test_an_end_token_is_no_boolean(value: object):
    assert f"eos_token_id = {value!r}" in refusal(config_of("qwen3", eos_token_id=value))
