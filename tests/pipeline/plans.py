"""Plans and refusals for tests."""

from __future__ import annotations

from typing import Any

import pytest

from luceasync.errors import PlacementError
from luceasync.models.precision import Precision
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import Plan, make_plan
from tests.pipeline.specs import make_spec

MIB = 2**20


def plan_of(free_mib: float | list[float] = 8192, backend: str = "cpu", **asked: Any) -> Plan:
    """A plan for `make_spec()`; arguments default to None."""
    sizes = free_mib if isinstance(free_mib, list) else [free_mib]
    devices = [offer_of(f"{backend}:{i}", int(mib * MIB)) for i, mib in enumerate(sizes)]
    keys = ("weights", "parallel", "max_ctx_tokens", "prefill_chunk_tokens")
    asked["precision"] = Precision.of(asked.pop("dtype", "fp32"))
    choices = {**dict.fromkeys(keys), **asked}
    return make_plan(choices.pop("spec", make_spec()), devices, **choices)


def refusal(call, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(PlacementError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)
