"""Passes of one shard, operation by operation: all on CPUs, long prefills on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from luceasync.models.pass_rows import Entry
from luceasync.models.trees import chain
from luceasync.pipeline.passes import Batch, Given, StepKind
from luceasync.pipeline.shard import Shard
from luceasync.pipeline.transfer import as_rows
from luceasync.ranking.local import FoundBest


class EagerSteps:
    """Every pass of `shard`; see pipeline.passes.Passes."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.best: FoundBest | None = None  # whoever wants them looks for them
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

    def rehearse_past(self, batch: Batch, given: Tensor) -> None:
        """A chunk of no lane's prompt, before which something is not here, for kernels that are to
        be compiled: what it would write lies in the first pages.
        """
        shard = self._shard
        assert shard.past is not None, "no pool is planned"
        x = shard.ends.embed(given) if shard.plan.is_first else given
        places = slice(0, batch.num_rows)
        entry = Entry(0, 0, batch.num_rows, places, places)
        rows = replace(shard.rows(batch), entries=(entry,))
        shard.forward(x, rows, shard.past.rehearsal(batch.num_rows))

    def decode(self, batch: Batch, given: Given) -> Tensor:
        shard, given = self._shard, as_rows(given)
        x = shard.ends.embed(given) if shard.plan.is_first else given
        x = shard.forward(x, shard.rows(batch))
        return shard.ends.project(x)[:, 0] if shard.plan.is_last else x

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

    def run_ahead(self, batch: Batch) -> None:
        """The host would wait for it."""

    def forget(self) -> None:
        """Nothing has run ahead."""

    def prepare(self, kind: StepKind, batch: Batch) -> None:
        """Nothing can."""

    def close(self) -> None:
        """Nothing is held."""
