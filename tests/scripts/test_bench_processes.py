"""What is measured as two processes is two processes."""

from __future__ import annotations

from processes.models import in_two

from luceasync.bench.model import plan_for
from luceasync.bench.small import SMALL


def test_each_device_but_the_first_has_a_process_and_a_group_of_its_own():
    plan = plan_for(
        SMALL["qwen3"], ["cpu:0", "cpu:1"], parallel=1, max_ctx_tokens=128, dtype="fp32"
    )
    assert plan.groups == ((0, 2),)
    apart = in_two(plan)
    assert apart.groups == ((0, 1), (1, 2))
    assert [device.is_here for device in apart.devices] == [True, False]
