"""Pools of pages: what is chosen, what is refused, and the bytes that will be held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from luceasync.models.files import read_spec
from luceasync.models.formats.safetensors import open_checkpoint
from luceasync.pipeline.capacity import Pool, PoolRequest
from luceasync.pipeline.plan import MIN_NODE_TOKENS, Plan
from luceasync.pipeline.stage import LocalStage
from tests import tiny
from tests.pipeline.plans import plan_of, refusal


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
