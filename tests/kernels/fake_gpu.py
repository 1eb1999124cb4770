"""Triton's compiler for a GPU that does not exist: `python -m tests.kernels.fake_gpu` prints, as
JSON, which thread compiled what, and what was launched when.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
from types import SimpleNamespace
from unittest import mock

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from luceasync.kernels.kernel import compiled_ahead, kernel
from luceasync.kernels.rows import rms_norm, swiglu

GPU = torch.device("cuda", 0)
DEADLINE_S = 300.0


@kernel()
def _broken_kernel(x):
    tl.store(x, x + None)  # fails to compile


class FakeDriver:
    """A driver of one GPU that loads and launches nothing."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
            load_binary=lambda *binary: (1, 1, 0, 0, 1024),
        )

    def launcher_cls(self, source, metadata):
        return lambda *args: self.launched.append(metadata.name)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def norms(width: int) -> None:
    rms_norm(torch.ones(3, width), torch.ones(width), 1e-6)


def tell() -> dict[str, object]:
    """The recorded events."""
    gpu, compiled = FakeDriver(), []
    driver.set_active(gpu)

    def listen(*, src, cache_hit, **told) -> None:
        compiled.append((src.name, threading.current_thread().name.split("_")[0], cache_hit))

    knobs.compilation.listener = listen
    norms(64)
    first = compiled.copy()
    with compiled_ahead(GPU, DEADLINE_S):
        norms(64)  # loaded already, but still not launched
        for width in (128, 256, 256, 512):
            norms(width)
        swiglu(torch.ones(3, 64))
        _broken_kernel[(1,)](torch.ones(3))
        other = threading.Thread(target=norms, args=(64,))
        other.start()
        other.join()
        launched_inside = gpu.launched.copy()
    ahead = compiled[len(first) :]
    for width in (64, 128, 256, 512):
        norms(width)
    swiglu(torch.ones(3, 64))
    try:
        _broken_kernel[(1,)](torch.ones(3))
        error = None
    except triton.CompilationError as caught:
        error = type(caught).__name__
    with compiled_ahead(GPU, DEADLINE_S):
        norms(1024)
    return {
        "first": first,
        "launched inside": launched_inside,
        "ahead": sorted(ahead),
        "launched": gpu.launched[len(launched_inside) :],
        "afterwards": compiled[len(first) + len(ahead) :],
        "error": error,
    }


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as empty,
        mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": empty}),
        mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
    ):
        print(json.dumps(tell()))
