"""The shards of this process: activations go from one to the next.

One protocol for a group, whoever runs it; nobody asks which one it holds. Synchronous, engine
thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from luceasync.kv.pages import PageEvent
from luceasync.models.loader import TensorSource
from luceasync.models.spec import ModelSpec
from luceasync.target.graph import GraphedShard
from luceasync.target.plan import Plan
from luceasync.target.shard import DTYPES, Batch, Shard


class Group(Protocol):
    """The layers of one process."""

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        """Run many rows of one lane. `given`: tokens int64 [1, rows] if the group holds the first
        layer, else the activation [1, rows, hidden]. Returns the activation; from the group with
        the last layer the logits float32 [1, 1, vocab] of the last row if `project`, else None."""
        ...

    def decode(self, batch: Batch, given: Tensor) -> Tensor:
        """Run one row for each entry; as above, logits for every entry: float32 [entries, 1,
        vocab].
        """
        ...

    def place(self, events: Sequence[PageEvent]) -> None: ...

    def reset(self, lane: int) -> None: ...

    def close(self) -> None: ...


class LocalGroup:
    """The shards of this process."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        source: TensorSource,
        advance: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """Load every shard of the plan. Raises ModelError; then nothing is left behind."""
        self._shards: list[Shard] = []
        self._steps: list[_DecodeStep] = []
        try:
            for shard_plan in plan.shards:
                self._shards.append(Shard(spec, plan, shard_plan, source, advance))
            for shard in self._shards:
                self._steps.append(_decode_step(shard, plan, spec))
        except BaseException:
            self.close()
            raise

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        x = given
        for shard in self._shards:
            x = x.to(shard.device, non_blocking=True)
            x = shard.embed(x) if shard.plan.is_first else x
            x = shard.forward(x, shard.rows(batch))
        if not self._shards[-1].plan.is_last:
            return x
        return self._shards[-1].project(x[:, -1:]) if project else None

    def decode(self, batch: Batch, given: Tensor) -> Tensor:
        x = given
        for step in self._steps:
            x = step.decode(batch, x)
        return x

    def place(self, events: Sequence[PageEvent]) -> None:
        for shard in self._shards:
            shard.place(events)

    def reset(self, lane: int) -> None:
        for shard in self._shards:
            shard.reset(lane)

    def close(self) -> None:
        for step in self._steps:
            step.close()
        for shard in self._shards:
            shard.close()
        on_gpu = any(shard.device.type != "cpu" for shard in self._shards)
        self._steps.clear()
        self._shards.clear()
        if on_gpu:
            torch.cuda.empty_cache()

    @property
    def device_bytes(self) -> dict[str, int]:
        """Bytes of weights and state on each device."""
        return {shard.plan.device: shard.num_bytes for shard in self._shards}


class _DecodeStep(Protocol):
    def decode(self, batch: Batch, given: Tensor) -> Tensor: ...

    def close(self) -> None: ...


class _EagerStep:
    """Decode of one shard, operation by operation."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def decode(self, batch: Batch, given: Tensor) -> Tensor:
        shard = self._shard
        x = given.to(shard.device)
        x = shard.embed(x) if shard.plan.is_first else x
        x = shard.forward(x, shard.rows(batch))
        return shard.project(x) if shard.plan.is_last else x

    def close(self) -> None:
        """Nothing is held."""


def _decode_step(shard: Shard, plan: Plan, spec: ModelSpec) -> _DecodeStep:
    """GPUs replay captured graphs, CPUs run the operations."""
    if shard.device.type == "cpu":
        return _EagerStep(shard)
    return GraphedShard(shard, plan.decode_sizes, spec.hidden_size, DTYPES[plan.dtype])
