"""Functions that compute without gradients, and call each other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def inferring(run: Callable[P, T]) -> Callable[P, T]:
    """As torch.inference_mode(), which is not entered again by who is in it: that takes seven
    calls, while a device may wait for the host.
    """

    @functools.wraps(run)
    def within(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return run(*args, **kwargs)
        with torch.inference_mode():
            return run(*args, **kwargs)

    return within
