"""Waiting for compilers ends when one makes no progress, and hanging ones delay nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from luceasync.kernels import compiling as compiling_module
from luceasync.kernels.compiling import CompilerHangs, KernelCompilation
from tests.children import line_with

DEADLINE_S = 600.0


def test_all_jobs_are_done_at_the_end_and_the_caller_gets_the_error():
    compiling = KernelCompilation(2, DEADLINE_S)
    found = [compiling.submit("square", lambda n=n: n * n) for n in range(9)]
    failed = compiling.submit("broken", lambda: 1 // 0)
    compiling.end()
    assert [future.result(0) for future in found] == [n * n for n in range(9)]
    assert isinstance(failed.exception(0), ZeroDivisionError)


def test_it_works_side_by_side():
    both = threading.Barrier(2)
    compiling = KernelCompilation(2, DEADLINE_S)
    for _ in range(2):
        compiling.submit("met", lambda: both.wait(DEADLINE_S))
    compiling.end()


def test_what_hangs_ends_in_words_that_name_it_and_nothing_more_is_begun():
    compiling, hung = KernelCompilation(1, 0.05), threading.Event()
    late = compiling.submit("slow_kernel", hung.wait)
    begun: list[int] = []
    others = [compiling.submit(f"other_{n}", lambda n=n: begun.append(n)) for n in range(4)]
    with pytest.raises(
        CompilerHangs, match=r"within 0.05 s; not done are other_0, other_1, other_2 and 2 more:"
    ):
        compiling.end()
    for future in (late, *others):
        with pytest.raises(CompilerHangs, match="no kernel was compiled"):
            future.result(0)
    hung.set()
    for thread in threading.enumerate():
        if thread.name.startswith("compile"):
            thread.join(DEADLINE_S)
    assert begun == []


def test_each_that_is_done_gives_the_others_time(monkeypatch):
    """Four jobs, each of which takes more than half of the patience."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(compiling_module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))

    def take_long() -> None:
        clock.now_s += 0.6 * DEADLINE_S

    compiling = KernelCompilation(1, DEADLINE_S)
    found = [compiling.submit("steady", take_long) for _ in range(4)]
    compiling.end()
    assert all(future.result(0) is None for future in found)
    assert clock.now_s > 2 * DEADLINE_S


@contextmanager
def hung_server(directory: Path, patience_s: float) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.kernels.hung_compiler", directory, str(patience_s)]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with subprocess.Popen(
        command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # both have ended
                os.killpg(process.pid, signal.SIGKILL)  # the assembler too


@pytest.mark.slow
def test_ctrl_c_while_kernels_compile_ends_the_server_at_once(tmp_path):
    with hung_server(tmp_path, DEADLINE_S) as process:
        # The log comes first. The assembler holds the pipe open too.
        line_with("Listening", process, lambda: os.killpg(process.pid, signal.SIGKILL))
        begin_s = time.monotonic()
        while not (tmp_path / "asked").exists():
            assert process.poll() is None and time.monotonic() - begin_s < DEADLINE_S
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S / 4) == -signal.SIGINT  # long before the deadline


@pytest.mark.slow
def test_a_compiler_that_hangs_ends_the_start_in_words(tmp_path):
    with hung_server(tmp_path, 0.5) as process:
        told = line_with("no kernel", process, lambda: os.killpg(process.pid, signal.SIGKILL))
        assert process.wait(DEADLINE_S) == 2
    assert told.startswith("luceasync: no kernel was compiled within 0.5 s; not done are _rms_norm")
