"""The shards of this process: activations go from one to the next.

One protocol for a group, whoever runs it; nobody asks which one it holds. Synchronous, engine
thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from luceasync.errors import ModelError
from luceasync.hoststore.memory import HostMemory, PlainMemory
from luceasync.hoststore.node_store import Span, shares_of
from luceasync.hoststore.tickets import Ticket, together
from luceasync.kv.pages import PageEvent
from luceasync.models.loader import TensorSource
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.eager import EagerSteps
from luceasync.pipeline.graph import GraphedShard
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.platform import Event, open_platform
from luceasync.pipeline.shard import Batch, Shard
from luceasync.pipeline.transfer import choose_transfer


class Group(Protocol):
    """The layers of one process."""

    @property
    def layers(self) -> range:
        """The model's layers that the group holds."""
        ...

    @property
    def num_shards(self) -> tuple[int, int]:
        """How many shards it has, in this process and in others."""
        ...

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

    def verify(self, batch: Batch, given: Tensor, parents: Tensor | None) -> Tensor:
        """Run trees of rows, each hung on its lane's end, and write nothing permanent; as above,
        logits of every row: float32 [entries, rows, vocab]. `parents`: int32 [entries, rows], see
        models.trees.TorchTrees; on any device. None: every row follows the one before it.
        """
        ...

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Of each entry of the last `verify` keep the rows of its path, or nothing if it is empty;
        their pages must be placed.
        """
        ...

    def taps(self) -> dict[int, Tensor]:
        """The rows after each tapped layer of the group in the last pass: [entries, rows, hidden],
        where the layer is. After a chunk of a prompt, rows that mean nothing may follow.
        """
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding, where the first layer is: int64 [...] -> [..., hidden]."""
        ...

    def project_rows(self, rows: Tensor) -> Tensor:
        """The head without the final norm, where the last layer is: [..., hidden] -> float32 [...,
        vocab].
        """
        ...

    def place(self, events: Sequence[PageEvent]) -> None: ...

    def reset(self, lane: int) -> None: ...

    def node_bytes(self, span: Span) -> tuple[int, int]:
        """Bytes of keys and values, and of recurrent state, that a save of the span takes."""
        ...

    def save(self, lane: int, node: str, span: Span) -> Ticket:
        """Keep what `span` left behind in the lane, as `node`. Queued. Raises MemoryError; parts of
        the node may be held then.
        """
        ...

    def restore(self, lane: int, nodes: Sequence[str], num_tokens: int) -> Ticket:
        """Put the chain's first `num_tokens` tokens into the lane; its pages must be placed.
        Queued, before what uses the lane next.
        """
        ...

    def drop(self, node: str) -> None:
        """Forget the node, if it is here."""
        ...

    def drop_state(self, node: str) -> None:
        """Forget the recurrent state at the node's end."""
        ...

    def export(self, node: str) -> dict[str, Tensor]:
        """The node's tensors in host memory, by name: `ls<shard>_<kind>.<layer>`."""
        ...

    def check(self, span: Span, tensors: Mapping[str, Tensor]) -> None:
        """Raise SnapshotMismatch unless the tensors are exactly this group's for `span`."""
        ...

    def adopt(self, node: str, span: Span, tensors: Mapping[str, Tensor]) -> None:
        """Own tensors that `check` has passed as `node`, in place of what it was."""
        ...

    def close(self) -> None: ...


