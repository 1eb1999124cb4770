"""One shard's passes on its device: what is given comes to it, what its lanes wait for comes first.

Knows no other shard. How the device runs a pass is for its steps to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from luceasync.kv.pages import PageEvent
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.capture import Capture
from luceasync.pipeline.eager import EagerSteps
from luceasync.pipeline.graph import GraphedShard
from luceasync.pipeline.passes import Batch
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.shard import Shard
from luceasync.pipeline.transfer import Transfer
from luceasync.ranking.local import LocalLogits
from luceasync.ranking.logits import Logits
from luceasync.ranking.proposals import Proposal, Proposer


class Steps(Protocol):
    """How a device runs one shard's passes; what it is given is there already. Decode and verify
    give the activation or, from the last layer, logits float32 [entries, rows, vocab]. See Passes.
    """

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None: ...

    def decode(self, batch: Batch, given: Tensor) -> Tensor: ...

    def verify(self, batch: Batch, given: Tensor, parents: Tensor | None) -> Tensor: ...

    def commit(self, paths: Sequence[Sequence[int]]) -> None: ...

    def close(self) -> None: ...


def steps_of(shard: Shard, plan: Plan, spec: ModelSpec) -> Steps:
    """Those that the shard's device runs best."""

    def eager() -> Steps:
        return EagerSteps(shard)

    def captured(capture: Capture) -> Steps:
        return GraphedShard(shard, capture, plan, spec)

    return shard.platform.passes(eager=eager, captured=captured)


class ShardPasses:
    """See Passes."""

    def __init__(self, shard: Shard, steps: Steps, transfer: Transfer) -> None:
        self._shard = shard
        self._steps = steps
        self._transfer = transfer
        self._proposer = Proposer()
        self._logits: Tensor | None = None  # of the last decode or verify, [entries, ..., vocab]

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        with self._shard.on_device():
            self._shard.use(batch.lanes)
            return self._steps.prefill(batch, self._here(given), project=project)

    def decode(self, batch: Batch, given: Tensor) -> Tensor | None:
        with self._shard.on_device():
            self._shard.use(batch.lanes)
            output = self._steps.decode(batch, self._here(given))
        if not self._shard.plan.is_last:
            return output
        self._logits = output[:, 0]
        return None

    def verify(self, batch: Batch, given: Tensor, parents: Tensor | None) -> Tensor | None:
        with self._shard.on_device():
            self._shard.use(batch.lanes)
            above = None if parents is None else self._here(parents)
            output = self._steps.verify(batch, self._here(given), above)
        if not self._shard.plan.is_last:
            return output
        self._logits = output
        return None

    def logits(self, num_entries: int) -> Logits:
        assert self._logits is not None, "logits follow decode or verify"
        return LocalLogits(self._logits[:num_entries])

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        with self._shard.on_device():
            self._steps.commit(paths)

    def taps(self, paths: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        return self._shard.taps  # nobody copies them, so all rows may stay in

    def embed(self, tokens: Tensor) -> Tensor:
        with self._shard.on_device():
            return self._shard.ends.embed(self._here(tokens))

    def propose_from(self, rows: Tensor, anchors: Tensor, budget: int | None) -> Proposal:
        with self._shard.on_device():
            logits = self._shard.ends.project_rows(self._here(rows))
            return self._proposer(self._here(anchors), logits, budget)

    def place(self, events: Sequence[PageEvent]) -> None:
        self._shard.place(events)

    def reset(self, lane: int) -> None:
        with self._shard.on_device():
            self._shard.reset(lane)

    def _here(self, x: Tensor) -> Tensor:
        return self._transfer(x, self._shard.device)
