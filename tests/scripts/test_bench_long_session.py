"""A long session in a short form: a third of the memory that it would fill serves every step."""

from __future__ import annotations

import pytest
from bench_long_session import held, kinds, within

from luceasync.bench.lives import LIMITS

pytestmark = pytest.mark.slow

NUM_STEPS = 5
MAX_SHORT_TOKENS = 64  # of a step


@pytest.mark.covered(1)
@pytest.mark.parametrize("with_disk", [False, True])
@pytest.mark.parametrize("kind", ["left", "parts"])
async def test_no_step_runs_again_what_was_seen(kind: str, with_disk: bool):
    run = kinds(NUM_STEPS, every=4)[kind]
    everything = within(LIMITS.memory_bytes, with_disk=False)
    filled_bytes = (await held(run, NUM_STEPS, everything))[1]
    limits = within(filled_bytes // 3, with_disk=with_disk)
    steps, held_bytes = await held(run, NUM_STEPS, limits)
    assert held_bytes <= limits.memory_bytes
    assert max(step.num_short for step in steps) <= MAX_SHORT_TOKENS
    assert not any(step.is_from_disk for step in steps)  # what is in use stays in memory
