"""What two ends state differs where weights, dtypes or layers do."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from luceasync import __version__
from luceasync.errors import PeerMismatch
from luceasync.ipc.channel import PROTOCOL, Statement, difference
from luceasync.ipc.launcher import LocalLauncher, Program
from luceasync.ipc.supervised import SupervisedProcess
from luceasync.models.files import ModelFiles
from luceasync.models.precision import Precision
from luceasync.pipeline.remote import answers
from luceasync.pipeline.remote.agreement import dtype_words, states_of
from tests.processes import backend_program

FP32 = "fp32/fp32/fp32"

pytestmark = pytest.mark.usefixtures("forked_backends")


def test_a_dtype_is_told_of_each_kind_of_number():
    assert dtype_words(Precision("bf16", "fp32", "bf16")) == "bf16/fp32/bf16"


def test_the_same_is_stated_of_the_same(tiny_dir: Path):
    assert states_of(ModelFiles(tiny_dir), FP32, "0:2") == states_of(
        ModelFiles(tiny_dir), FP32, "0:2"
    )
    assert states_of(ModelFiles(tiny_dir), FP32, "0:2")["layers"] == "0:2 of 4"


def test_weights_that_were_written_again_are_others(tiny_dir: Path):
    before = states_of(ModelFiles(tiny_dir), FP32, "0:2")
    [file] = tiny_dir.glob("*.safetensors")
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    words = difference(Statement(before), Statement(states_of(ModelFiles(tiny_dir), FP32, "0:2")))
    assert words is not None and words.startswith("weights: ")


OTHERS = {
    "protocol": (99, f"protocol {PROTOCOL} here, 99 there"),
    "version": ("0.1", f"luceasync {__version__} here, 0.1 there"),
    "weights": ("ab12", "weights: [0-9a-f]{32} here, ab12 there"),
    "dtype": ("bf16/bf16/bf16", f"dtype: {FP32} here, bf16/bf16/bf16 there"),
    "layers": ("0:3 of 4", "layers: 0:2 of 4 here, 0:3 of 4 there"),
}


@pytest.mark.covered(1)
@pytest.mark.slow
@pytest.mark.parametrize("what", OTHERS)
def test_a_process_that_differs_refuses_with_both_values(tiny_dir: Path, tmp_path: Path, what: str):
    ours, words = OTHERS[what]
    statement = Statement(states_of(ModelFiles(tiny_dir), FP32, "0:2"))
    if what in statement.states:
        statement = replace(statement, states={**statement.states, what: ours})
    else:
        statement = replace(statement, **{what: ours})
    program = Program(backend_program(tmp_path), "backend", (1 << 16, 1 << 16))
    launcher = LocalLauncher(program, on_line=lambda line: None)
    process = SupervisedProcess(launcher, "a backend", ("cpu:0",), threading.Event())
    given = ["--model-dir", str(tiny_dir), "--dtype", FP32, "--layers", "0:2"]
    with pytest.raises(PeerMismatch, match=f"it refused us: {words}"):
        process.start(given, answers.ANSWERS, statement, 60.0)
    assert process.status.detail.startswith("a backend failed and will be restarted now: ")
    launcher.close()
