"""A stage: the shards of one process, a part of a model's chain. The protocol, and the
implementation for shards of this process.

Synchronous; engine thread only.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from luceasync.errors import ModelError
from luceasync.host_cache.arena import HostMemory, PlainMemory
from luceasync.host_cache.nodes import Nodes
from luceasync.models.loader import TensorSource
from luceasync.models.spec import ModelSpec
from luceasync.nodes import NodeKey
from luceasync.pipeline.passes import Batch, Chain, Passes
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.platform import Event, Platform, open_platform
from luceasync.pipeline.shard import Shard
from luceasync.pipeline.shard_passes import ShardPasses, steps_of
from luceasync.pipeline.steps import ShardSteps
from luceasync.pipeline.transfer import choose_transfer

log = logging.getLogger(__name__)


class Stage(Protocol):
    """The shards of one process."""

    @property
    def num_shards(self) -> tuple[int, int]:
        """Number of shards in this process and in others."""
        ...

    @property
    def passes(self) -> Passes:
        """Passes over its layers."""
        ...

    def expert_counts(self) -> Mapping[str, int]:
        """Counts of experts in its passes so far, by how they were found, and bytes, if experts
        stay in host memory of this process. May be called from any thread."""
        ...

    def synchronize(self) -> None:
        """Wait until its last shard has done all queued work."""
        ...

    @property
    def nodes(self) -> Sequence[Nodes]:
        """Holders of its layers' part of each node."""
        ...

    def raise_if_failed(self) -> None:
        """Raise StageFailed if the stage is known to have failed, without contacting it."""
        ...

    def check_alive(self) -> None:
        """Raise StageFailed if the stage does not respond. Waits for its reply; call it while
        nothing runs."""
        ...

    def restart_failed(self, lost: Callable[[Sequence[NodeKey]], None]) -> bool:
        """Restart the stage, with its nodes, if it has failed; nodes that could not be restored are
        passed to `lost`. Its lanes are empty then. Returns whether it was restarted. Blocks until
        that is done. Raises StageFailed, ModelError, and Unavailable at shutdown."""
        ...

    def close(self) -> None:
        """Free everything. May be called twice."""
        ...


class LocalStage:
    """Shards of this process."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        source: TensorSource,
        advance: Callable[[int], None] = lambda num_bytes: None,
        taps: Sequence[int] = (),
        memory: HostMemory | None = None,
        number: int = 0,
    ) -> None:
        """Load the shards of stage `number` of the plan. `taps`: layers whose rows are kept;
        `memory`: holds saved nodes. Raises ModelError and frees what was loaded."""
        _check_taps(spec, taps)
        self._shards: list[Shard] = []
        self._steps: list[ShardSteps] = []
        memory = memory or PlainMemory()
        here = [open_platform(shard.device).device for shard in plan.here]
        transfer = choose_transfer(plan.peer_access, here)
        begin, end = plan.stages[number]
        try:
            for shard_plan in plan.shards[begin:end]:
                platform = open_platform(shard_plan.device)
                began_s = time.monotonic()
                shard = Shard(spec, plan, shard_plan, platform, source, advance, memory, taps)
                self._shards.append(shard)
                _log_phase(f"weights and lanes on {platform.name}", began_s)
            began_s = time.monotonic()
            for shard in self._shards:
                self._steps.append(steps_of(shard, plan, spec))
            _log_phase("passes", began_s)
        except BaseException:
            self.close()
            raise
        pairs = zip(self._shards, self._steps, strict=True)
        passes = [ShardPasses(shard, steps, transfer) for shard, steps in pairs]
        self.prepare = passes[0].prepare
        self._passes = _PipelinedChain(passes, self._shards[-1].platform, len(plan.shards))

    @property
    def num_shards(self) -> tuple[int, int]:
        return len(self._shards), 0

    @property
    def passes(self) -> Passes:
        return self._passes

    def expert_counts(self) -> Mapping[str, int]:
        """See Shard, of all shards."""
        sums: Counter[str] = Counter()
        for shard in self._shards:
            sums.update(shard.expert_counts())
        return sums

    def synchronize(self) -> None:
        self._shards[-1].platform.synchronize()

    def taken(self) -> Event:
        """An event: the first shard has read its last input."""
        first = self._shards[0].platform
        with first.on_device():
            return first.record_event()

    @property
    def nodes(self) -> Sequence[Nodes]:
        return [shard.nodes for shard in self._shards]

    def raise_if_failed(self) -> None:
        """No-op: it lives as long as this process."""

    def check_alive(self) -> None:
        """No-op: it lives as long as this process."""

    def restart_failed(self, lost: Callable[[Sequence[NodeKey]], None]) -> bool:
        """No-op: it cannot fail."""
        return False

    def close(self) -> None:
        if self._shards and self._steps:
            self._passes.finish()
        for steps in self._steps:
            steps.close()
        for shard in self._shards:
            shard.close()
        platforms = [shard.platform for shard in self._shards]
        self._steps.clear()
        self._shards.clear()
        for platform in platforms:
            platform.empty_cache()

    @property
    def device_bytes(self) -> dict[str, int]:
        """Bytes of weights and state on each device."""
        return {shard.plan.device: shard.num_bytes for shard in self._shards}


class _PipelinedChain(Chain):
    """Overlaps prefill chunks on GPUs: while one shard runs a chunk, the shard before it runs the
    next one. At most one more chunk is queued than the model has shards.

        shard 0   chunk 0   chunk 1   chunk 2   ...
        shard 1             chunk 0   chunk 1   ...
    """

    def __init__(self, parts: Sequence[Passes], last: Platform, num_ahead: int) -> None:
        super().__init__(parts)
        self._last = last
        self._num_ahead = num_ahead
        self._in_flight: deque[Event] = deque()

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        while len(self._in_flight) > self._num_ahead:
            self._in_flight.popleft().synchronize()
        x = super().prefill(batch, given, project=project)
        with self._last.on_device():
            self._in_flight.append(self._last.record_event())
        return x

    def finish(self) -> None:
        """Wait for all queued chunks."""
        while self._in_flight:
            self._in_flight.popleft().synchronize()


def _check_taps(spec: ModelSpec, taps: Sequence[int]) -> None:
    for tap in taps:
        if not 0 <= tap < spec.num_layers or taps.count(tap) > 1:
            raise ModelError(
                f"target layers {list(taps)} cannot be tapped: {tap} is not allowed; distinct "
                f"layers in [0, {spec.num_layers}) are expected"
            )


def _log_phase(name: str, began_s: float) -> None:
    """Log how long a phase of a start took."""
    log.debug("start: %s in %.2f s", name, time.monotonic() - began_s)
