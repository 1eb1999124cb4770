"""Backends over model files."""

from __future__ import annotations

from pathlib import Path

from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.precision import Dtype, Precision
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import find_devices
from luceasync.pipeline.plan import make_plan


def open_file(path: Path, max_ctx_tokens: int, dtype: Dtype) -> LayerSplitBackend:
    """The file's model on the CPU, with one lane, activations and K/V in `dtype`."""
    spec = read_spec(path)
    plan = make_plan(
        spec,
        find_devices(["cpu:0"]),
        precision=Precision.of(dtype),
        weights=None,
        parallel=1,
        max_ctx_tokens=max_ctx_tokens,
        prefill_chunk_tokens=None,
        encoding_of=ModelFiles(path).weights.encoding,
    )
    return LayerSplitBackend.open(ModelFiles(path), plan)
