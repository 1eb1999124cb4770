"""What the header of a Gemma 4 says of layers of two kinds, and what it may not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from luceasync.errors import ModelError
from luceasync.gguf.layout import GgufLayout
from luceasync.gguf.model import read_model
from luceasync.models.families import GGUF_FAMILIES
from luceasync.models.families.family import ConfigFields
from luceasync.models.rope import PLAIN
from luceasync.models.spec import ModelSpec
from tests.gguf.files import header, qwen3_keys, qwen3_tensors, save

KEYS = {
    "block_count": 4,
    "attention.head_count_kv": [2, 1, 2, 1],
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.key_length_swa": 32,
    "attention.value_length_swa": 32,
    "attention.sliding_window": 24,
    "attention.sliding_window_pattern": [1, 0, 1, 0],
    "rope.freq_base_swa": 5e3,
}


def layout_of(folder: Path, without: str = "", **keys: Any) -> GgufLayout:
    """Of a header with these keys below gemma4, and no tensors that end in `without`."""
    others = {name.replace("__", "."): value for name, value in keys.items()}
    common = {name.replace("qwen3.", "gemma4."): each for name, each in qwen3_keys().items()}
    own = {f"gemma4.{name}": value for name, value in (KEYS | others).items()}
    tensors = {
        name: each
        for name, each in qwen3_tensors(4).items()
        if not without or not name.endswith(without)
    }
    begin = header(common | own | {"general.architecture": "gemma4"}, tensors)
    return GgufLayout(read_model(save(folder / "model.gguf", begin, tensors)))


def spec_of(layout: GgufLayout) -> ModelSpec:
    return GGUF_FAMILIES["gemma4"].parse(ConfigFields(layout.config))


def test_layers_have_the_sizes_of_their_kind(tmp_path: Path):
    mixers = spec_of(layout_of(tmp_path)).mixers
    found = [(m.window, m.num_kv_heads, m.head_dim, m.rope_theta, m.rope) for m in mixers]
    assert found == [(24, 2, 32, 5e3, PLAIN), (0, 1, 64, 1e6, PLAIN)] * 2


def test_keys_are_values_too_where_no_layer_that_sees_all_has_any(tmp_path: Path):
    own = spec_of(layout_of(tmp_path))
    assert not any(mixer.shares_keys for mixer in own.mixers)
    shared = spec_of(layout_of(tmp_path, without="attn_v.weight"))
    assert [mixer.shares_keys for mixer in shared.mixers] == [False, True] * 2
    part = spec_of(layout_of(tmp_path, without="1.attn_v.weight"))
    assert not any(mixer.shares_keys for mixer in part.mixers), "one is missing"


def test_layers_that_borrow_keys_may_have_wider_networks(tmp_path: Path):
    keys: dict[str, Any] = {"attention__shared_kv_layers": 2, "block_count": 6}
    keys |= {"attention__sliding_window_pattern": [1, 0, 1, 0, 1, 0]}
    keys |= {"attention__head_count_kv": [2, 1, 2, 1, 2, 1]}
    spec = spec_of(layout_of(tmp_path, **keys))
    assert [mixer.keys for mixer in spec.mixers] == ["own"] * 2 + ["lent"] * 2 + ["borrowed"] * 2
    assert spec.layers[5].feed_forward == spec.layers[0].feed_forward
    wide = spec_of(layout_of(tmp_path, feed_forward_length=[96] * 4 + [192] * 2, **keys))
    assert [layer.feed_forward.inner_size for layer in wide.layers] == [96] * 4 + [192] * 2


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"attention__value_length_swa": 16}, "value_length_swa = 16: expected 32, as key_length"),
        ({"rope__dimension_count_swa": 16}, "dimension_count_swa = 16: expected 32, as key_length"),
        ({"rope__dimension_count": 32}, "rope.dimension_count: expected the whole head"),
        ({"attention__head_count_kv": [2, 1]}, "head_count_kv: expected 4 positive integers"),
        (
            {"feed_forward_length": [96, 96, 192, 96], "attention__shared_kv_layers": 2},
            "feed_forward_length: expected 96 in all layers, or twice as much in those without",
        ),
        ({"feed_forward_length": [96, 96, 96, 192]}, "feed_forward_length: expected 96 in all"),
        ({"expert_count": 8}, "'gemma4.expert_used_count' is missing"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, keys: dict[str, Any], words: str):
    with pytest.raises(ModelError, match=words):
        layout_of(tmp_path, **keys)
