"""Runs tests of CUDA C++ on a GPU, and emulated on CPUs with fewer and smaller values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from luceasync.kernels.cuda_program import can_compile


def on_both(words: str, gpu: Sequence[Any], emulated: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise a test of `words` with the values of each place, and its fixture `place`."""
    is_one = "," not in words
    values = [
        pytest.param(place, *([each] if is_one else each), marks=marks)
        for place, each_of, marks in (("gpu", gpu, pytest.mark.gpu), ("emulated", emulated, ()))
        for each in each_of
    ]
    return pytest.mark.parametrize(f"place, {words}", values, indirect=["place"])


def gpu_of_nvidia() -> torch.device:
    """Skip the test without a GPU that runs the programs."""
    if not torch.cuda.is_available() or not can_compile(0):
        pytest.skip("CUDA C++ runs on GPUs of NVIDIA's")
    return torch.device("cuda")
