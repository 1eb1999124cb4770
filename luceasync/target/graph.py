"""A decode step of one shard as CUDA graphs, one for each batch size: one launch instead of
hundreds.

Owns the static inputs and outputs of the captured step. Results are views of static memory: they
hold until the next step of the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from luceasync.models.rows import NO_LANE
from luceasync.target.eager import EagerSteps
from luceasync.target.shard import Batch, Shard

WARMUP_STEPS = 2  # compile kernels and let the allocator settle before capture


@dataclass(frozen=True, slots=True)
class _Step:
    graph: torch.cuda.CUDAGraph
    tokens: Tensor | None  # int64 [size, 1], the first shard's input
    activation: Tensor | None  # [size, 1, hidden], every other shard's input
    lanes: Tensor  # int32 [size]
    positions: Tensor  # int32 [size, 1]
    output: Tensor  # logits [size, 1, vocab] of the last shard, else the activation


class GraphedShard:
    """Decode steps of `shard`, captured for every size of `sizes`."""

    def __init__(self, shard: Shard, sizes: Sequence[int], hidden_size: int, dtype: torch.dtype):
        self._shard = shard
        self._eager = EagerSteps(shard)
        self._steps: dict[int, _Step] = {}
        with torch.cuda.device(shard.device):
            pool = torch.cuda.graph_pool_handle()
            # The largest first: the smaller ones then fit into its memory.
            for size in sorted(sizes, reverse=True):
                self._steps[size] = self._capture(size, hidden_size, dtype, pool)

    def decode(self, batch: Batch, given: Tensor) -> Tensor:
        """One row for each entry. `given`: tokens int64 [size, 1] for the first shard, else the
        activation.

        Returns the activation, or logits float32 [size, 1, vocab] from the last shard.
        """
        step = self._steps[len(batch.lanes)]
        static = step.tokens if step.activation is None else step.activation
        assert static is not None
        static.copy_(given, non_blocking=True)
        place = torch.tensor([batch.lanes, batch.begins], dtype=torch.int32).pin_memory()
        step.lanes.copy_(place[0], non_blocking=True)
        step.positions.copy_(place[1, :, None], non_blocking=True)
        step.graph.replay()
        return step.output

    def verify(self, batch: Batch, given: Tensor, parents: Tensor) -> Tensor:
        """See EagerSteps."""
        return self._eager.verify(batch, given, parents)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """See EagerSteps."""
        self._eager.commit(paths)

    def close(self) -> None:
        """Let graphs and static tensors go."""
        self._steps.clear()

    def _capture(
        self, size: int, hidden_size: int, dtype: torch.dtype, pool: tuple[int, int]
    ) -> _Step:
        device = self._shard.device
        lanes = torch.full((size,), NO_LANE, dtype=torch.int32, device=device)
        positions = torch.zeros((size, 1), dtype=torch.int32, device=device)
        tokens = activation = None
        if self._shard.plan.is_first:
            tokens = torch.zeros((size, 1), dtype=torch.int64, device=device)
        else:
            activation = torch.zeros((size, 1, hidden_size), dtype=dtype, device=device)

        def run() -> Tensor:
            rows = self._shard.rows_from((), lanes, positions)
            x = activation if tokens is None else self._shard.embed(tokens)
            x = self._shard.forward(x, rows)
            return self._shard.project(x) if self._shard.plan.is_last else x

        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                run()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool, stream, "thread_local"):
            output = run()
        return _Step(graph, tokens, activation, lanes, positions, output)
