"""Kernels are compiled in parallel before any launch on request; otherwise `kernel[grid](...)`
launches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
import torch
import triton.language as tl

from luceasync.kernels.kernel import compiled_ahead, kernel

DEADLINE_S = 300.0
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@kernel(do_not_specialize=["value"])
def _fill_kernel(x, value):
    tl.store(x, value)


def filled(value: int) -> int:
    x = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    _fill_kernel[(1,)](x, value)
    return int(x)


def test_a_kernel_is_launched_but_where_it_is_compiled_ahead():
    assert filled(7) == 7
    with compiled_ahead(DEVICE, DEADLINE_S):
        assert filled(8) == 0
    assert filled(9) == 9


def test_a_program_is_found_again_for_other_numbers_and_dtypes():
    def filled_again(value: int, dtype: torch.dtype, at: int = 0) -> int:
        x = torch.zeros(8, dtype=dtype, device=DEVICE)
        _fill_kernel.launch((1, 1, 1), x[at:], value)
        return int(x[at])

    both = (torch.int32, torch.int64) * 2
    assert [filled_again(value, dtype) for value, dtype in enumerate(both, 6)] == [6, 7, 8, 9]
    assert filled_again(10, torch.int32, at=1) == 10  # not aligned
    with compiled_ahead(DEVICE, DEADLINE_S):
        assert filled_again(9, torch.int32) == 0
    assert filled_again(9, torch.int32) == 9


def test_other_threads_launch_all_the_while():
    found = []
    with compiled_ahead(DEVICE, DEADLINE_S):
        other = threading.Thread(target=lambda: found.append(filled(5)))
        other.start()
        other.join()
    assert found == [5]


def test_a_pass_that_raises_is_seen_no_more():
    with pytest.raises(ZeroDivisionError), compiled_ahead(DEVICE, DEADLINE_S):
        raise ZeroDivisionError
    assert filled(3) == 3


@pytest.mark.slow
def test_kernels_are_compiled_once_in_threads_and_an_error_is_raised_at_the_launch():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.fake_gpu"],
        env=env,
        stdout=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=True,
    )
    told = json.loads(done.stdout)
    assert told["first"] == [["_rms_norm_kernel", "MainThread", False]]
    assert told["launched inside"] == ["_rms_norm_kernel"] * 2  # earlier, and by the other thread
    norms = [["_rms_norm_kernel", "compile", False]] * 3
    assert told["ahead"] == [["_glu_kernel", "compile", False], *norms]
    assert told["launched"] == ["_rms_norm_kernel"] * 4 + ["_glu_kernel"]
    assert told["afterwards"] == [["_rms_norm_kernel", "compile", False]]
    assert told["error"] == "CompilationError"
