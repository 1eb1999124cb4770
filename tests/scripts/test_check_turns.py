"""The table of conversations, in a short form: a turn is found again whatever the client leaves
out, and after a restart too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from check_turns import cells, model_copy
from turns.flows import Size

from luceasync.config import BUNDLED_MODEL_DIR

pytestmark = pytest.mark.slow

SHORT = Size(num_turns=2, num_steps=1, system=20, message=4, answer=24, long=300)
MAX_SHORT_TOKENS = 64  # of a request


@pytest.mark.parametrize("flow", ["chat_without_thinking", "thinking", "agent_without_reasoning"])
async def test_what_was_said_before_is_found(tmp_path: Path, flow: str):
    model_dir = model_copy(BUNDLED_MODEL_DIR, "thinking", tmp_path / "model")
    found = await cells(flow, model_dir, SHORT, chunk_tokens=256)
    assert all(cell.is_equal for cell in found.values())
    assert {kind: cell.worst <= MAX_SHORT_TOKENS for kind, cell in found.items()} == {
        "memory": True,
        "restart": True,
    }
