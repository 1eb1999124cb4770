"""As many lanes as asked or as fit, whole or in pools; refusals are one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from luceasync.errors import PlacementError
from luceasync.models.files import read_spec
from luceasync.models.formats.safetensors import open_checkpoint
from luceasync.pipeline.capacity import DraftFootprint, Pool, PoolRequest
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import MIN_NODE_TOKENS, Plan
from luceasync.pipeline.stage import LocalStage
from tests import tiny
from tests.pipeline.plans import MIB, plan_of, refusal
from tests.pipeline.specs import make_hybrid_spec, make_spec


def test_weights_that_do_not_fit_are_told_with_device_and_sizes():
    words = refusal(plan_of, [8192, 100], weights=[1, 1])
    assert words.startswith("layers [4, 8) need 0.") and "GiB on cpu:1" in words
    assert "which has 0.10 GiB free" in words and "--target-devices" in words


def test_plenty_of_memory_gives_four_lanes_of_all_that_the_model_can_use():
    plan = plan_of(16384, spec=make_spec(max_positions=4000))
    assert (plan.parallel, plan.max_ctx_tokens) == (4, 4000)
    assert "--max-ctx 4000: all that the model can use" in plan.reasons


def test_less_memory_gives_fewer_lanes_then_shorter_ones_and_says_why():
    plans = [plan_of(mib) for mib in (4096, 2000, 1200, 600, 360)]
    assert [plan.parallel for plan in plans] == [4, 2, 1, 1, 1]
    assert all(plan.max_ctx_tokens == 32768 for plan in plans[:3])
    assert 32768 > plans[3].max_ctx_tokens > plans[4].max_ctx_tokens > 0
    for plan in plans:
        assert any(line.startswith(f"--parallel {plan.parallel}: ") for line in plan.reasons)
    fits = f"--max-ctx {plans[-1].max_ctx_tokens}: what fits beside the weights in the memory "
    assert plans[-1].reasons[-1].startswith(fits)


@pytest.mark.parametrize("free_mib", [700, 1200, 2000])
def test_there_are_more_lanes_only_where_each_keeps_what_an_agent_needs(free_mib: int):
    """A long-context model: lanes of 32,768 tokens, or one lane with all if two would have less."""
    spec = make_spec(max_positions=2**18)
    plan = plan_of(free_mib, spec=spec)
    more = plan_of(free_mib, spec=spec, parallel=2 * plan.parallel)
    assert plan.parallel == 1 or plan.max_ctx_tokens >= 32768
    assert more.max_ctx_tokens < 32768


def test_fewer_lanes_than_usual_say_what_more_of_them_would_have():
    reason = plan_of(1200).reasons[0]
    each = plan_of(1200, parallel=4).max_ctx_tokens
    assert reason.endswith(f"that can hold 32768 tokens each; --parallel 4 would have {each} each")
    assert "not even one lane can hold 32768 tokens" in plan_of(600).reasons[0]


@pytest.mark.parametrize("free_mib", [460, 600, 900])
def test_a_context_that_is_short_says_how_much_may_be_asked_for(free_mib: int):
    plan = plan_of(free_mib, parallel=4)
    most, alone = (
        int(plan.reasons[-1].split(before)[1].split()[0]) for before in ("up to ", "named, ")
    )
    assert plan.max_ctx_tokens < most < alone
    assert plan.reasons[-1].endswith(f"{alone} with --parallel 1")
    assert plan_of(free_mib, parallel=4, max_ctx_tokens=most).max_ctx_tokens == most
    refusal(plan_of, free_mib, parallel=4, max_ctx_tokens=most + 64)
    assert plan_of(free_mib, parallel=1, max_ctx_tokens=alone).max_ctx_tokens == alone


def test_a_context_that_is_short_for_one_lane_says_what_helps():
    helps = "more with more devices (--target-devices) or bf16 instead of fp32 (--dtype)"
    assert plan_of(360).reasons[-1].endswith(helps)


@pytest.mark.parametrize("free_mib", [320, 360, 460, 600, 4096])
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_what_we_choose_stays_within_the_memory(free_mib: int, backend: str):
    plan = plan_of(free_mib, backend, prefill_chunk_tokens=64)
    shard = plan.shards[0]
    assert plan.device_bytes(shard) + shard.workspace_bytes <= free_mib * MIB


@pytest.mark.parametrize("free_mib", [420, 440, 460])
def test_recurrent_state_takes_its_part_of_the_memory(free_mib: int):
    """2 MiB for each lane and Gated DeltaNet layer, with one extra lane."""
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


# --- a drafter beside it -------------------------------------------------------------------------


def drafter_on(
    name: str, weight_mib: int = 0, token_bytes: int = 0, lane_mib: int = 0
) -> DraftFootprint:
    return DraftFootprint(offer_of(name, 1024 * MIB), weight_mib * MIB, token_bytes, lane_mib * MIB)


@pytest.mark.parametrize("drafter", [drafter_on("cpu:0", 100), drafter_on("cpu:0", lane_mib=20)])
def test_what_a_drafter_takes_is_not_there_for_lanes(drafter: DraftFootprint):
    alone, beside = plan_of(800, parallel=4), plan_of(800, parallel=4, drafter=drafter)
    assert beside.max_ctx_tokens < alone.max_ctx_tokens
    assert beside.shards == alone.shards


def test_a_drafter_keeps_tokens_of_one_extra_lane():
    token_bytes = plan_of(800, parallel=4).shards[0].token_bytes
    alone, beside = (
        plan_of(800, parallel=4, drafter=drafter)
        for drafter in (None, drafter_on("cpu:0", token_bytes=token_bytes))
    )
    assert beside.max_ctx_tokens == pytest.approx(alone.max_ctx_tokens * 4 / (4 + 5), abs=64)


def test_a_drafter_on_its_own_device_must_fit_there():
    assert plan_of(800, parallel=4, drafter=drafter_on("cuda:0", 100)) == plan_of(800, parallel=4)
    with pytest.raises(PlacementError, match=r"the drafter's layers need 1.95 GiB on cuda:0"):
        plan_of(800, drafter=drafter_on("cuda:0", 2000))
    tight = plan_of(800, parallel=4, drafter=drafter_on("cuda:0", token_bytes=2**20))
    assert tight.max_ctx_tokens < 256


def pooled(
    num_tokens: int | None,
    *,
    pins: tuple[tuple[int, int], ...] = (),
    host_bytes: int = 2**40,
    policy: Any = "qk",
    **asked: Any,
) -> Plan:
    pool = PoolRequest(num_tokens, Pool(policy, 64, pins), host_bytes)
    return plan_of(pool=pool, **{"parallel": 2, "max_ctx_tokens": 32768, **asked})


def test_a_lane_has_the_pages_that_were_asked_for_whatever_its_context_is():
    small, large = (pooled(8192, max_ctx_tokens=n) for n in (8192, 32768))
    assert small.num_pages == large.num_pages == 128
    for one, other in zip(small.shards, large.shards, strict=True):
        assert small.lane_bytes(one) == large.lane_bytes(other)


def test_auto_is_an_eighth_of_the_context():
    assert pooled(None, max_ctx_tokens=131072).num_pages * 64 == 16384
    assert pooled(None).num_pages * 64 == 8192


def test_a_pool_needs_no_more_than_the_context():
    assert pooled(8192, max_ctx_tokens=1024).num_pages == 16


@pytest.mark.parametrize(("pool", "asked", "planned"), [(448, 256, 192), (1024, 2048, 512)])
def test_a_prompts_chunk_leaves_half_of_the_pool(pool: int, asked: int, planned: int):
    assert pooled(pool, prefill_chunk_tokens=asked).prefill_chunk_tokens == planned
    assert pooled(8192, prefill_chunk_tokens=asked).prefill_chunk_tokens == asked


def test_a_pool_without_a_victim_is_refused_by_its_minimum():
    assert refusal(pooled, 447) == "--kvflash 447: at least 448 tokens are expected"
    words = refusal(pooled, 448, verify_rows=(400,))
    assert words == "--kvflash 448: at least 576 tokens are expected"


def test_pins_that_leave_no_victim_are_refused_with_what_fits():
    assert pooled(1024, pins=((0, 64), (640, 1000)), prefill_chunk_tokens=256).num_pages == 16
    words = refusal(pooled, 1024, pins=((0, 64), (640, 1280)), prefill_chunk_tokens=256)
    assert words == (
        "--kvflash-pin-spans 0:64,640:1280: 10 chunks of 64 tokens would be "
        "pinned; at most 9 of 16 may be, besides the first"
    )


def test_host_memory_must_hold_what_all_lanes_may():
    token_bytes = sum(shard.token_bytes for shard in pooled(1024).shards)
    needed = 2 * 32768 * token_bytes
    words = refusal(pooled, 1024, host_bytes=needed - 1)
    assert f"--prefix-cache-memory {needed - 1}: " in words and f"{needed} bytes" in words
    assert pooled(1024, host_bytes=needed).host_bytes == needed


def test_an_open_context_is_what_host_memory_holds():
    token_bytes = sum(shard.token_bytes for shard in pooled(1024).shards)
    plan = pooled(1024, host_bytes=2 * 2048 * token_bytes, max_ctx_tokens=None)
    assert plan.max_ctx_tokens == 2048
    assert "--max-ctx 2048: what host memory holds" in plan.reasons


def test_a_pool_that_no_device_holds_is_refused():
    words = refusal(pooled, 2**21, max_ctx_tokens=2**22, free_mib=512)
    assert words.startswith("--kvflash 2097152 with --parallel 2 does not fit: ")


def test_cuts_come_before_their_tokens_would_leave():
    large = pooled(8192, prefill_chunk_tokens=2048, max_ctx_tokens=16384)
    assert large.most_uncut_tokens == 126 * 64 - 2 * 2048
    assert plan_of(parallel=2, max_ctx_tokens=4096).most_uncut_tokens == 4096


def test_a_small_pool_does_not_make_small_nodes():
    assert pooled(1024, prefill_chunk_tokens=256).most_uncut_tokens == MIN_NODE_TOKENS


@pytest.mark.parametrize("policy", ["qk", "lru"])
def test_planned_bytes_are_loaded_bytes(family: str, tmp_path: Path, policy: str):
    model_dir = tiny.save(tiny.build(family), tmp_path)
    spec = read_spec(model_dir)
    plan = pooled(512, spec=spec, policy=policy, max_ctx_tokens=2048, verify_rows=(3, 8))
    with open_checkpoint(model_dir) as checkpoint:
        stage = LocalStage(spec, plan, checkpoint)
    planned = {shard.device: plan.device_bytes(shard) for shard in plan.shards}
    assert stage.device_bytes == planned
    stage.close()
