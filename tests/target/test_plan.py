"""A plan is what was asked, or what fits, to the byte; what cannot be is refused in one line."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.errors import PlacementError
from luceasync.models.loader import open_checkpoint
from luceasync.models.spec import read_spec
from luceasync.target.group import LocalGroup
from luceasync.target.plan import (
    Device,
    Guest,
    Plan,
    check_devices,
    check_weights,
    decode_sizes,
    make_plan,
    named_devices,
    split_layers,
)
from tests import tiny
from tests.target.specs import make_hybrid_spec, make_spec

MIB = 2**20


def plan_of(free_mib: float | list[float] = 8192, backend: str = "cpu", **asked: Any) -> Plan:
    """A plan for `make_spec()`; what is not asked is None."""
    sizes = free_mib if isinstance(free_mib, list) else [free_mib]
    devices = [Device(f"{backend}:{i}", int(mib * MIB)) for i, mib in enumerate(sizes)]
    keys = ("weights", "parallel", "max_ctx_tokens", "prefill_chunk_tokens")
    choices = {"dtype": "fp32", **dict.fromkeys(keys), **asked}
    return make_plan(choices.pop("spec", make_spec()), devices, **choices)


def refusal(call, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(PlacementError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
    assert "at most one device a layer" in words


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
    expected = f"--target-layer-split {text}: {len(weights)} weights for 2 devices; one a device"
    assert refusal(check_weights, weights, 2).startswith(expected)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), float("-inf")])
def test_a_weight_is_positive_and_finite(weight: float):
    expected = f"--target-layer-split 1,{weight:g}: {weight:g} is not allowed; "
    words = refusal(check_weights, [1.0, weight], 2)
    assert words == expected + "every weight must be positive and finite"
    assert refusal(plan_of, [4096, 4096], weights=[1.0, weight]) == words


def test_without_weights_the_free_memory_decides():
    plan = plan_of([3072, 1024])
    assert [(shard.begin, shard.end) for shard in plan.shards] == [(0, 6), (6, 8)]
    assert "layers are split by the free memory of each device" in plan.reasons


def test_the_weights_that_were_asked_decide_and_need_no_reason():
    plan = plan_of([3072, 1024], weights=[1, 3])
    assert [(shard.begin, shard.end) for shard in plan.shards] == [(0, 2), (2, 8)]
    assert not any("split" in reason for reason in plan.reasons)


# --- what fits ----------------------------------------------------------------------------------


def test_weights_that_do_not_fit_are_told_with_device_and_sizes():
    words = refusal(plan_of, [8192, 100], weights=[1, 1])
    assert words.startswith("layers [4, 8) need 0.") and "GiB on cpu:1" in words
    assert "which has 0.10 GiB free" in words and "--target-devices" in words


@pytest.mark.parametrize("chunk", [1, 63, 65, 100, -1])
def test_a_prefill_chunk_is_whole_chunks(chunk: int):
    words = refusal(plan_of, prefill_chunk_tokens=chunk)
    assert words == f"--prefill-chunk {chunk}: a positive multiple of 64 is expected"


@pytest.mark.parametrize(("backend", "expected"), [("cpu", 256), ("cuda", 2048)])
def test_the_default_prefill_chunk_is_the_platforms(backend: str, expected: int):
    assert plan_of(backend=backend).prefill_chunk_tokens == expected
    assert plan_of(backend=backend, prefill_chunk_tokens=64).prefill_chunk_tokens == 64


def test_plenty_of_memory_gives_four_lanes_of_all_that_the_model_can_use():
    plan = plan_of(16384, spec=make_spec(max_positions=4000))
    assert (plan.parallel, plan.max_ctx_tokens) == (4, 4000)
    assert "--max-ctx 4000: all that the model can use" in plan.reasons


def test_less_memory_gives_fewer_lanes_then_shorter_ones_and_says_why():
    plans = [plan_of(mib) for mib in (4096, 900, 600, 460, 360)]
    assert [plan.parallel for plan in plans] == [4, 4, 2, 1, 1]
    assert plans[0].max_ctx_tokens == 32768
    assert all(plan.max_ctx_tokens >= 8192 for plan in plans[:-1])
    assert 0 < plans[-1].max_ctx_tokens < 8192
    for plan in plans:
        assert any(line.startswith(f"--parallel {plan.parallel}: ") for line in plan.reasons)
    fits = f"--max-ctx {plans[-1].max_ctx_tokens}: what fits in memory beside the weights"
    assert fits in plans[-1].reasons


@pytest.mark.parametrize("free_mib", [320, 360, 460, 600, 4096])
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_what_we_choose_stays_within_the_memory(free_mib: int, backend: str):
    plan = plan_of(free_mib, backend, prefill_chunk_tokens=64)
    shard = plan.shards[0]
    assert plan.device_bytes(shard) + shard.workspace_bytes <= free_mib * MIB


@pytest.mark.parametrize("free_mib", [420, 440, 460])
def test_recurrent_state_takes_its_part_of_the_memory(free_mib: int):
    """2 MiB a lane and Gated DeltaNet layer, for one lane more than there are."""
    plan = plan_of(free_mib, "cuda", spec=make_hybrid_spec(), parallel=4, prefill_chunk_tokens=64)
    shard = plan.shards[0]
    assert shard.lane_state_bytes > 6 * 2 * MIB
    assert plan.device_bytes(shard) + shard.workspace_bytes <= free_mib * MIB


@pytest.mark.parametrize("max_ctx_tokens", [64, 100, 2049, 5000])
def test_a_context_that_fits_is_given_exactly_and_needs_no_reason(max_ctx_tokens: int):
    plan = plan_of(max_ctx_tokens=max_ctx_tokens, parallel=3)
    assert (plan.max_ctx_tokens, plan.parallel) == (max_ctx_tokens, 3)
    assert plan.num_pages == -(-max_ctx_tokens // 64)
    assert plan.reasons == ()


def test_a_context_that_does_not_fit_is_refused_with_the_one_that_does():
    words = refusal(plan_of, 500, max_ctx_tokens=2**20, parallel=2)
    assert words.startswith("--max-ctx 1048576 with --parallel 2 does not fit: ")
    fits = int(words.split("does not fit: ")[1].split()[0])
    assert plan_of(500, max_ctx_tokens=fits, parallel=2).max_ctx_tokens == fits
    refusal(plan_of, 500, max_ctx_tokens=fits + 1, parallel=2)


def test_a_long_context_that_was_asked_gets_as_many_lanes_as_hold_it():
    assert plan_of(500, max_ctx_tokens=16384).parallel == 1
    assert plan_of(500, max_ctx_tokens=1024).parallel == 4


def test_a_context_that_was_asked_may_take_more_of_the_memory_than_we_would():
    ours = plan_of(600, parallel=4).max_ctx_tokens
    assert plan_of(600, max_ctx_tokens=ours + ours // 2).parallel == 4


# --- the bytes that will be held ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", [(1,), (3, 1), (1, 2, 1)])
def test_planned_bytes_are_loaded_bytes(family, tmp_path: Path, weights, tied: bool, dtype: str):
    model_dir = tiny.save(tiny.build(family, tied=tied), tmp_path)
    spec = read_spec(model_dir)
    asked = {"parallel": 2, "max_ctx_tokens": 100, "dtype": dtype, "verify_rows": (3, 8)}
    plan = plan_of([4096] * len(weights), spec=spec, weights=weights, **asked)
    with open_checkpoint(model_dir) as checkpoint:
        group = LocalGroup(spec, plan, checkpoint)
    planned = {shard.device: plan.device_bytes(shard) for shard in plan.shards}
    assert group.device_bytes == planned
    group.close()


def test_room_is_left_for_what_is_verified():
    plain, verifying = plan_of(600, parallel=4), plan_of(600, parallel=4, verify_rows=[60])
    assert verifying.max_ctx_tokens < plain.max_ctx_tokens
    shard = verifying.shards[0]
    assert verifying.device_bytes(shard) + shard.workspace_bytes <= 600 * MIB


@pytest.mark.parametrize("verify_rows", [(), (4,), (16,), (60,)])
def test_a_gpu_has_scratch_for_a_short_chunk_or_for_all_proposals(verify_rows: tuple[int, ...]):
    plan = plan_of(4096, "cuda", spec=make_hybrid_spec(), parallel=2, verify_rows=verify_rows)
    [shard] = plan.shards
    num_rows = plan.num_scratch_rows(shard)
    assert num_rows == max(64, 2 * max(verify_rows, default=0))
    lanes = 2 * (plan.num_pages * 64 * shard.token_bytes + shard.lane_state_bytes)
    rest = plan.device_bytes(shard) - shard.weight_bytes - lanes - shard.lane_state_bytes
    assert rest == num_rows * shard.short_scratch_bytes // 64


# --- batch sizes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_cpu", "dtype", "parallel", "sizes"),
    [
        (False, "bf16", 1, (1,)),
        (False, "bf16", 4, (1, 2, 4)),
        (False, "fp32", 5, (1, 2, 4, 5)),
        (False, "bf16", 8, (1, 2, 4, 8)),
        (True, "bf16", 3, (1, 2, 3)),
        (True, "fp32", 1, (1,)),
        (True, "fp32", 3, (3,)),
        (True, "fp32", 4, (4,)),
        (True, "fp32", 6, (4, 5, 6)),
    ],
)
def test_decode_runs_in_these_batch_sizes(on_cpu, dtype, parallel, sizes):
    assert decode_sizes(on_cpu, dtype, parallel) == sizes


@pytest.mark.parametrize(
    ("dtype", "num_entries", "num_rows", "size"),
    [("fp32", 1, 1, 4), ("fp32", 1, 3, 2), ("fp32", 1, 8, 1), ("fp32", 3, 8, 3), ("bf16", 1, 2, 1)],
)
def test_a_verify_pass_on_cpus_is_filled_up_to_as_many_rows(dtype, num_entries, num_rows, size):
    plan = plan_of(600, dtype=dtype, parallel=4)
    assert plan.verify_size(num_entries, num_rows) == size


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("parallel", range(1, 20))
def test_every_number_of_lanes_has_a_batch_size(on_cpu: bool, parallel: int):
    sizes = decode_sizes(on_cpu, "fp32", parallel)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] >= 1 and sizes[-1] == parallel


def test_one_device_or_a_list_but_not_both():
    assert named_devices("cuda", ()) == ("cuda:0",)
    assert named_devices(None, ("cpu", "cuda:1")) == ("cpu:0", "cuda:1")
    assert named_devices(None, ()) == ()
    with pytest.raises(PlacementError, match="--target-device cuda:0: not allowed together with"):
        named_devices("cuda:0", ("cpu",))


@pytest.mark.parametrize(("device", "small"), [("cpu:0", True), ("cuda:0", True)])
def test_a_tiny_model_needs_no_threads_on_the_cpu(device: str, small: bool):
    plan = make_plan(
        make_spec(),
        [Device(device, 2**34)],
        dtype="bf16",
        weights=None,
        parallel=1,
        max_ctx_tokens=64,
        prefill_chunk_tokens=None,
    )
    assert plan.is_small_on_cpu is small
    large = dataclasses.replace(plan.shards[0], weight_bytes=2**30)
    heavy = dataclasses.replace(plan, shards=(large,))
    assert heavy.is_small_on_cpu is (device != "cpu:0")


# --- a drafter beside it -------------------------------------------------------------------------


def guest_on(name: str, weight_mib: int = 0, token_bytes: int = 0, lane_mib: int = 0) -> Guest:
    return Guest(Device(name, 1024 * MIB), weight_mib * MIB, token_bytes, lane_mib * MIB)


@pytest.mark.parametrize("guest", [guest_on("cpu:0", 100), guest_on("cpu:0", lane_mib=20)])
def test_what_a_guest_takes_is_not_there_for_lanes(guest: Guest):
    alone, beside = plan_of(800, parallel=4), plan_of(800, parallel=4, guest=guest)
    assert beside.max_ctx_tokens < alone.max_ctx_tokens
    assert beside.shards == alone.shards


def test_a_guest_keeps_tokens_of_a_lane_more_than_there_are():
    token_bytes = plan_of(800, parallel=4).shards[0].token_bytes
    alone, beside = (
        plan_of(800, parallel=4, guest=guest)
        for guest in (None, guest_on("cpu:0", token_bytes=token_bytes))
    )
    assert beside.max_ctx_tokens == pytest.approx(alone.max_ctx_tokens * 4 / (4 + 5), abs=64)


def test_a_guest_on_its_own_device_must_fit_there():
    assert plan_of(800, parallel=4, guest=guest_on("cuda:0", 100)) == plan_of(800, parallel=4)
    with pytest.raises(PlacementError, match=r"the drafter's layers need 1.95 GiB on cuda:0"):
        plan_of(800, guest=guest_on("cuda:0", 2000))
    tight = plan_of(800, parallel=4, guest=guest_on("cuda:0", token_bytes=2**20))
    assert tight.max_ctx_tokens < 256
