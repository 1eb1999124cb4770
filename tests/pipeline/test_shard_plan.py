"""Bytes, layers and devices of shards; refusals are one line."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.errors import PlacementError
from luceasync.models.precision import Precision
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.offer import NUM_STAGED_STATES, SHORT_ROWS, offer_of
from luceasync.pipeline.shard_plan import (
    ShardPlan,
    check_devices,
    check_weights,
    named_devices,
    plan_shard,
    split_layers,
)
from tests.pipeline.plans import plan_of, refusal
from tests.pipeline.specs import make_hybrid_spec, make_spec, make_windowed_spec


def shard_of(
    spec: ModelSpec, device: str = "cpu:0", dtype: str = "bf16", num_verify_rows: int = 0
) -> ShardPlan:
    """All 8 layers."""
    sizes = {"chunk_tokens": 64, "num_verify_rows": num_verify_rows, "num_lanes": 4}
    return plan_shard(spec, offer_of(device, 2**33), 0, 8, Precision.of(dtype), **sizes)


def test_a_gpu_has_room_for_states_on_their_way_to_host_memory():
    spec, rows = make_hybrid_spec(), max(SHORT_ROWS)
    on_gpu, on_cpu = (shard_of(spec, name, num_verify_rows=rows) for name in ("cuda:0", "cpu:0"))
    staged_bytes = on_gpu.workspace_bytes - on_cpu.workspace_bytes
    assert staged_bytes == NUM_STAGED_STATES * on_gpu.lane_state_bytes > 0


def test_windows_go_to_host_memory_from_where_they_are():
    spec = make_windowed_spec(window=2048)
    sizes = [shard_of(spec, name, num_verify_rows=max(SHORT_ROWS)) for name in ("cuda:0", "cpu:0")]
    assert sizes[0].lane_state_bytes > 2**20
    assert sizes[0].workspace_bytes == sizes[1].workspace_bytes


def test_a_gpu_has_scratch_for_a_short_chunk_and_a_cpu_needs_none():
    on_gpu, on_cpu = (shard_of(make_hybrid_spec(), device) for device in ("cuda:0", "cpu:0"))
    proposal = shard_of(make_hybrid_spec(), num_verify_rows=max(SHORT_ROWS))
    assert on_gpu.spare_scratch_bytes(4) == proposal.lane_scratch_bytes > 0
    assert on_cpu.spare_scratch_bytes(4) == 0 and not on_cpu.short_rows


def test_half_the_dtype_is_half_the_keys_and_about_half_the_weights():
    whole, half = (shard_of(make_spec(), dtype=dtype) for dtype in ("fp32", "bf16"))
    assert whole.token_bytes == 2 * half.token_bytes == 8 * 2 * 2 * 64 * 4
    assert half.weight_bytes < 0.51 * whole.weight_bytes


def test_what_verifying_needs_grows_with_the_rows_and_not_with_the_state():
    narrow = make_hybrid_spec(linear_num_key_heads=2, linear_key_head_dim=64)
    wide = make_hybrid_spec(linear_num_key_heads=1, linear_key_head_dim=128)
    sizes = [
        shard_of(s, num_verify_rows=rows)
        for s, rows in ((narrow, 8), (wide, 8), (narrow, 16), (narrow, 0))
    ]
    few, same, many, none = (size.lane_scratch_bytes for size in sizes)
    assert few == same and many == 2 * few and none == 0
    few, _, many, none = (size.workspace_bytes for size in sizes)
    assert many - none == 2 * (few - none) > 0
    assert sizes[1].lane_state_bytes > sizes[0].lane_state_bytes


# --- layer ranges -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "weights", "ranges"),
    [
        (64, [0.08, 0.46, 0.46], ((0, 5), (5, 35), (35, 64))),
        (64, [1.0], ((0, 64),)),
        (4, [1, 1, 1, 1], ((0, 1), (1, 2), (2, 3), (3, 4))),
        (4, [1e9, 1, 1], ((0, 2), (2, 3), (3, 4))),
        (4, [1, 1, 1e9], ((0, 1), (1, 2), (2, 4))),
        (10, [3, 7], ((0, 3), (3, 10))),
        (10, [1e308, 1e308], ((0, 5), (5, 10))),
    ],
)
def test_layers_are_split_by_weight(num_layers: int, weights: list[float], ranges: tuple):
    assert split_layers(num_layers, weights) == ranges


@given(
    num_layers=st.integers(1, 128),
    weights=st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=16),
)
def test_ranges_follow_each_other_and_none_is_empty(num_layers: int, weights: list[float]):
    weights = weights[:num_layers]
    ranges = split_layers(num_layers, weights)
    assert len(ranges) == len(weights)
    assert (ranges[0][0], ranges[-1][1]) == (0, num_layers)
    assert all(begin < end for begin, end in ranges)
    assert all(a[1] == b[0] for a, b in pairwise(ranges))


@given(
    st.integers(1, 64), st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.floats(0.1, 9)
)
def test_only_the_ratio_of_weights_counts(num_layers: int, weights: list[float], exponent: float):
    weights = weights[:num_layers]
    doubled = [w * 2.0 ** int(exponent) for w in weights]  # exact in floating point
    assert split_layers(num_layers, doubled) == split_layers(num_layers, weights)


def test_more_shards_than_layers_are_refused():
    words = refusal(split_layers, 2, [1, 1, 1])
    assert words.startswith("--target-devices names 3 devices, but the model has 2 layers")
    assert "at most one device for each layer" in words


# --- devices and weights ------------------------------------------------------------------------


def test_device_names_are_completed_in_their_order():
    assert check_devices(["cuda:1", "cpu", "cuda", "hip:12"]) == (
        "cuda:1",
        "cpu:0",
        "cuda:0",
        "hip:12",
    )


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "", "CPU", "0"])
def test_an_unknown_device_is_named_with_what_is_allowed(name: str):
    words = refusal(check_devices, ["cpu:0", name])
    assert words.startswith(f"--target-devices cpu:0,{name}: {name!r} is not a device")
    assert "BACKEND:INDEX with a backend of cpu, cuda, hip" in words


@pytest.mark.parametrize("names", [["cpu", "cpu:0"], ["cuda:1", "cpu", "cuda:01"]])
def test_a_device_is_named_once(names: list[str]):
    words = refusal(check_devices, names)
    assert words.startswith(f"--target-devices {','.join(names)}: ")
    assert words.endswith("is named twice")


@pytest.mark.parametrize("weights", [[], [1.0], [1.0, 2.0, 3.0]])
def test_there_is_one_weight_a_device(weights: list[float]):
    text = ",".join(f"{weight:g}" for weight in weights)
    expected = (
        f"--target-layer-split {text}: {len(weights)} weights for 2 devices; one for each device"
    )
    assert refusal(check_weights, weights, 2).startswith(expected)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), float("-inf")])
def test_a_weight_is_positive_and_finite(weight: float):
    expected = f"--target-layer-split 1,{weight:g}: {weight:g} is not allowed; "
    words = refusal(check_weights, [1.0, weight], 2)
    assert words == expected + "every weight must be positive and finite"
    assert refusal(plan_of, [4096, 4096], weights=[1.0, weight]) == words


def test_one_device_or_a_list_but_not_both():
    assert named_devices("cuda", ()) == ("cuda:0",)
    assert named_devices(None, ("cpu", "cuda:1")) == ("cpu:0", "cuda:1")
    assert named_devices(None, ()) == ()
    with pytest.raises(PlacementError, match="--target-device cuda:0: not allowed together with"):
        named_devices("cuda:0", ("cpu",))
