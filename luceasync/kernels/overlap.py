"""How decode kernels follow each other without gaps: programmatic dependent launch.

A kernel may start while the preceding one still runs. It may load weights, which nothing writes,
and must wait before it accesses anything else. On hardware without such launches these are no-ops.
Also has the other properties of hardware that decide how a kernel is compiled.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    """Let the next kernel start once every program has called this.

    Small kernels call it at once. One that reads weights calls it after its own wait, so that at
    most one other kernel competes for bandwidth.
    """
    if OVERLAP:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait until all work before this kernel is done and visible.

    Before it a kernel may also load what no preceding kernel of the same pass writes: a lane's
    number, and a state that it alone writes. The preceding kernel may still be waiting itself, and
    so may the one before that. But a pass begins with a plain launch (a graph, a copy or a torch
    operation), which starts when all earlier work is complete and visible, and a kernel starts
    early only after the preceding one has started. So everything that has started in a pass sees
    the work of earlier passes. Commits are plain launches too, and come last in their pass.

    A product of the same rows as the preceding one (quant_gemv.cu, BESIDE) waits at its end
    instead: it starts when that one has waited, so the rows are ready, and ends after it.
    """
    if OVERLAP:
        cuda.gdc_wait()


def overlap_options(tensor: Tensor) -> dict[str, Any]:
    """Launch options of a decode kernel that works on `tensor`'s device."""
    if tensor.is_cuda and can_overlap(tensor.device.index or 0):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


def dot_precision(dtype: torch.dtype) -> str:
    """The input precision of tl.dot: float32 is never truncated to tf32 (ROCm has no tf32x3)."""
    return "tf32x3" if dtype == torch.float32 and torch.version.hip is None else "ieee"


def shared_bytes(tensor: Tensor) -> int:
    """Shared memory of a program on the tensor's device; the interpreter has no limit."""
    return _shared_bytes(tensor.device.index or 0) if tensor.is_cuda else 1 << 20


def num_multiprocessors(tensor: Tensor) -> int:
    """Multiprocessors of the tensor's device; a small number for the interpreter."""
    return _num_multiprocessors(tensor.device.index or 0) if tensor.is_cuda else 8


@functools.cache
def _shared_bytes(device_index: int) -> int:
    properties = torch.cuda.get_device_properties(device_index)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


@functools.cache
def _num_multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@functools.cache
def can_overlap(device_index: int) -> bool:
    """Whether the device can start a kernel before the preceding one has ended."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device_index) >= (9, 0)
