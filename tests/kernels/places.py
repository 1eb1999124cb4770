"""Where a test of CUDA C++ runs: on a GPU, and emulated on CPUs with fewer and smaller values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from luceasync.kernels.cuda_program import can_compile


def on_both(words: str, gpu: Sequence[Any], emulated: Sequence[Any]) -> pytest.MarkDecorator:
    """A test of `words` with each of these values there; its fixture `place` gets a name."""
    is_one = "," not in words
    values = [
        pytest.param(place, *([each] if is_one else each), marks=marks)
        for place, each_of, marks in (("gpu", gpu, pytest.mark.gpu), ("emulated", emulated, ()))
        for each in each_of
    ]
    return pytest.mark.parametrize(f"place, {words}", values, indirect=["place"])


def gpu_of_nvidia() -> torch.device:
    """Skips the test where there is none that programs are for."""
    if not torch.cuda.is_available() or not can_compile(0):
        pytest.skip("CUDA C++ runs on GPUs of NVIDIA's")
    return torch.device("cuda")
