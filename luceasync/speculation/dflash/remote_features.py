"""Features outside of lanes, of a drafter in another process.

Two bodies, as for stages: rows lie in memory that both processes map, allocated here, so that they
outlive the process and saving moves none; or in the other process alone, streamed on demand.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from luceasync.host_cache.arena import Arena
from luceasync.pipeline.remote.answers import NodeRoom, Result
from luceasync.pipeline.remote.nodes import read_node, write_node
from luceasync.pipeline.remote.tensors import views
from luceasync.pipeline.remote.wire import Command, DropNode
from luceasync.speculation.dflash import wire
from luceasync.speculation.dflash.feature_contents import FeatureContents, FeaturePart
from luceasync.speculation.dflash.process import DraftLife, DraftProcess, DraftProcessResources


def remote_features(
    process: DraftProcess, resources: DraftProcessResources
) -> FeatureContents[Any]:
    """The features of nodes of a drafter in another process."""
    if resources.arena is None:
        return StreamedFeatures(process, resources)
    return SharedFeatures(process, resources, resources.arena)


class _RemoteFeatures:
    """What both bodies have in common."""

    def __init__(self, process: DraftProcess, resources: DraftProcessResources) -> None:
        self.spec, self.capacity_tokens = resources.spec, resources.capacity_tokens
        self.row_bytes = resources.sizes.row_bytes
        self._process = process
        self._sizes = resources.sizes

    def held(self, lane: int, begin: int, end: int) -> range:
        """See LaneSpans; empty while there is no drafter."""
        return self._process.run(lambda life: life.spans.held(lane, begin, end), range(end, end))

    def _restore(self, lane: int, begin: int, parts: Sequence[tuple[int, int, int]]) -> None:
        """Parts are (place, begin, end)."""
        command = wire.RestoreRows(lane, begin, tuple(parts))

        def restore(life: DraftLife) -> None:
            life.connection.ask(command, Result)
            life.spans.reset(lane)
            life.spans.advance(lane, begin, sum(end - first for _, first, end in parts))

        self._process.run(restore, None)


class SharedRows(NamedTuple):
    """Rows in memory that both processes map, and where they begin there. `is_filled`: by the
    process, which may have ended before.
    """

    rows: Tensor
    place: int
    is_filled: bool


class SharedFeatures(_RemoteFeatures):
    """See FeatureContents: in memory that both processes map."""

    def __init__(
        self, process: DraftProcess, resources: DraftProcessResources, arena: Arena
    ) -> None:
        super().__init__(process, resources)
        self._arena = arena

    def save(self, lane: int, begin: int, end: int) -> SharedRows:
        rows = self._allocate(end - begin)
        command = wire.SaveRows(rows.place, lane, begin, end)
        is_filled = self._process.run(
            lambda life: life.connection.ask(command, NodeRoom).is_there, False
        )
        return rows._replace(is_filled=is_filled)

    def restore(self, lane: int, begin: int, parts: Sequence[FeaturePart[SharedRows]]) -> None:
        self._restore(lane, begin, [(rows.place, first, end) for rows, first, end in parts])

    def is_there(self, content: SharedRows) -> bool:
        return content.is_filled

    def export(self, content: SharedRows) -> Tensor | None:
        return content.rows if content.is_filled else None

    def adopt(self, rows: Tensor) -> SharedRows:
        shared = self._allocate(len(rows))
        shared.rows.copy_(rows)
        return shared

    def drop(self, content: SharedRows) -> None:
        """Do nothing: the memory is freed with the last view of it."""

    def _allocate(self, num_rows: int) -> SharedRows:
        memory = self._arena.allocate(num_rows * self.row_bytes)
        [rows] = views(memory, [self._sizes.features(num_rows)])
        return SharedRows(rows, self._arena.offset_of(memory), is_filled=True)


class StreamedRows(NamedTuple):
    """Rows that one life of the process has, under a number; None: it ended before it had them."""

    number: int
    num_rows: int
    owner: DraftLife | None


class StreamedFeatures(_RemoteFeatures):
    """See FeatureContents: in the process's memory alone. They end with it."""

    def __init__(self, process: DraftProcess, resources: DraftProcessResources) -> None:
        super().__init__(process, resources)
        self._numbers = itertools.count(1)

    def save(self, lane: int, begin: int, end: int) -> StreamedRows:
        number = next(self._numbers)
        owner = self._ask_for_room(wire.SaveRows(number, lane, begin, end))
        return StreamedRows(number, end - begin, owner)

    def restore(self, lane: int, begin: int, parts: Sequence[FeaturePart[StreamedRows]]) -> None:
        self._restore(lane, begin, [(rows.number, first, end) for rows, first, end in parts])

    def is_there(self, content: StreamedRows) -> bool:
        return content.owner is not None and content.owner is self._process.life

    def export(self, content: StreamedRows) -> Tensor | None:
        if not self.is_there(content):
            return None
        shape, dtype = self._sizes.features(content.num_rows)
        rows = torch.empty(shape, dtype=dtype)

        def read(life: DraftLife) -> Tensor:
            read_node(life.connection, content.number, [rows])
            return rows

        return self._process.run(read, None)

    def adopt(self, rows: Tensor) -> StreamedRows:
        number, num_rows = next(self._numbers), len(rows)
        owner = self._ask_for_room(wire.AdoptRows(number, num_rows))
        if owner is not None:
            same = rows.to(self._sizes.dtype).contiguous()
            self._process.run(lambda life: write_node(life.connection, number, [same]), None)
        return StreamedRows(number, num_rows, owner)

    def drop(self, content: StreamedRows) -> None:
        if self.is_there(content):
            command = DropNode(content.number)
            self._process.run(lambda life: life.connection.send(command), 0)

    def _ask_for_room(self, command: Command) -> DraftLife | None:
        """The life that has room, or None if there is no process. Raises MemoryError if it has no
        room.
        """

        def ask(life: DraftLife) -> DraftLife:
            if not life.connection.ask(command, NodeRoom).is_there:
                raise MemoryError("no room for features in the memory of another process")
            return life

        return self._process.run(ask, None)
