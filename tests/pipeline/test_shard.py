"""Kernels are compiled by passes over few layers; every other pass runs all."""

from __future__ import annotations

import torch

from luceasync.models.encodings import DenseEncoding, Encoding
from luceasync.models.loader import RandomSource
from luceasync.models.quant.ggml import ENCODINGS
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.shard import Shard
from tests.pipeline.plans import plan_of
from tests.pipeline.specs import make_hybrid_spec

OTHER = "layers.2.mlp.down_proj.weight"  # is stored differently
PROMPT = [5, 6, 7]


def encoding_of(name: str) -> Encoding:
    return ENCODINGS["Q8_0"] if name.endswith(OTHER) else DenseEncoding()


def test_kernels_are_compiled_by_few_layers_of_each_kind() -> None:
    spec = make_hybrid_spec()
    plan = plan_of(spec=spec, parallel=1, max_ctx_tokens=256, verify_rows=(2,))
    source = RandomSource(torch.float32, torch.device("cpu"), encoding_of=encoding_of)
    every = range(spec.num_layers)
    backend = LayerSplitBackend.load(spec, plan, source, taps=every)
    [shard] = backend._stages[0]._shards
    assert isinstance(shard, Shard)

    def layers_of_passes() -> list[set[int]]:
        backend.reset(0)
        backend.prefill(0, 0, PROMPT, project=True)
        prefilled = {*shard.taps}
        backend.verify([0], [len(PROMPT)], torch.tensor([[8, 9]]))
        return [prefilled, {*shard.taps}]

    with shard.few_layers():
        few = layers_of_passes()
    assert few == [{0, 1, 2, 6, 3, 7}] * 2  # Gated DeltaNet, the one stored differently, attention
    assert layers_of_passes() == [{*every}] * 2
    backend.close()
