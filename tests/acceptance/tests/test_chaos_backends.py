"""Backends die, hang and lie under a real server: clients are answered, nothing is leaked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.chaos_backends import DEEDS, TRANSPORTS, schedule

ROOT = Path(__file__).parents[3]


def test_every_deed_has_its_turn_at_every_moment():
    turns = {
        (deed, moment, transport)
        for deed, moments in DEEDS.items()
        for moment in moments
        for transport in TRANSPORTS
    }
    assert set(schedule([], 200)) == turns
    assert schedule(["stop:save"], 2) == [("stop", "save", each) for each in TRANSPORTS]


@pytest.mark.slow
def test_a_few_rounds_over_a_real_server():
    deeds = ("kill:decode", "stop:prefill", "half:save", "parent:load")
    program = [sys.executable, "-m", "tests.acceptance.chaos_backends"]
    done = subprocess.run(
        [*program, "--rounds", f"{len(deeds)}", "--only", ",".join(deeds), "--forks"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 rounds: every client was answered, later answers were right" in done.stdout
    for deed in deeds:
        assert f"| {' | '.join(deed.split(':'))} | " in done.stdout
