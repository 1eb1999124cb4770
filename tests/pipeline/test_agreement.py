"""What two ends state differs where weights, dtypes or layers do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from luceasync.errors import PeerRefused
from luceasync.ipc.handshake import Statement, difference, greet
from luceasync.ipc.launcher import LocalLauncher, Program
from luceasync.models.precision import Precision
from luceasync.pipeline import wire
from luceasync.pipeline.agreement import dtype_words, states_of
from tests.processes import backend_program

FP32 = "fp32/fp32/fp32"


def test_a_dtype_is_told_of_each_kind_of_number():
    assert dtype_words(Precision("bf16", "fp32", "bf16")) == "bf16/fp32/bf16"


def test_the_same_is_stated_of_the_same(tiny_dir: Path):
    assert states_of(tiny_dir, FP32, "0:2") == states_of(tiny_dir, FP32, "0:2")
    assert states_of(tiny_dir, FP32, "0:2")["layers"] == "0:2 of 4"


def test_weights_that_were_written_again_are_others(tiny_dir: Path):
    before = states_of(tiny_dir, FP32, "0:2")
    [file] = tiny_dir.glob("*.safetensors")
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    words = difference(Statement(before), Statement(states_of(tiny_dir, FP32, "0:2")))
    assert words is not None and words.startswith("weights: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "layers", "words"),
    [
        ("bf16/bf16/bf16", "0:2", f"dtype: {FP32} here, bf16/bf16/bf16 there"),
        (FP32, "0:3", "layers: 0:2 of 4 here, 0:3 of 4 there"),
    ],
)
def test_a_process_that_differs_refuses_with_both_values(
    tiny_dir: Path, tmp_path: Path, dtype: str, layers: str, words: str
):
    program = Program(backend_program(tmp_path), "backend", (1 << 16, 1 << 16))
    launcher = LocalLauncher(program, on_line=lambda line: None)
    given = ["--model-dir", str(tiny_dir), "--dtype", FP32, "--layers", "0:2"]
    started = launcher.launch(given, wire.ANSWERS)
    with pytest.raises(PeerRefused, match=f"it refused us: {words}"):
        greet(started.channel, Statement(states_of(tiny_dir, dtype, layers)), 60.0)
    launcher.close()
