"""Triton kernels that are either launched, or compiled in parallel before the first launch.

Threads compile, as Triton releases the GIL most of the time. Knows no kernel and no pass.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from luceasync.kernels.compiling import CompilerHangs, KernelCompilation

__all__ = ["CompilerHangs", "Kernel", "compiled_ahead", "hash_ahead", "kernel"]


class Kernel:
    """A Triton function: `kernel[grid](...)` launches it, with Triton's options."""

    def __init__(self, jitted: Any) -> None:
        self._jit = jitted
        self._programs: dict[Hashable, CompiledKernel] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        if (loader := _ahead.get()) is not None:
            loader.name = self._jit.__name__
            return partial(self._jit.warmup, grid=grid)
        launch: Callable[..., object] = self._jit[grid]
        return launch

    def launch(
        self, key: Hashable, grid: tuple[int, int, int], *arguments: Any, **options: Any
    ) -> None:
        """`kernel[grid](...)` of all parameters in order, which looks at them only when it first
        sees `key`. That takes longer than the launch if there are tensor descriptors.

        `key` determines the device, the types and constants of the arguments, and `options`; what
        Triton otherwise tells apart, such as the alignment of pointers, does not matter.
        """
        program = self._programs.get(key)
        if program is not None and _ahead.get() is None:
            program[grid](*arguments)
            return
        launched = self[grid](*arguments, **options)
        if isinstance(launched, CompiledKernel):
            self._programs[key] = launched


def kernel(
    jit: Callable[..., Any] = triton.jit, **options: Any
) -> Callable[[Callable[..., None]], Kernel]:
    """Decorate a kernel function; `options` are those of `jit`, Triton's or Gluon's."""
    return lambda function: Kernel(jit(function, **options))


@functools.cache
def hash_ahead() -> None:
    """Have a thread hash Triton's files, once. Each process does so for its first kernel, and they
    have half a gigabyte: while weights are read, nobody waits for it.
    """
    from triton.runtime import cache

    if (key := getattr(cache, "triton_key", None)) is not None:  # where some versions have it
        threading.Thread(target=key, name="hash-triton", daemon=True).start()


class _Loader:
    """Compiles what Triton's asynchronous mode requests, and what the first launch needs."""

    def __init__(self, device: torch.device, patience_s: float) -> None:
        self.compiling = KernelCompilation(os.cpu_count() or 1, patience_s)
        self.name = ""  # of the next requested kernel
        self._device = device
        self._load_launcher = threading.Lock()

    def submit(self, compiled: Callable[[], Any]) -> Future[Any]:
        """The part of Executor that Triton uses."""
        index = driver.active.get_current_device()
        device = torch.device(self._device.type, index)
        return self.compiling.submit(self.name, partial(self._load, compiled, device))

    def _load(self, compiled: Callable[[], Any], device: torch.device) -> Any:
        kernel = compiled()
        # Loads the launcher, which some versions of Triton compile with a C compiler. All launchers
        # are extension modules of one name: CPython lets a second import of one of them overwrite
        # the functions of the module imported last, so another thread would take the wrong one.
        with self._load_launcher, torch.cuda.device(device):
            _ = kernel.run
        return kernel


_ahead: ContextVar[_Loader | None] = ContextVar("ahead", default=None)  # None: kernels are launched


def compiled_aside(name: str, load: Callable[[], object] | None) -> bool:
    """Whether kernels are being compiled ahead, so that nothing may be launched; if so, also run
    `load` in parallel, which compiles with another compiler.
    """
    if (loader := _ahead.get()) is None:
        return False
    if load is not None:
        loader.compiling.submit(name, load)
    return True


@contextmanager
def compiled_ahead(device: torch.device, patience_s: float) -> Iterator[None]:
    """Inside, this thread launches no kernels, and results are meaningless. The kernels are
    compiled in parallel; on exit each is loaded on the GPU of `device`'s kind that was current when
    it was requested, as a drafter's head may be on another one.

    Nothing may be captured inside. A kernel that fails to compile raises when it is launched.
    Raises CompilerHangs if none finishes within `patience_s` of the previous one.
    """
    loader = _Loader(device, patience_s)
    with knobs.compilation.scope(), triton.AsyncCompileMode(loader, ignore_errors=True):
        # Dumping the intermediate steps as text takes a quarter of the interpreter's time.
        knobs.compilation.store_binary_only = True
        token = _ahead.set(loader)
        try:
            yield
        finally:
            _ahead.reset(token)
            loader.compiling.end()
