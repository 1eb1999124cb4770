"""What follows from what a drafter is: the layers it taps, its rings, what flags change."""

import pytest

from luceasync.errors import ConfigError, ModelError
from luceasync.speculation.dflash.draft_config import adjusted, default_taps, parse_draft_spec
from tests import tiny
from tests.speculation.test_draft_config import SLIDING, TARGET


def parse(**fields):
    return parse_draft_spec(tiny.draft_config(**fields), TARGET)


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
