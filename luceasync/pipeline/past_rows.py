"""Rows of lanes that are not on a shard's device, for the prefill chunks and probes that read them.

Owns the staging through which blocks of rows stream. Names the tensors that a kind of layer
declares, but does not know the kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from luceasync.host_cache.absent_rows import AbsentRows
from luceasync.host_cache.staging import HostRowSource, Names, RowBlock, blocks_of
from luceasync.kv.cache import LaneCache
from luceasync.kv.pages import CHUNK_TOKENS, PageEvent
from luceasync.kv.state import StateLayout
from luceasync.models.mixers.mixer import Mixer, State
from luceasync.models.pass_rows import NO_LANE
from luceasync.models.recent import RecentRows
from luceasync.pipeline.passes import AttentionMass, Batch
from luceasync.pipeline.platform import Platform
from luceasync.pipeline.probes import AttentionProbes, PassingProbe


class _Blocks(Protocol):
    """Reads blocks, like luceasync.host_cache.staging.Staging."""

    def rows(
        self, blocks: Sequence[RowBlock], layer: int, names: Names
    ) -> Iterator[tuple[int, tuple[Tensor, ...]]]: ...


class PastOfLanes:
    """Earlier rows of one shard's lanes. `recent`: the newest rows of its layers, for probes."""

    def __init__(
        self,
        mixers: Sequence[Mixer],
        first_layer: int,
        cache: LaneCache,
        platform: Platform,
        absent: AbsentRows,
        recent: RecentRows | None,
    ) -> None:
        self._cache = cache
        self._absent = absent
        self._staging = platform.staging(cache)
        self._probes: AttentionProbes | None = None
        if recent is not None:
            self._probes = AttentionProbes(
                mixers, first_layer, recent, platform, self._staging, cache
            )

    def before(self, batch: Batch, *, is_last: bool) -> PastRows | None:
        """The earlier rows that a prefill chunk attends to; None if all are on the device.
        `is_last`: this is the prompt's last chunk."""
        [lane], [begin] = batch.lanes, batch.begins
        if lane == NO_LANE or not self._cache.num_absent_tokens(lane):
            return None
        passing = None
        # Probe the blocks as they stream by. Rows that are read in place are cheap to read again
        # later.
        if is_last and self._probes is not None and not self._staging.is_in_place:
            self._probes.recent.note_run(lane, begin, begin + batch.num_rows)
            passing = self._probes.probe_next_pass(lane, begin + batch.num_rows)
        short_tokens = self._staging.short_tokens
        in_host = self._absent.of(lane, with_coming=False)  # do not wait for chunks being recalled
        blocks = self._blocks(lane, begin, short_tokens, in_host, self._staging.block_tokens)
        return PastRows(self._staging, blocks, passing)

    def rehearsal(self, num_rows: int) -> PastRows:
        """Artificial earlier rows for compiling or loading kernels: a long block and a short
        one."""
        num_places = self._cache.tables.shape[1] * CHUNK_TOKENS
        begin = min(self._staging.block_tokens, num_places)
        end = begin + CHUNK_TOKENS
        blocks = [RowBlock(0, 0, begin, ()), RowBlock(0, begin, end, ())]
        passing = None if self._probes is None else PassingProbe(self._probes, 0, end + num_rows)
        return PastRows(_RehearsalBlocks(self._cache), blocks, passing)

    def note_run(self, lanes: Sequence[int], begins: Sequence[int], counts: Sequence[int]) -> None:
        """Rows of these lanes, from `begins` on, are queued and belong to the lanes. Continues a
        running probe after them."""
        self._staging.release()
        if self._probes is not None:
            for lane, begin, count in zip(lanes, begins, counts, strict=True):
                if lane != NO_LANE and count:
                    self._probes.recent.note_run(lane, begin, begin + count)
            self._probes.advance()

    def start_probe(self, lane: int, num_tokens: int) -> None:
        """See Passes. A probe runs while pages change, so it reads only those pages whose rows host
        memory lacks.
        """
        assert self._probes is not None, "no probes are planned"
        in_host = self._absent.of(lane, with_coming=True)
        blocks = partial(self._blocks, lane, num_tokens, num_tokens, in_host)
        self._probes.begin(lane, num_tokens, blocks)

    def before_events(self, events: Sequence[PageEvent]) -> None:
        """Pages are about to change hands."""
        if self._probes is not None:
            for event in events:
                if event.page is None:
                    self._probes.chunk_leaves(event.lane, event.chunk)

    def attention_mass(self, lane: int) -> AttentionMass:
        assert self._probes is not None, "no probes are planned"
        return self._probes.attention_mass(lane)

    def reset(self, lane: int) -> None:
        """The lane restarts."""
        if self._probes is not None:
            self._probes.reset(lane)

    def close(self) -> None:
        """Free everything. May be called twice."""
        if self._probes is not None:
            self._probes.close()
        self._staging.close()

    def _blocks(
        self,
        lane: int,
        num_tokens: int,
        short_tokens: int,
        in_host: HostRowSource,
        block_tokens: int,
    ) -> list[RowBlock]:
        """Blocks of the lane's first tokens, if layers of this shard keep rows at all."""
        if not self._cache.row_stacks:
            return []
        return blocks_of(self._cache, lane, num_tokens, block_tokens, short_tokens, in_host)


class _RehearsalBlocks:
    """Blocks with the arbitrary contents of the first pages."""

    def __init__(self, cache: LaneCache) -> None:
        self._cache = cache

    def rows(
        self, blocks: Sequence[RowBlock], layer: int, names: Names
    ) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        stacks = [self._cache.rows_of(name, layer)[0] for name in names]
        for block in blocks:
            yield block.begin, tuple(stack[: block.end - block.begin] for stack in stacks)


@dataclass(frozen=True, slots=True)
class PastRows:
    """Earlier rows for all layers of a pass; `passing`: the probe inside the pass."""

    staging: _Blocks
    blocks: Sequence[RowBlock]
    passing: PassingProbe | None

    def of(self, layer: int, kind: StateLayout) -> LayerPast:
        """Earlier rows of one layer of this kind."""
        return LayerPast(self, layer, [tensor.name for tensor in kind.rows])


@dataclass(frozen=True, slots=True)
class LayerPast:
    """PastBlocks of one layer."""

    past: PastRows
    layer: int
    names: Sequence[str]

    def blocks(self) -> Iterator[tuple[int, State]]:
        return self.past.staging.rows(self.past.blocks, self.layer, self.names)

    def probe(self, recent: Tensor, rows: Tensor, begin: int) -> None:
        if self.past.passing is not None:
            self.past.passing.probe(self.layer, recent, rows, begin)
