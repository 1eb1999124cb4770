"""How decode kernels follow each other without gaps: programmatic dependent launch.

A kernel may start while the one before it still runs; it may load weights, which nothing writes,
and must wait before it touches anything else. Where the hardware has no such launch, all of
this is nothing. Also: what else of the hardware decides how a kernel is compiled.
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
    """Let the next kernel start once every program is here.

    Small kernels say so at once; one that reads weights only after its own wait, so that no more
    than one other takes bandwidth from it.
    """
    if OVERLAP:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait until all work before this kernel is done and visible.

    Before it a kernel may also load what no kernel in front of it in the same pass writes: a lane's
    number, and a state that it alone writes. The kernel in front may still be waiting itself, and
    so may the one in front of that. But a pass begins plainly, as a graph or with a copy or a torch
    operation: these start when all that was queued before is complete and visible. A kernel starts
    early only after the one in front has started. So whatever has started in a pass has the work of
    earlier passes behind it. Commits are launched plainly too, and come last in their pass.

    A product of the same rows as the one in front (quant_gemv.cu, BESIDE) waits last instead: it
    starts when that one has waited, so that the rows are there, and ends after it.
    """
    if OVERLAP:
        cuda.gdc_wait()


def overlap_options(tensor: Tensor) -> dict[str, Any]:
    """Launch options of a decode kernel that works on `tensor`'s device."""
    if tensor.is_cuda and can_overlap(tensor.device.index or 0):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


def dot_precision(dtype: torch.dtype) -> str:
    """What tl.dot does with `dtype`: float32 is never cut to tf32 (ROCm has no tf32x3)."""
    return "tf32x3" if dtype == torch.float32 and torch.version.hip is None else "ieee"


def shared_bytes(tensor: Tensor) -> int:
    """Shared memory that a program can have where `tensor` lies; the interpreter has no limit."""
    return _shared_bytes(tensor.device.index or 0) if tensor.is_cuda else 1 << 20


def num_multiprocessors(tensor: Tensor) -> int:
    """Of the device where `tensor` lies; the interpreter is taken for a small one."""
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
    """Whether kernels of the device may begin before the one in front of them has ended."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device_index) >= (9, 0)
