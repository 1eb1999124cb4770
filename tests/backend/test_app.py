"""The program luceasync-backend: its arguments, and its error when it is started by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from luceasync.backend.app import parse


def test_devices_are_renamed():
    offers = parse(["--offer", "hip:0=cpu", "--offer", "hip:1=cuda:1"]).offer
    assert offers == [("hip:0", "cpu:0"), ("hip:1", "cuda:1")]


def test_a_device_has_one_name(capsys):
    with pytest.raises(SystemExit):
        parse(["--offer", "hip:0=cpu", "--offer", "hip=cuda:1"])
    assert "hip:0 is named twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["hip:0", "hip:0=", "=cpu", "tpu:0=cpu:0", "hip:-1=cpu:0", "hip:9999=cpu"]
)
def test_a_name_that_is_none_ends_it(text: str, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--offer", text])
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("luceasync-backend: argument --offer: ")


@pytest.mark.slow
def test_started_by_hand_it_says_that_luceasync_starts_it():
    done = subprocess.run(
        [sys.executable, "-m", "luceasync.backend"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("luceasync-backend: this program is started by luceasync")
    assert done.stderr.count("\n") == 1
