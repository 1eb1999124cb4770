"""A forked backend is what a launcher would have started, and its parent's own child."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from luceasync.ipc.launcher import LocalLauncher, Program
from luceasync.pipeline.remote import answers
from tests.processes import backend_program

DEADLINE_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_backends")]


def test_it_has_the_parent_the_words_and_the_end_of_a_program(tmp_path: Path):
    offers = ["hip:0=cpu:0", "hip:1=cpu:1"]
    path = backend_program(tmp_path, offers)
    launcher = LocalLauncher(Program(path, "backend", (1 << 16, 1 << 16)), on_line=lambda line: 0)
    started = launcher.launch(["--dtype", "fp32"], answers.ANSWERS)
    child = psutil.Process(started.child.pid)
    words = ["luceasync.backend", "--offer", offers[0], "--offer", offers[1], "--dtype", "fp32"]
    began_s = time.monotonic()
    while child.cmdline()[2 : 2 + len(words)] != words:
        assert time.monotonic() - began_s < DEADLINE_S, child.cmdline()
    assert child.ppid() == os.getpid() and os.getsid(child.pid) == child.pid
    child.kill()
    started.end(DEADLINE_S, DEADLINE_S)
    assert "was ended by SIGKILL" in started.child.last_words()
    launcher.close()


def test_any_other_program_is_started_as_it_is(tmp_path: Path):
    path = tmp_path / "program"
    path.write_text("#!/bin/sh\nexit 3\n")
    path.chmod(0o755)
    launcher = LocalLauncher(Program(path, "backend", (1 << 16, 1 << 16)), on_line=lambda line: 0)
    started = launcher.launch([], answers.ANSWERS)
    started.end(DEADLINE_S, DEADLINE_S)
    assert started.child.last_words() == "its process ended with status 3"
    launcher.close()
