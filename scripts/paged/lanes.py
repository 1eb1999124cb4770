"""Backends of random weights whose lanes stand at the end of one long node, for benches.

Owns the node and its memory. Knows not what is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from luceasync.bench.model import load_random, plan_for
from luceasync.host_cache.arena import HostMemory
from luceasync.host_cache.copy_stream import copy_beside
from luceasync.host_cache.nodes import Span
from luceasync.kv.cache import total_bytes
from luceasync.models.config import parse_spec
from luceasync.models.precision import Precision
from luceasync.nodes import NodeKey
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.capacity import Policy, Pool, PoolRequest
from luceasync.pipeline.devices import host_memory
from luceasync.pipeline.platform import open_platform

CHUNK = 64
TAU = 64  # tokens after which a look is due
NUM_LANES = 4
NODE = NodeKey(b"context")
ROOM_TOKENS = 4096  # behind the context
HOST_BYTES = 1 << 40  # what plans may count with: nodes are shared here


def loaded(
    options: argparse.Namespace,
    shape: Mapping[str, Any],
    memory: HostMemory,
    policy: Policy | None,
    context: int,
) -> LayerSplitBackend:
    """A backend with random weights; `policy` None: its lanes hold everything."""
    pool = None
    if policy is not None:
        pool = PoolRequest(options.pool, Pool(policy, TAU), HOST_BYTES)
    plan = plan_for(
        shape,
        [options.device],
        parallel=NUM_LANES,
        max_ctx_tokens=context + ROOM_TOKENS,
        dtype="fp32" if options.small else "bf16",
        pool=pool,
    )
    return load_random(shape, plan, memory=memory)


@contextmanager
def memory_of(device: str, num_bytes: int) -> Iterator[HostMemory]:
    """Host memory for nodes, all of it there; nothing may hold any of it afterwards."""
    memory = host_memory([device], num_bytes + (64 << 20))
    wait = getattr(memory, "wait", None)
    assert wait is None or wait(300), "host memory is not there in time"
    try:
        yield memory
    finally:
        if open_platform(device).device.index is not None:
            torch.cuda.synchronize()
        memory.close()


def random_tensors(
    backend: LayerSplitBackend, span: Span, memory: HostMemory, device: str
) -> dict[str, torch.Tensor]:
    """A node's tensors, made where that is fast, small enough for a softmax."""
    place = open_platform(device).device
    tensors = {}
    for name, (shape, dtype) in backend.nodes.shapes(span).items():
        region = memory.allocate(total_bytes([(shape, dtype)]))
        tensors[name] = torch.frombuffer(region, dtype=torch.uint8).view(dtype).view(shape)
        source = (torch.randn(shape, device=place) * 0.3).to(dtype)
        copy_beside([tuple(x.view(-1).view(torch.uint8) for x in (tensors[name], source))])
        open_platform(device).synchronize()
    return tensors


def node_bytes(shape: Mapping[str, Any], num_tokens: int, dtype: str) -> int:
    """Bytes of a node of so many tokens, and of its end."""
    spec, precision = parse_spec(dict(shape)), Precision.of("fp32" if dtype == "fp32" else "bf16")
    sizes = [
        (
            tensor.shape,
            precision.torch_dtype(tensor.role),
            num_tokens if tensor in mixer.rows else 1,
        )
        for mixer in spec.mixers
        for tensor in (*mixer.rows, *mixer.end)
    ]
    return sum(total_bytes([(of, kind)]) * count + 8192 for of, kind, count in sizes)


def taken_up(
    backend: LayerSplitBackend, tensors: Mapping[str, torch.Tensor], span: Span, num_lanes: int
) -> None:
    """Every lane stands at the end of the node."""
    backend.nodes.adopt(NODE, span, tensors)
    for lane in range(num_lanes):
        backend.nodes.restore(lane, [NODE], span.end).wait()
