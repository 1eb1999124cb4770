"""Triton kernels that are either launched, or compiled in parallel before the first launch.

Threads compile, as Triton releases the GIL most of the time. Does not know kernels or passes.
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
from triton.runtime import JITFunction, driver

from luceasync.kernels.compiling import CompilerHangs, KernelCompilation

ALIGNMENT_BYTES = 16  # for which Triton compiles a separate program

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

    def launch(self, grid: tuple[int, int, int], *arguments: Any, **options: Any) -> None:
        """`kernel[grid](...)` in a third of the host's time, for launches whose numbers do not
        vary, except for parameters that are not specialized. Constants are in `options`.

        Caches programs by what they were compiled for: the device, dtypes, numbers, and the `kind`
        of a tensor descriptor. Launches with unaligned tensors are left to Triton.
        """
        key = None if _ahead.get() else self._key(arguments, options)
        if key is not None and (program := self._programs.get(key)) is not None:
            names = self._jit.arg_names[len(arguments) :]
            program[grid](*arguments, *[options[name] for name in names])
            return
        launched = self[grid](*arguments, **options)
        if key is not None and isinstance(launched, CompiledKernel):
            self._programs[key] = launched

    def _key(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Hashable | None:
        """None: a tensor is not aligned. For AMD Triton also tells apart how large tensors are."""
        if torch.version.hip is not None or not isinstance(self._jit, JITFunction):
            return None
        parts: list[Hashable] = [driver.active.get_current_device()]
        for parameter, each in zip(self._jit.params, arguments, strict=False):
            if isinstance(each, torch.Tensor):
                if each.data_ptr() % ALIGNMENT_BYTES and not parameter.do_not_specialize:
                    return None
                parts.append(each.dtype)
            elif each is None or not parameter.do_not_specialize:
                parts.append(getattr(each, "kind", each))
        return *parts, *options.values()


def kernel(
    jit: Callable[..., Any] = triton.jit, **options: Any
) -> Callable[[Callable[..., None]], Kernel]:
    """Decorate a kernel function; `options` are those of `jit`, Triton's or Gluon's."""
    return lambda function: Kernel(jit(function, **options))


@functools.cache
def hash_ahead() -> None:
    """Start a thread that hashes Triton's files, once. Each process hashes them for its first
    kernel, and they take half a gigabyte: this way it happens while weights are read."""
    from triton.runtime import cache

    if (key := getattr(cache, "triton_key", None)) is not None:  # in some versions it is here
        threading.Thread(target=key, name="hash-triton", daemon=True).start()


class _Loader:
    """Compiles the kernels requested by Triton's asynchronous mode, and what their first launch
    needs."""

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
    `load` in parallel, which uses another compiler."""
    if (loader := _ahead.get()) is None:
        return False
    if load is not None:
        loader.compiling.submit(name, load)
    return True


@contextmanager
def compiled_ahead(device: torch.device, patience_s: float) -> Iterator[None]:
    """Within the context, this thread launches no kernels, and results are meaningless. The kernels
    are compiled in parallel; on exit each is loaded on the GPU of `device`'s kind that was current
    when it was requested, as a drafter's head may be on another one.

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