class LocalGroup:
    """The shards of this process."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        source: TensorSource,
        advance: Callable[[int], None] = lambda num_bytes: None,
        taps: Sequence[int] = (),
        memory: HostMemory | None = None,
    ) -> None:
        """Load every shard of the plan; `taps`: the layers after which rows are kept, `memory`:
        where saved nodes lie. Raises ModelError; then nothing is left behind.
        """
        _check_taps(spec, taps)
        self._shards: list[Shard] = []
        memory = memory or PlainMemory()
        self._steps: list[_Steps] = []
        self._in_flight: deque[Event] = deque()
        platforms = [open_platform(shard.device) for shard in plan.shards]
        devices = [platform.device for platform in platforms]
        self._transfer = choose_transfer(plan.peer_access, devices)
        try:
            for shard_plan, platform in zip(plan.shards, platforms, strict=True):
                shard = Shard(spec, plan, shard_plan, platform, source, advance, memory, taps)
                self._shards.append(shard)
            for shard in self._shards:
                self._steps.append(_steps_of(shard, plan, spec))
        except BaseException:
            self.close()
            raise

    @property
    def layers(self) -> range:
        return range(self._shards[0].layers.start, self._shards[-1].layers.stop)

    @property
    def num_shards(self) -> tuple[int, int]:
        return len(self._shards), 0

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        """See Group. On GPUs the work is queued: while one shard runs a chunk, the shard before it
        runs the next one. No more chunks are queued than keep every shard busy.
        """
        self._wait_for_room()
        x: Tensor | None = given
        for shard, step in zip(self._shards, self._steps, strict=True):
            with shard.on_device():
                assert x is not None, "only the last shard gives nothing"
                shard.nodes.use(batch.lanes)
                x = step.prefill(batch, self._transfer(x, shard.device), project=project)
        last = self._shards[-1]
        with last.on_device():
            self._in_flight.append(last.platform.record_event())
        return x

    def decode(self, batch: Batch, given: Tensor) -> Tensor:
        x = given
        for shard, step in zip(self._shards, self._steps, strict=True):
            with shard.on_device():
                shard.nodes.use(batch.lanes)
                x = step.decode(batch, self._transfer(x, shard.device))
        return x

    def verify(self, batch: Batch, given: Tensor, parents: Tensor | None) -> Tensor:
        x = given
        for shard, step in zip(self._shards, self._steps, strict=True):
            with shard.on_device():
                shard.nodes.use(batch.lanes)
                above = None if parents is None else self._transfer(parents, shard.device)
                x = step.verify(batch, self._transfer(x, shard.device), above)
        return x

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        for shard, step in zip(self._shards, self._steps, strict=True):
            with shard.on_device():
                step.commit(paths)

    def taps(self) -> dict[int, Tensor]:
        return {layer: x for shard in self._shards for layer, x in shard.taps.items()}

    def embed(self, tokens: Tensor) -> Tensor:
        first = self._shards[0]
        with first.on_device():
            return first.embed(self._transfer(tokens, first.device))

    def project_rows(self, rows: Tensor) -> Tensor:
        last = self._shards[-1]
        with last.on_device():
            return last.project_rows(self._transfer(rows, last.device))

    def _wait_for_room(self) -> None:
        while len(self._in_flight) > len(self._shards):
            self._in_flight.popleft().synchronize()

    def place(self, events: Sequence[PageEvent]) -> None:
        for shard in self._shards:
            shard.place(events)

    def reset(self, lane: int) -> None:
        for shard in self._shards:
            with shard.on_device():
                shard.reset(lane)

    def node_bytes(self, span: Span) -> tuple[int, int]:
        sizes = [shard.nodes.node_bytes(span) for shard in self._shards]
        return sum(rows for rows, _ in sizes), sum(state for _, state in sizes)

    def save(self, lane: int, node: str, span: Span) -> Ticket:
        return together([shard.nodes.save(lane, node, span) for shard in self._shards])

    def restore(self, lane: int, nodes: Sequence[str], num_tokens: int) -> Ticket:
        return together([shard.nodes.restore(lane, nodes, num_tokens) for shard in self._shards])

    def drop(self, node: str) -> None:
        for shard in self._shards:
            shard.nodes.drop(node)

    def drop_state(self, node: str) -> None:
        for shard in self._shards:
            shard.nodes.drop_state(node)

    def export(self, node: str) -> dict[str, Tensor]:
        return {k: t for shard in self._shards for k, t in shard.nodes.export(node).items()}

    def check(self, span: Span, tensors: Mapping[str, Tensor]) -> None:
        shares = shares_of(tensors, [shard.layers for shard in self._shards])
        for shard, share in zip(self._shards, shares, strict=True):
            shard.nodes.check(span, share)

    def adopt(self, node: str, span: Span, tensors: Mapping[str, Tensor]) -> None:
        shares = shares_of(tensors, [shard.layers for shard in self._shards])
        for shard, share in zip(self._shards, shares, strict=True):
            shard.nodes.adopt(node, span, share)

    def close(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().synchronize()
        for step in self._steps:
            step.close()
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


class _Steps(Protocol):
    """Passes of one shard."""

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None: ...

    def decode(self, batch: Batch, given: Tensor) -> Tensor: ...

    def verify(self, batch: Batch, given: Tensor, parents: Tensor | None) -> Tensor: ...

    def commit(self, paths: Sequence[Sequence[int]]) -> None: ...

    def close(self) -> None: ...


def _steps_of(shard: Shard, plan: Plan, spec: ModelSpec) -> _Steps:
    return shard.platform.passes(
        eager=lambda: EagerSteps(shard),
        captured=lambda capture: GraphedShard(shard, capture, plan, spec),
    )


def _check_taps(spec: ModelSpec, taps: Sequence[int]) -> None:
    for tap in taps:
        if not 0 <= tap < spec.num_layers or taps.count(tap) > 1:
            raise ModelError(
                f"target layers {list(taps)} are to be tapped, but {tap} is not allowed: distinct "
                f"layers in [0, {spec.num_layers}) are expected"
            )
