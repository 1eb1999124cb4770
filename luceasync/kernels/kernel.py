"""What a Triton kernel is here: launched, or compiled ahead beside others before the first launch.

Threads compile, since Triton does without the interpreter's lock for most of the time. Knows no
kernel and no pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver

_ahead = ContextVar("ahead", default=False)  # whether kernels are compiled instead of launched


class Kernel:
    """A function in Triton's language: `kernel[grid](...)` launches it, options are Triton's."""

    def __init__(self, function: Callable[..., None], options: dict[str, Any]) -> None:
        self._jit = triton.jit(function, **options)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        if _ahead.get():
            return partial(self._jit.warmup, grid=grid)
        launch: Callable[..., object] = self._jit[grid]
        return launch


def kernel(**options: Any) -> Callable[[Callable[..., None]], Kernel]:
    """Decorates a function that is launched; `options` are those of triton.jit."""
    return lambda function: Kernel(function, options)


@contextmanager
def compiled_ahead(device: torch.device) -> Iterator[None]:
    """Whatever this thread runs inside launches no kernel, so that its results are of no use: the
    kernels are compiled side by side, and afterwards each is loaded on the GPU of `device`'s kind
    that was the thread's own when it asked for it: a drafter's head may lie on another one.

    Nothing may be captured inside. A kernel that cannot be compiled raises when it is launched.
    """
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compile") as pool:
        loader = _Loader(pool, device)
        with knobs.compilation.scope(), triton.AsyncCompileMode(loader, ignore_errors=True):
            # Writing the steps in between as text takes a quarter of the interpreter's time.
            knobs.compilation.store_binary_only = True
            token = _ahead.set(True)
            try:
                yield
            finally:
                _ahead.reset(token)


class _Loader:
    """Makes what Triton's asynchronous mode asks for, and at once what the first launch needs."""

    def __init__(self, pool: ThreadPoolExecutor, device: torch.device) -> None:
        self._pool = pool
        self._device = device

    def submit(self, compiled: Callable[[], Any]) -> Future[Any]:
        """The part of Executor that is asked for."""
        index = driver.active.get_current_device()
        return self._pool.submit(self._load, compiled, torch.device(self._device.type, index))

    def _load(self, compiled: Callable[[], Any], device: torch.device) -> Any:
        kernel = compiled()
        with torch.cuda.device(device):
            _ = kernel.run  # its launcher, for which some versions of Triton call a C compiler
        return kernel
