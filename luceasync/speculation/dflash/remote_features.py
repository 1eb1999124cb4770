"""Features outside of lanes with a drafter in a process of its own: see FeatureContents.

Two bodies, as of target stages: rows lie in memory that both processes map, made and given out
here, so that they outlive the process and a node in memory moves none; or there alone, and are
streamed where somebody wants them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from luceasync.host_cache.arena import Arena
from luceasync.ipc.packets import Message
from luceasync.pipeline.remote.tensors import views
from luceasync.pipeline.remote.wire import PIECE_BYTES, Done, Room
from luceasync.speculation.dflash import wire
from luceasync.speculation.dflash.feature_contents import Part
from luceasync.speculation.dflash.features import FeatureSpec
from luceasync.speculation.dflash.remote import DraftProcess, Loaded

Piece = tuple[int, int]


class Drafted(NamedTuple):
    """Whose rows they are."""

    process: DraftProcess
    spec: FeatureSpec
    sizes: wire.DraftSizes
    capacity_tokens: int

    def held(self, lane: int, begin: int, end: int) -> range:
        """See LaneSpans; nothing while there is no drafter."""
        return self.process.run(lambda loaded: loaded.spans.held(lane, begin, end), range(end, end))

    def restore(self, lane: int, begin: int, parts: Sequence[Part[int]]) -> None:
        """See FeatureContents; contents are places."""
        order = wire.RestoreRows(lane, begin, tuple((at, a, b) for at, a, b in parts))

        def restore(loaded: Loaded) -> None:
            loaded.link.ask(order, Done)
            loaded.spans.reset(lane)
            loaded.spans.advance(lane, begin, sum(part.end - part.begin for part in parts))

        self.process.run(restore, None)


class Region(NamedTuple):
    """Rows in memory that both map, and where these begin there. `is_filled`: by the process, which
    may have ended before it could.
    """

    rows: Tensor
    place: int
    is_filled: bool


class SharedFeatures:
    """In memory that both map."""

    def __init__(self, drafted: Drafted, arena: Arena) -> None:
        self.spec, self.capacity_tokens = drafted.spec, drafted.capacity_tokens
        self.row_bytes = drafted.sizes.row_bytes
        self.held = drafted.held
        self._drafted = drafted
        self._arena = arena

    def save(self, lane: int, begin: int, end: int) -> Region:
        region = self._new(end - begin)
        order = wire.SaveRows(region.place, lane, begin, end)
        is_filled = self._drafted.process.run(
            lambda loaded: loaded.link.ask(order, Room).is_there, False
        )
        return region._replace(is_filled=is_filled)

    def restore(self, lane: int, begin: int, parts: Sequence[Part[Region]]) -> None:
        self._drafted.restore(lane, begin, [Part(at.place, a, b) for at, a, b in parts])

    def is_there(self, content: Region) -> bool:
        return content.is_filled

    def export(self, content: Region) -> Tensor | None:
        return content.rows if content.is_filled else None

    def adopt(self, rows: Tensor) -> Region:
        region = self._new(len(rows))
        region.rows.copy_(rows)
        return region

    def drop(self, content: Region) -> None:
        """Its memory goes back when the last view of it is gone."""

    def _new(self, num_rows: int) -> Region:
        memory = self._arena.allocate(num_rows * self.row_bytes)
        [rows] = views(memory, [self._drafted.sizes.features(num_rows)])
        return Region(rows, self._arena.offset_of(memory), is_filled=True)


class Numbered(NamedTuple):
    """Rows that one life of the process has, under a number; None: it ended before it had them."""

    number: int
    num_rows: int
    owner: Loaded | None


class StreamedFeatures:
    """In the process's memory alone: they end with it."""

    def __init__(self, drafted: Drafted) -> None:
        self.spec, self.capacity_tokens = drafted.spec, drafted.capacity_tokens
        self.row_bytes = drafted.sizes.row_bytes
        self.held = drafted.held
        self._drafted = drafted
        self._numbers = itertools.count(1)

    def save(self, lane: int, begin: int, end: int) -> Numbered:
        number = next(self._numbers)
        order = wire.SaveRows(number, lane, begin, end)
        return Numbered(number, end - begin, self._ask_for_room(order))

    def restore(self, lane: int, begin: int, parts: Sequence[Part[Numbered]]) -> None:
        self._drafted.restore(lane, begin, [Part(at.number, a, b) for at, a, b in parts])

    def is_there(self, content: Numbered) -> bool:
        return content.owner is not None and content.owner is self._drafted.process.loaded

    def export(self, content: Numbered) -> Tensor | None:
        if not self.is_there(content):
            return None
        shape, dtype = self._drafted.sizes.features(content.num_rows)
        found = torch.empty(shape, dtype=dtype)

        def read(loaded: Loaded) -> Tensor:
            for begin, end in self._pieces(content.num_rows):
                order = wire.ExportRows(content.number, begin, end)
                spec = self._drafted.sizes.features(end - begin)
                found[begin:end] = loaded.link.fetch(order, [spec])[0]
            return found

        return self._drafted.process.run(read, None)

    def adopt(self, rows: Tensor) -> Numbered:
        number = next(self._numbers)
        _, dtype = self._drafted.sizes.features(len(rows))
        loaded = self._ask_for_room(wire.AdoptRows(number, len(rows)))

        def write(loaded: Loaded) -> None:
            for begin, end in self._pieces(len(rows)):
                loaded.link.tell(wire.FillRows(number, begin, end), [rows[begin:end].to(dtype)])

        if loaded is not None:
            self._drafted.process.run(write, None)
        return Numbered(number, len(rows), loaded)

    def drop(self, content: Numbered) -> None:
        if self.is_there(content):
            order = wire.DropRows(content.number)
            self._drafted.process.run(lambda loaded: loaded.link.tell(order), 0)

    def _ask_for_room(self, order: Message) -> Loaded | None:
        """The loaded that has it. Raises MemoryError where there is no room."""

        def ask(loaded: Loaded) -> Loaded:
            if not loaded.link.ask(order, Room).is_there:
                raise MemoryError("no room for features in the memory of another process")
            return loaded

        return self._drafted.process.run(ask, None)

    def _pieces(self, num_rows: int) -> Iterator[Piece]:
        """Rows `[begin, end)` that go in one message."""
        at_once = max(1, PIECE_BYTES // self.row_bytes)
        for begin in range(0, num_rows, at_once):
            yield begin, min(begin + at_once, num_rows)
