"""The shards of this process: activations go from one to the next.

One protocol for a group, whoever runs it; nobody asks which one it holds. Synchronous, engine
thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from luceasync.kv.node import Span, shares_of
from luceasync.kv.pages import PageEvent
from luceasync.models.loader import TensorSource
from luceasync.models.spec import ModelSpec
from luceasync.target.devices import torch_device
from luceasync.target.graph import GraphedShard
from luceasync.target.plan import Plan
from luceasync.target.shard import DTYPES, Batch, Proposal, Shard
from luceasync.target.transfer import choose_transfer


class Group(Protocol):
    """The layers of one process."""

    @property
    def layers(self) -> range:
        """The model's layers that the group holds."""
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

    def verify(self, proposal: Proposal, given: Tensor) -> Tensor:
        """Run trees of rows and write nothing; as above, logits of every row: float32 [entries,
        rows, vocab].
        """
        ...

    def commit(self, entry: int, lane: int, begin: int, path: Sequence[int]) -> None:
        """Keep a path of the last `verify`; its pages must be placed."""
        ...

    def place(self, events: Sequence[PageEvent]) -> None: ...

    def reset(self, lane: int) -> None: ...

    def save(self, lane: int, node: str, span: Span) -> None:
        """Keep what `span` left behind in the lane, as `node`."""
        ...

    def restore(self, lane: int, node: str) -> None:
        """Put the node into the lane; its pages must be placed."""
        ...

    def drop(self, node: str) -> None:
        """Forget the node, if it is here."""
        ...

    def export(self, node: str) -> dict[str, Tensor]:
        """The node's tensors in host memory, by name: `ls<shard>_<kind>.<layer>`."""
        ...

    def adopt(self, node: str, span: Span, tensors: Mapping[str, Tensor]) -> None:
        """Own the tensors as `node`: all of them, or none and SnapshotMismatch."""
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
    ) -> None:
        """Load every shard of the plan. Raises ModelError; then nothing is left behind."""
        self._shards: list[Shard] = []
        self._steps: list[_DecodeStep] = []
        self._in_flight: deque[torch.cuda.Event] = deque()
        devices = [torch_device(shard.device) for shard in plan.shards]
        self._transfer = choose_transfer(plan.peer_access, devices)
        try:
            for shard_plan in plan.shards:
                self._shards.append(Shard(spec, plan, shard_plan, source, advance))
            for shard in self._shards:
                self._steps.append(_decode_step(shard, plan, spec))
        except BaseException:
            self.close()
            raise

    @property
    def layers(self) -> range:
        return range(self._shards[0].layers.start, self._shards[-1].layers.stop)

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        """See Group. On GPUs the work is queued: while one shard runs a chunk, the shard before it
        runs the next one. No more chunks are queued than keep every shard busy.
        """
        self._wait_for_room()
        x = given
        for shard in self._shards:
            with shard.on_device():
                x = self._transfer(x, shard.device)
                x = shard.embed(x) if shard.plan.is_first else x
                x = shard.forward(x, shard.rows(batch))
        last = self._shards[-1]
        with last.on_device():
            if last.plan.is_last:
                x = last.project(x[:, -1:]) if project else None
            if last.device.type != "cpu":
                self._in_flight.append(torch.cuda.current_stream().record_event())
        return x

    def decode(self, batch: Batch, given: Tensor) -> Tensor:
        x = given
        for shard, step in zip(self._shards, self._steps, strict=True):
            with shard.on_device():
                x = step.decode(batch, self._transfer(x, shard.device))
        return x

    def verify(self, proposal: Proposal, given: Tensor) -> Tensor:
        x = given
        for shard in self._shards:
            with shard.on_device():
                x = self._transfer(x, shard.device)
                x = shard.embed(x) if shard.plan.is_first else x
                x = shard.verify(x, proposal)
                x = shard.project(x) if shard.plan.is_last else x
        return x

    def commit(self, entry: int, lane: int, begin: int, path: Sequence[int]) -> None:
        for shard in self._shards:
            with shard.on_device():
                shard.commit(entry, lane, begin, path)

    def _wait_for_room(self) -> None:
        while len(self._in_flight) > len(self._shards):
            self._in_flight.popleft().synchronize()

    def place(self, events: Sequence[PageEvent]) -> None:
        for shard in self._shards:
            shard.place(events)

    def reset(self, lane: int) -> None:
        for shard in self._shards:
            shard.reset(lane)

    def save(self, lane: int, node: str, span: Span) -> None:
        for shard in self._shards:
            with shard.on_device():
                shard.nodes.save(lane, node, span)

    def restore(self, lane: int, node: str) -> None:
        for shard in self._shards:
            with shard.on_device():
                shard.nodes.restore(lane, node)

    def drop(self, node: str) -> None:
        for shard in self._shards:
            shard.nodes.drop(node)

    def export(self, node: str) -> dict[str, Tensor]:
        return {k: t for shard in self._shards for k, t in shard.nodes.export(node).items()}

    def adopt(self, node: str, span: Span, tensors: Mapping[str, Tensor]) -> None:
        shares = shares_of(tensors, [shard.layers for shard in self._shards])
        for shard, share in zip(self._shards, shares, strict=True):
            shard.nodes.check(span, share)
        for shard, share in zip(self._shards, shares, strict=True):
            shard.nodes.adopt(node, span, share)

    def close(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().synchronize()
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
        x = shard.embed(given) if shard.plan.is_first else given
        x = shard.forward(x, shard.rows(batch))
        return shard.project(x) if shard.plan.is_last else x

    def close(self) -> None:
        """Nothing is held."""


def _decode_step(shard: Shard, plan: Plan, spec: ModelSpec) -> _DecodeStep:
    """GPUs replay captured graphs, CPUs run the operations."""
    if shard.device.type == "cpu":
        return _EagerStep(shard)
    return GraphedShard(shard, plan.decode_sizes, spec.hidden_size, DTYPES[plan.dtype])
