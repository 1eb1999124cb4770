"""A plan is what was asked, to the byte; refusals are one line."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest

from luceasync.models.files import read_spec
from luceasync.models.formats.safetensors import open_checkpoint
from luceasync.models.precision import Precision
from luceasync.pipeline.capacity import DraftFootprint
from luceasync.pipeline.offer import Offer, offer_of
from luceasync.pipeline.plan import make_plan, stages_of
from luceasync.pipeline.stage import LocalStage
from tests import tiny
from tests.half_precision import needs_bf16
from tests.pipeline.plans import MIB, plan_of, refusal
from tests.pipeline.specs import make_hybrid_spec, make_spec


def test_without_weights_the_free_memory_decides():
    plan = plan_of([3072, 1024])
    assert [(shard.begin, shard.end) for shard in plan.shards] == [(0, 6), (6, 8)]
    assert "layers are split by the free memory of each device" in plan.reasons


def test_the_weights_that_were_asked_decide_and_need_no_reason():
    plan = plan_of([3072, 1024], weights=[1, 3])
    assert [(shard.begin, shard.end) for shard in plan.shards] == [(0, 2), (2, 8)]
    assert not any("split" in reason for reason in plan.reasons)


@pytest.mark.parametrize("chunk", [1, 63, 65, 100, -1])
def test_a_prefill_chunk_is_whole_chunks(chunk: int):
    words = refusal(plan_of, prefill_chunk_tokens=chunk)
    assert words == f"--prefill-chunk {chunk}: a positive multiple of 64 is expected"


@pytest.mark.parametrize(("backend", "expected"), [("cpu", 256), ("cuda", 2048)])
def test_the_default_prefill_chunk_is_the_platforms(backend: str, expected: int):
    assert plan_of(backend=backend).prefill_chunk_tokens == expected
    assert plan_of(backend=backend, prefill_chunk_tokens=64).prefill_chunk_tokens == 64


# --- the bytes that will be held ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=needs_bf16)])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", [(1,), (3, 1), (1, 2, 1)])
def test_planned_bytes_are_loaded_bytes(family, tmp_path: Path, weights, tied: bool, dtype: str):
    model_dir = tiny.save(tiny.build(family, tied=tied), tmp_path)
    spec = read_spec(model_dir)
    asked = {"parallel": 2, "max_ctx_tokens": 100, "dtype": dtype, "verify_rows": (3, 8)}
    plan = plan_of([4096] * len(weights), spec=spec, weights=weights, **asked)
    with open_checkpoint(model_dir) as checkpoint:
        stage = LocalStage(spec, plan, checkpoint)
    planned = {shard.device: plan.device_bytes(shard) for shard in plan.shards}
    assert stage.device_bytes == planned
    stage.close()


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
    ("dtype", "num_entries", "num_rows", "size"),
    [("fp32", 1, 1, 4), ("fp32", 1, 3, 2), ("fp32", 1, 8, 1), ("fp32", 3, 8, 3), ("bf16", 1, 2, 1)],
)
def test_a_verify_pass_on_cpus_is_filled_up_to_as_many_rows(dtype, num_entries, num_rows, size):
    plan = plan_of(600, dtype=dtype, parallel=4)
    assert plan.verify_size(num_entries, num_rows) == size


@pytest.mark.parametrize(("device", "small"), [("cpu:0", True), ("cuda:0", True)])
def test_a_tiny_model_needs_no_threads_on_the_cpu(device: str, small: bool):
    plan = make_plan(
        make_spec(),
        [offer_of(device, 2**34)],
        precision=Precision.of("bf16"),
        weights=None,
        parallel=1,
        max_ctx_tokens=64,
        prefill_chunk_tokens=None,
    )
    assert plan.suits_one_thread is small
    large = dataclasses.replace(plan.shards[0], weight_bytes=2**30)
    heavy = dataclasses.replace(plan, shards=(large,))
    assert heavy.suits_one_thread is (device != "cpu:0")


# --- several processes --------------------------------------------------------------------------


def of_processes(*processes: int) -> tuple[Offer, ...]:
    offers = [offer_of(f"cpu:{i}", 8192 * MIB) for i in range(len(processes))]
    return tuple(replace(o, process=p) for o, p in zip(offers, processes, strict=True))


@pytest.mark.parametrize(
    ("processes", "stages"),
    [
        ((0,), ((0, 1),)),
        ((0, 0, 0), ((0, 3),)),
        ((0, 1, 1), ((0, 1), (1, 3))),
        ((0, 1, 0), ((0, 1), (1, 2), (2, 3))),
    ],
)
def test_neighbours_of_one_process_are_a_stage(processes, stages):
    assert stages_of(processes) == stages


def test_only_devices_of_this_process_are_here():
    plan = replace(plan_of([8192.0] * 3), devices=of_processes(0, 1, 0))
    assert plan.here == (plan.shards[0], plan.shards[2])


def test_a_device_of_the_same_name_in_another_process_is_another_one():
    plan = plan_of()
    [own] = plan.devices
    assert plan.is_all_on(own)
    assert not plan.is_all_on(replace(own, process=1))
    assert not replace(plan, devices=of_processes(1)).is_all_on(own)


def test_a_drafter_of_another_device_takes_nothing_of_ours():
    """Devices of the same name are the same card, whatever their processes."""
    [own] = plan_of(1024).devices
    others = [replace(own, name="hip:0", process=1), replace(own, process=1), own]
    footprints = [None, *(DraftFootprint(device, 256 * MIB, 0, 0) for device in others)]
    sizes = [plan_of(1024, drafter=each, parallel=4).max_ctx_tokens for each in footprints]
    assert sizes[0] == sizes[1] > sizes[2] == sizes[3]
