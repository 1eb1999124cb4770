"""How a shard's device runs passes: the protocol, and the implementation that launches each
operation.

EagerSteps run all passes on CPUs, and long prefill chunks on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from luceasync.models.pass_rows import Entry
from luceasync.models.trees import chain
from luceasync.pipeline.passes import Batch, DeviceRounds, PassInput, RoundWork, StepKind
from luceasync.pipeline.shard import Shard
from luceasync.pipeline.transfer import as_rows
from luceasync.ranking.local import KnownBest


class ShardSteps(Protocol):
    """How a device runs one shard's passes. Inputs of `prefill` are on the device, those of
    `decode` and `verify` may be on the host.

    Each returns the activation or, from the last layer, logits float32: [entries, vocab] after a
    decode, [entries, rows, vocab] after a verify or a prefill that scores. See Passes.
    """

    @property
    def best(self) -> KnownBest | None:
        """Best tokens of the last decode or verify, if the step found them itself."""
        ...

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None: ...

    def decode(self, batch: Batch, given: PassInput) -> Tensor: ...

    def run_ahead(self, batch: Batch) -> None: ...

    def forget(self) -> None:
        """Another operation was queued in between: a step that has run ahead is not the next
        one."""
        ...

    def verify(self, batch: Batch, given: Tensor, parents: Tensor | None) -> Tensor: ...

    def commit(self, paths: Sequence[Sequence[int]]) -> None: ...

    def captured_round(
        self, work: RoundWork, taps: Sequence[int], num_entries: int
    ) -> DeviceRounds | None:
        """See Passes."""
        ...

    def prepare(self, kind: StepKind, batch: Batch) -> None:
        """A step of this batch comes next: do the work that does not need its input."""
        ...

    def close(self) -> None: ...


class EagerSteps:
    """All passes of `shard`, operation by operation."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.best: KnownBest | None = None  # never found here: ranking computes them
        self._verified: Batch | None = None

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        shard = self._shard
        x = shard.ends.embed(given) if shard.plan.is_first else given
        past = None if shard.past is None else shard.past.before(batch, is_last=project)
        x = shard.forward(x, shard.rows(batch), past)
        shard.note_mark(batch)
        if not shard.plan.is_last:
            return x
        if batch.scores:
            return shard.ends.project(x)
        return shard.ends.project(x[:, -1:]) if project else None

    def rehearse_past(self, batch: Batch, given: Tensor) -> None:
        """Run a chunk of no lane that attends to absent rows, so that its kernels are compiled or
        loaded. It writes to the first pages."""
        shard = self._shard
        assert shard.past is not None, "no pool is planned"
        x = shard.ends.embed(given) if shard.plan.is_first else given
        places = slice(0, batch.num_rows)
        entry = Entry(0, 0, batch.num_rows, places, places)
        rows = replace(shard.rows(batch), entries=(entry,))
        shard.forward(x, rows, shard.past.rehearsal(batch.num_rows))

    def decode(self, batch: Batch, given: PassInput) -> Tensor:
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
        """No-op: the host would wait for the step."""

    def forget(self) -> None:
        """No-op: no step runs ahead."""

    def captured_round(self, work: RoundWork, taps: Sequence[int], num_entries: int) -> None:
        return None

    def prepare(self, kind: StepKind, batch: Batch) -> None:
        """No-op: a step has no static inputs."""

    def close(self) -> None:
        """No-op: nothing is held."""
