"""The bytes of a shard follow from its layers, its dtype and what is verified."""

from __future__ import annotations

from luceasync.models.precision import Precision
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.offer import NUM_STAGED_STATES, SHORT_ROWS, offer_of
from luceasync.pipeline.shard_plan import ShardPlan, plan_shard
from tests.pipeline.specs import make_hybrid_spec, make_spec


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
