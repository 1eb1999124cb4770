"""An offer is plain data, and all that a plan needs, wherever it came from."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from luceasync.models.precision import Precision
from luceasync.pipeline.offer import BACKENDS, Offer, decode_sizes, default_dtype, offer_of
from luceasync.pipeline.plan import make_plan
from tests.pipeline.specs import make_spec

GIB = 2**30


def offers(*names: str) -> list[Offer]:
    return [offer_of(name, GIB) for name in names]


def sent(offer: Offer) -> Offer:
    """As another process receives it."""
    return msgspec.json.decode(msgspec.json.encode(offer), type=Offer)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_offer_can_be_sent(backend: str):
    offer = offer_of(f"{backend}:1", 5 * GIB, ("fp32",))
    assert sent(offer) == offer


@pytest.mark.parametrize("names", [["cpu:0", "cpu:1"], ["cuda:0", "cpu:0"], ["hip:0", "cuda:3"]])
def test_a_plan_is_made_of_what_was_sent(names: list[str]):
    """Devices need not exist on this machine."""
    asked = {
        "precision": Precision.of("bf16"),
        "weights": None,
        "parallel": None,
        "max_ctx_tokens": None,
    }
    devices = [offer_of(name, GIB) for name in names]
    plans = [
        make_plan(make_spec(), each, prefill_chunk_tokens=None, **asked)
        for each in (devices, [sent(device) for device in devices])
    ]
    assert plans[0] == plans[1]
    assert [shard.device for shard in plans[0].shards] == names


@pytest.mark.parametrize(
    ("name", "dtype", "parallel", "sizes"),
    [
        ("cuda:0", "bf16", 1, (1,)),
        ("cuda:0", "bf16", 4, (1, 2, 4)),
        ("hip:0", "fp32", 5, (1, 2, 4, 5)),
        ("cuda:0", "bf16", 8, (1, 2, 4, 8)),
        ("cpu:0", "bf16", 3, (1, 2, 3)),
        ("cpu:0", "fp32", 1, (1,)),
        ("cpu:0", "fp32", 3, (3,)),
        ("cpu:0", "fp32", 4, (4,)),
        ("cpu:0", "fp32", 6, (4, 5, 6)),
    ],
)
def test_decode_runs_in_these_batch_sizes(name, dtype, parallel, sizes):
    assert decode_sizes(offers(name), dtype, parallel) == sizes
    assert decode_sizes(offers(name, name), dtype, parallel) == sizes


def test_one_device_that_captures_its_steps_decides_for_all():
    assert decode_sizes(offers("cpu:0", "cuda:0"), "fp32", 6) == (1, 2, 4, 6)


@pytest.mark.parametrize("name", ["cpu:0", "cuda:0"])
@pytest.mark.parametrize("parallel", range(1, 20))
def test_every_number_of_lanes_has_a_batch_size(name: str, parallel: int):
    sizes = decode_sizes(offers(name), "fp32", parallel)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] >= 1 and sizes[-1] == parallel


@pytest.mark.parametrize(
    ("names", "gpu_ok", "cpu_ok", "expected"),
    [
        (["cpu:0"], False, True, "bf16"),
        (["cpu:0"], True, False, "fp32"),
        (["cuda:0"], True, False, "bf16"),
        (["cuda:0"], False, True, "fp32"),
        (["cuda:0", "cpu:0"], True, True, "bf16"),
        (["cuda:0", "cpu:0"], True, False, "fp32"),
    ],
)
def test_bf16_is_the_default_where_every_device_has_it(names, gpu_ok, cpu_ok, expected):
    has_bf16 = {"cpu": cpu_ok, "cuda": gpu_ok}
    found = [
        offer_of(name, GIB, ("bf16", "fp32") if has_bf16[name.partition(":")[0]] else ("fp32",))
        for name in names
    ]
    assert default_dtype(found) == expected


def test_what_is_planned_follows_the_offer_and_not_the_name():
    """An unknown kind of device is planned by its offer."""
    odd = dataclasses.replace(
        offer_of("cpu:0", GIB), name="tpu:0", short_rows=(32,), num_staged_states=3
    )
    plan = make_plan(
        make_spec(),
        [odd],
        precision=Precision.of("fp32"),
        weights=None,
        parallel=6,
        max_ctx_tokens=64,
        prefill_chunk_tokens=None,
    )
    assert plan.shards[0].device == "tpu:0" and plan.shards[0].short_rows == (32,)
    assert plan.decode_sizes == (4, 5, 6) and not plan.runs_async
