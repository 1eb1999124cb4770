"""Passes of one shard, operation by operation: all on CPUs, long prefills on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from luceasync.models.trees import chain
from luceasync.pipeline.passes import Batch
from luceasync.pipeline.shard import Shard


class EagerSteps:
    """Every pass of `shard`; see pipeline.passes.Passes."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._verified: Batch | None = None

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        shard = self._shard
        x = shard.ends.embed(given) if shard.plan.is_first else given
        past = None if shard.past is None else shard.past.before(batch, is_last=project)
        x = shard.forward(x, shard.rows(batch), past)
        shard.passed(batch)
        if not shard.plan.is_last:
            return x
        if batch.scores:
            return shard.ends.project(x)
        return shard.ends.project(x[:, -1:]) if project else None

    def decode(self, batch: Batch, given: Tensor) -> Tensor:
        shard = self._shard
        x = shard.ends.embed(given) if shard.plan.is_first else given
        x = shard.forward(x, shard.rows(batch))
        return shard.ends.project(x) if shard.plan.is_last else x

    def verify(self, batch: Batch, given: Tensor, parents: Tensor | None) -> Tensor:
        shard, self._verified = self._shard, batch
        if parents is None:
            parents = chain(len(batch.lanes), batch.num_rows, shard.device)
        x = shard.ends.embed(given) if shard.plan.is_first else given
        trees = shard.trees(parents)
        x = shard.verify(x, shard.tree_rows(batch, trees.depths), trees)
        return shard.ends.project(x) if shard.plan.is_last else x

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        assert self._verified is not None, "commit follows verify"
        self._shard.commit(self._shard.paths(self._verified, paths))

    def close(self) -> None:
        """Nothing is held."""
