"""A cheap inference mode for functions that call one another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def inference_mode(run: Callable[P, T]) -> Callable[P, T]:
    """Like torch.inference_mode(), but a no-op if it is already active: entering it again takes
    seven calls, during which a device may have to wait for the host."""

    @functools.wraps(run)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return run(*args, **kwargs)
        with torch.inference_mode():
            return run(*args, **kwargs)

    return wrapper
