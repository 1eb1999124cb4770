"""Plans of models whose experts wait in host memory: slots are as many as fit, and what cannot be
honoured is refused in one line.
"""

from __future__ import annotations

import pytest

from luceasync.bench.shapes import encoding_of, shape_of
from luceasync.errors import PlacementError
from luceasync.models.files import parse_spec
from luceasync.models.precision import Precision
from luceasync.pipeline.expert_plan import ExpertRequest
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import Plan, make_plan

GIB = 1 << 30
NUM_EXPERTS, NUM_CHOSEN, NUM_LAYERS = 256, 8, 40
EXPERT_BYTES = 2 * 3 * 2048 * 512  # in bf16
A3B = "qwen3.5-35b-a3b"


def plan_of(
    num_bytes: int | None,
    *,
    model: str = A3B,
    devices: tuple[str, ...] = ("cuda:0",),
    free: int = 80 * GIB,
    host: int = 100 * GIB,
    is_asked: bool = True,
    **sizes: int,
) -> Plan:
    spec = parse_spec(dict(shape_of(model)))
    return make_plan(
        spec,
        [offer_of(name, free) for name in devices],
        precision=Precision.of("bf16"),
        weights=None,
        parallel=sizes.get("parallel"),
        max_ctx_tokens=sizes.get("max_ctx_tokens"),
        prefill_chunk_tokens=None,
        encoding_of=encoding_of("plain", spec.num_layers),
        experts=ExpertRequest(num_bytes, host) if is_asked else None,
    )


def test_slots_take_what_was_asked_for_and_leave_the_rest_as_it_was() -> None:
    sizes = {"parallel": 1, "max_ctx_tokens": 4096}
    [whole] = plan_of(None, free=200 * GIB, is_asked=False, **sizes).shards
    [slotted] = plan_of(8 * GIB, **sizes).shards
    num_slots = 8 * GIB // (NUM_LAYERS * EXPERT_BYTES)
    assert slotted.expert_slots == num_slots
    absent = (NUM_EXPERTS - num_slots) * EXPERT_BYTES * NUM_LAYERS
    assert slotted.weight_bytes == whole.weight_bytes - absent
    assert slotted.expert_bytes == NUM_EXPERTS * EXPERT_BYTES * NUM_LAYERS
    # A long pass has whole layers copied ahead, to two buffers.
    buffers = 2 * NUM_EXPERTS * EXPERT_BYTES
    assert slotted.workspace_bytes == whole.workspace_bytes + buffers


def test_auto_gives_slots_what_nothing_else_needs() -> None:
    plan = plan_of(None, free=24 * GIB)
    [shard] = plan.shards
    assert plan.max_ctx_tokens == 32768
    left = 24 * GIB - plan.device_bytes(shard) - shard.workspace_bytes
    assert GIB <= left < GIB + NUM_LAYERS * EXPERT_BYTES
    [roomy] = plan_of(None, free=200 * GIB).shards
    assert roomy.expert_slots == NUM_EXPERTS


def test_a_split_shares_slots_by_layers() -> None:
    plan = plan_of(16 * GIB, devices=("cuda:0", "cuda:1"), free=40 * GIB, parallel=1)
    assert {shard.expert_slots for shard in plan.shards} == {16 * GIB // (40 * EXPERT_BYTES)}


def test_a_plan_says_what_crosses_the_bus() -> None:
    reasons = "\n".join(plan_of(8 * GIB, parallel=1).reasons)
    assert "34 slots for the 256 experts of a layer" in reasons
    token_bytes = NUM_LAYERS * NUM_CHOSEN * EXPERT_BYTES
    for hits in (0.5, 0.75, 0.9):
        assert f"{25e9 / token_bytes / (1 - hits):.0f} tokens/s at {hits:.0%} hits" in reasons


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"num_bytes": 4 * GIB, "model": "qwen3-4b"}, "this model has no experts"),
        ({"num_bytes": 4 * GIB, "devices": ("cpu:0",)}, "cpu:0 computes from host memory already"),
        ({"num_bytes": 4 * GIB, "host": 59 * GIB}, "bytes of host memory, which has 63350767616"),
        ({"num_bytes": GIB, "parallel": 1}, "4 slots a layer, but 1 lanes may choose 8 experts"),
        ({"num_bytes": 4 * GIB, "parallel": 4}, "but 4 lanes may choose 32 experts"),
    ],
)
def test_what_cannot_be_honoured_is_refused(asked, words) -> None:
    with pytest.raises(PlacementError) as refused:
        plan_of(**asked)
    said = str(refused.value)
    assert said.startswith(f"--expert-memory {asked['num_bytes']}: ") and words in said
    assert "\n" not in said


def test_as_many_slots_as_lanes_may_choose_are_enough() -> None:
    needed = NUM_LAYERS * 32 * EXPERT_BYTES
    assert plan_of(needed, parallel=4, max_ctx_tokens=4096).shards[0].expert_slots == 32


def test_lanes_that_nobody_named_are_as_many_as_slots_are_enough_for() -> None:
    plan = plan_of(4 * GIB)
    assert (plan.parallel, plan.shards[0].expert_slots) == (2, 17)
