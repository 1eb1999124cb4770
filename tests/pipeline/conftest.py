"""Backends over tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from luceasync.host_cache.arena import HostMemory
from luceasync.models.files import read_spec
from luceasync.models.formats.safetensors import open_checkpoint
from luceasync.models.precision import Precision
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.capacity import Policy, Pool, PoolRequest
from luceasync.pipeline.devices import find_devices
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import make_plan
from luceasync.pipeline.stage import LocalStage

MakeBackend = Callable[..., LayerSplitBackend]


@pytest.fixture
def make_backend() -> Iterator[MakeBackend]:
    """Loads backends in float32 on CPU devices, or on those named; closes them after the test."""
    backends = []

    def make(
        model_dir: Path,
        *,
        num_shards: int = 1,
        weights: Sequence[float] | None = None,
        parallel: int = 4,
        max_ctx_tokens: int = 512,
        page_order: Sequence[int] | None = None,
        verify_rows: Sequence[int] = (),
        taps: Sequence[int] = (),
        memory: HostMemory | None = None,
        devices: Sequence[str] = (),
        pool_tokens: int | None = None,
        policy: Policy = "qk",
        tau_tokens: int = 64,
        pins: Sequence[tuple[int, int]] = (),
        chunk_tokens: int | None = None,
    ) -> LayerSplitBackend:
        spec = read_spec(model_dir)
        logical = [offer_of(f"cpu:{i}", 2**33) for i in range(num_shards)]
        plan = make_plan(
            spec,
            find_devices(devices) if devices else logical,
            precision=Precision.of("fp32"),
            weights=weights,
            parallel=parallel,
            max_ctx_tokens=max_ctx_tokens,
            prefill_chunk_tokens=chunk_tokens,
            verify_rows=verify_rows,
            pool=None
            if pool_tokens is None
            else PoolRequest(pool_tokens, Pool(policy, tau_tokens, tuple(pins)), 2**40),
        )
        with open_checkpoint(model_dir) as checkpoint:
            stages = [
                LocalStage(spec, plan, checkpoint, taps=taps, memory=memory, number=number)
                for number in range(len(plan.stages))
            ]
        backends.append(LayerSplitBackend(spec, plan, stages, page_order, taps))
        return backends[-1]

    yield make
    for backend in backends:
        backend.close()
