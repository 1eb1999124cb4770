"""Passes of one shard: moves inputs to its device, and orders passes after what their lanes wait
for.

Does not know other shards. ShardSteps implement how the device runs a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from luceasync.errors import PageEventsOutOfOrder
from luceasync.kv.pages import PageEvent
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.capture import Capture
from luceasync.pipeline.captured_round import Accept, accept_best
from luceasync.pipeline.graph import GraphedSteps
from luceasync.pipeline.passes import (
    AttentionMass,
    Batch,
    DeviceRounds,
    PassInput,
    RoundWork,
    StepKind,
)
from luceasync.pipeline.past_rows import PastOfLanes
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.platform import Platform
from luceasync.pipeline.shard import Shard
from luceasync.pipeline.static_inputs import Feed, feed_best
from luceasync.pipeline.steps import EagerSteps, ShardSteps
from luceasync.pipeline.transfer import HostCopier, Transfer
from luceasync.ranking.local import KnownBest, LocalLogits, RankingKernels
from luceasync.ranking.logits import Logits
from luceasync.ranking.proposals import DraftCandidates, Proposal, Proposer

HOST = torch.device("cpu")


def steps_of(shard: Shard, plan: Plan, spec: ModelSpec) -> ShardSteps:
    """The steps that suit the shard's device best."""

    def eager() -> ShardSteps:
        return EagerSteps(shard)

    def captured(capture: Capture) -> ShardSteps:
        feed = shard.platform.pick(torch=lambda: feed_best, triton=_fused_feed)
        accept = shard.platform.pick(torch=lambda: accept_best, triton=_fused_accept)
        return GraphedSteps(shard, capture, plan, spec, bodies_for(shard.platform), feed, accept)

    return shard.platform.passes(eager=eager, captured=captured)


def bodies_for(platform: Platform) -> RankingKernels:
    """The functions that rank tokens on the platform's device."""
    return platform.pick(torch=RankingKernels, triton=_fused_bodies)


def _fused_bodies() -> RankingKernels:
    from luceasync.kernels.best_token import best_tokens
    from luceasync.kernels.highest_tokens import highest_tokens

    return RankingKernels(best_tokens, highest_tokens, HostCopier())


def _fused_feed() -> Feed:
    from luceasync.kernels.best_token import feed_best as fused

    return fused


def _fused_accept() -> Accept:
    from luceasync.kernels.best_token import accept_best as fused

    return fused


class ShardPasses:
    """Passes of one shard."""

    def __init__(self, shard: Shard, steps: ShardSteps, transfer: Transfer) -> None:
        self._shard = shard
        self._steps = steps
        self._transfer = transfer
        self._proposer = Proposer()
        self._bodies = bodies_for(shard.platform)
        self._epoch: int | None = None  # epoch of the page map; a new stage accepts any first one
        self._verified: Batch | None = None
        self._logits: Tensor | None = None  # of the last pass that made any, [entries, ..., vocab]
        self._best: KnownBest | None = None  # their best tokens, if the pass found them

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        with self._shard.on_device():
            self._shard.use(batch.lanes)
            x = self._steps.prefill(batch, self._here(given), project=project)
        self._ran(batch, [batch.num_rows] * len(batch.lanes))
        if batch.scores and self._shard.plan.is_last:
            assert x is not None, "a chunk that scores returns logits"
            self._logits, self._best = x[0], None
            return x[:, -1:] if project else None
        return x

    def decode(self, batch: Batch, given: PassInput) -> Tensor | None:
        with self._shard.on_device():
            self._shard.use(batch.lanes)
            near = self._near(given) if isinstance(given, Tensor) else given
            output = self._steps.decode(batch, near)
        self._ran(batch, [1] * len(batch.lanes))
        if not self._shard.plan.is_last:
            return output
        self._logits, self._best = output, self._steps.best
        return None

    def run_ahead(self, batch: Batch) -> None:
        with self._shard.on_device():
            self._shard.use(batch.lanes)
            self._steps.run_ahead(batch)

    def verify(self, batch: Batch, given: Tensor, parents: Tensor | None) -> Tensor | None:
        with self._shard.on_device():
            self._shard.use(batch.lanes)
            above = None if parents is None else self._here(parents)
            output = self._steps.verify(batch, self._near(given), above)
        self._verified = batch
        if not self._shard.plan.is_last:
            return output
        self._logits, self._best = output, self._steps.best
        return None

    def prepare(self, kind: StepKind, batch: Batch) -> None:
        with self._shard.on_device():
            self._steps.prepare(kind, batch)

    def logits(self, num_entries: int) -> Logits:
        assert self._logits is not None, "logits follow decode or verify"
        return LocalLogits(self._logits[:num_entries], self._bodies, self._best)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        batch, self._verified = self._verified, None
        assert batch is not None, "commit follows verify, once"
        with self._shard.on_device():
            self._steps.commit(paths)
        self._ran(batch, [*map(len, paths)])

    def taps(self, paths: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        return self._shard.taps  # no copy is made, so rows outside `paths` may stay

    def embed(self, tokens: Tensor) -> Tensor:
        with self._shard.on_device():
            return self._shard.ends.embed(self._here(tokens))

    def propose_from(self, rows: Tensor, anchors: Tensor, budget: int | None) -> Proposal:
        with self._shard.on_device():
            logits = self._shard.ends.project_rows(self._here(rows))
            return self._proposer(self._here(anchors), logits, budget)

    def candidates_from(self, rows: Tensor, num_candidates: int) -> DraftCandidates:
        with self._shard.on_device():
            logits = self._shard.ends.project_uncapped(self._here(rows))
            best, ids = logits.topk(min(num_candidates, logits.shape[-1]))
            return DraftCandidates(ids, best)

    def captured_round(
        self, work: RoundWork, taps: Sequence[int], num_entries: int
    ) -> DeviceRounds | None:
        return self._steps.captured_round(work, taps, num_entries)

    def place(self, epoch: int, events: Sequence[PageEvent]) -> None:
        if self._epoch is not None and epoch != self._epoch + 1:
            raise PageEventsOutOfOrder(f"page events {epoch} after {self._epoch}")
        self._epoch = epoch
        self._steps.forget()
        self._shard.place(events)

    def recall(self, lane: int, places: Sequence[tuple[int, int]]) -> None:
        self._steps.forget()
        with self._shard.on_device():
            self._shard.absent.recall(lane, places)

    def start_probe(self, lane: int, num_tokens: int) -> None:
        with self._shard.on_device():
            self._past.start_probe(lane, num_tokens)

    def attention_mass(self, lane: int) -> AttentionMass:
        with self._shard.on_device():
            return self._past.attention_mass(lane)

    def reset(self, lane: int) -> None:
        # The lane may reach the same position with the same token, in another sequence.
        self._steps.forget()
        with self._shard.on_device():
            self._shard.reset(lane)

    @property
    def _past(self) -> PastOfLanes:
        past = self._shard.past
        assert past is not None, "no pool is planned"
        return past

    def _ran(self, batch: Batch, counts: Sequence[int]) -> None:
        """The entries' first `counts` rows are queued and belong to their lanes."""
        if self._shard.past is not None:
            self._shard.past.note_run(batch.lanes, batch.begins, counts)

    def _near(self, x: Tensor) -> Tensor:
        """`x` on the device, or unchanged on the host: steps copy it to their static inputs."""
        return x if x.device == HOST else self._here(x)

    def _here(self, x: Tensor) -> Tensor:
        return self._transfer(x, self._shard.device)
