"""What a Triton kernel is here: launched, or compiled ahead beside others before the first launch.

Threads compile, since Triton does without the interpreter's lock for most of the time. Knows no
kernel and no pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver

from luceasync.kernels.compiling import CompilerHangs, KernelCompilation

__all__ = ["CompilerHangs", "Kernel", "compiled_ahead", "kernel"]


class Kernel:
    """A function in Triton's language: `kernel[grid](...)` launches it, options are Triton's."""

    def __init__(self, function: Callable[..., None], options: dict[str, Any]) -> None:
        self._jit = triton.jit(function, **options)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        if (loader := _ahead.get()) is not None:
            loader.name = self._jit.__name__
            return partial(self._jit.warmup, grid=grid)
        launch: Callable[..., object] = self._jit[grid]
        return launch


def kernel(**options: Any) -> Callable[[Callable[..., None]], Kernel]:
    """Decorates a function that is launched; `options` are those of triton.jit."""
    return lambda function: Kernel(function, options)


class _Loader:
    """Makes what Triton's asynchronous mode asks for, and at once what the first launch needs."""

    def __init__(self, device: torch.device, patience_s: float) -> None:
        self.compiling = KernelCompilation(os.cpu_count() or 1, patience_s)
        self.name = ""  # of the kernel that is asked for next
        self._device = device

    def submit(self, compiled: Callable[[], Any]) -> Future[Any]:
        """The part of Executor that is asked for."""
        index = driver.active.get_current_device()
        device = torch.device(self._device.type, index)
        return self.compiling.submit(self.name, partial(self._load, compiled, device))

    def _load(self, compiled: Callable[[], Any], device: torch.device) -> Any:
        kernel = compiled()
        with torch.cuda.device(device):
            _ = kernel.run  # its launcher, for which some versions of Triton call a C compiler
        return kernel


_ahead: ContextVar[_Loader | None] = ContextVar("ahead", default=None)  # None: they are launched


def compiled_aside(name: str, load: Callable[[], object] | None) -> bool:
    """Whether kernels are compiled ahead, so that nothing is to be launched: then `load`, if it is
    given, compiles what another compiler makes, beside them.
    """
    if (loader := _ahead.get()) is None:
        return False
    if load is not None:
        loader.compiling.submit(name, load)
    return True


@contextmanager
def compiled_ahead(device: torch.device, patience_s: float) -> Iterator[None]:
    """Whatever this thread runs inside launches no kernel, so that its results are of no use: the
    kernels are compiled side by side, and afterwards each is loaded on the GPU of `device`'s kind
    that was the thread's own when it asked for it: a drafter's head may lie on another one.

    Nothing may be captured inside. A kernel that cannot be compiled raises when it is launched.
    Raises CompilerHangs where none is done within `patience_s` after the one before.
    """
    loader = _Loader(device, patience_s)
    with knobs.compilation.scope(), triton.AsyncCompileMode(loader, ignore_errors=True):
        # Writing the steps in between as text takes a quarter of the interpreter's time.
        knobs.compilation.store_binary_only = True
        token = _ahead.set(loader)
        try:
            yield
        finally:
            _ahead.reset(token)
            loader.compiling.end()
