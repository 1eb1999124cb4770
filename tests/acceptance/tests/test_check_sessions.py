"""A short session: a third of the memory that it fills serves every step."""

from __future__ import annotations

import pytest

from tests.acceptance.check_sessions import (
    FULL_BYTES,
    MAX_SHORT_TOKENS,
    run_session,
    session_kinds,
)

pytestmark = pytest.mark.slow

NUM_STEPS = 5


@pytest.mark.covered(1)
@pytest.mark.parametrize("has_disk", [False, True])
@pytest.mark.parametrize("kind", ["left", "parts"])
async def test_no_step_runs_again_what_was_seen(kind: str, has_disk: bool):
    run = session_kinds(NUM_STEPS, every=4)[kind]
    filled_bytes = (await run_session(run, NUM_STEPS, FULL_BYTES, has_disk=False))[1]
    limit = filled_bytes // 3
    steps, held_bytes = await run_session(run, NUM_STEPS, limit, has_disk=has_disk)
    assert held_bytes <= limit
    assert max(step.num_short for step in steps) <= MAX_SHORT_TOKENS
    assert not any(step.is_from_disk for step in steps)  # what is in use stays in memory
