"""Whatever the other end does, the channel closes with a clear error, and nothing is leaked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_each_mischief_over_each_transport_leaves_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.acceptance.chaos_ipc", "--rounds", "12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for mischief in ("kill -9", "stop", "half", "oversize", "version", "slow"):
        for transport in ("shared", "stream"):
            assert f"| {mischief} | {transport} | 1 |" in done.stdout
