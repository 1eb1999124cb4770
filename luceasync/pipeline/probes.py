"""Probes of one shard: how much of a lane's attention falls on each chunk, resident or not.

Owns the newest rows of all lanes and the running probes. A probe runs between the passes, a layer
at a time, or inside a prompt's last pass, on the blocks that stream by. Does not know kinds of
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from luceasync.host_cache.staging import RowBlock, Staging
from luceasync.kv.cache import LaneCache
from luceasync.kv.pages import CHUNK_TOKENS, num_chunks
from luceasync.models.mixers.mixer import Mixer, ProbeBody, RecentSpec
from luceasync.models.recent import LayerProbe, RecentRows
from luceasync.pipeline.passes import AttentionMass
from luceasync.pipeline.platform import Platform, Stopwatch

# Layers of a probe that are queued at a time: enough to keep the bus busy, yet soon over.
MAX_AHEAD = 2

# Splits a lane's first tokens into blocks of at most this many.
Blocks = Callable[[int], Sequence[RowBlock]]


class _Probe(Protocol):
    """A running or finished probe."""

    @property
    def num_tokens(self) -> int: ...

    def advance(self) -> bool:
        """Queue a part of it. False if nothing was left."""
        ...

    def chunk_leaves(self, chunk: int) -> None:
        """The chunk is about to leave the lane's pages."""
        ...

    def attention_mass(self) -> AttentionMass:
        """The result; queues what is left and waits."""
        ...


class AttentionProbes:
    """The probes of one shard. Engine thread only."""

    def __init__(
        self,
        mixers: Sequence[Mixer],
        first_layer: int,
        recent: RecentRows,
        platform: Platform,
        staging: Staging,
        cache: LaneCache,
    ) -> None:
        self.recent = recent
        self.platform = platform
        self.staging = staging
        self.cache = cache
        self.mixers = dict(enumerate(mixers, first_layer))
        self._bodies: dict[RecentSpec, ProbeBody] = {}
        for kind in {mixer.recent for mixer in mixers if mixer.recent is not None}:
            bodies = (kind.torch_body, kind.triton_body, kind.torch_body)
            self._bodies[kind] = platform.ops.pick(*bodies)
        self._passing: dict[int, PassingProbe] = {}  # by lane, inside its last prefill chunk
        self._running: dict[int, _Probe] = {}

    def probe_next_pass(self, lane: int, num_tokens: int) -> PassingProbe:
        """Let the lane's next pass, which ends at `num_tokens`, probe the blocks that stream by;
        `begin` then takes the result."""
        self._passing[lane] = PassingProbe(self, lane, num_tokens)
        return self._passing[lane]

    def begin(self, lane: int, num_tokens: int, blocks: Blocks) -> None:
        """Probe the lane's first `num_tokens` tokens, which lie in `blocks`."""
        passed = self._passing.pop(lane, None)
        if passed is not None and passed.num_tokens == num_tokens:
            self._running[lane] = passed
        else:
            self._running[lane] = _BackgroundProbe(self, lane, num_tokens, blocks)

    def advance(self) -> None:
        """Queue a part of one running probe behind the pass just queued, while the host waits."""
        for probe in self._running.values():
            if probe.advance():
                return

    def chunk_leaves(self, lane: int, chunk: int) -> None:
        """The chunk is about to leave its page; host memory already holds it."""
        if lane in self._running:
            self._running[lane].chunk_leaves(chunk)

    def attention_mass(self, lane: int) -> AttentionMass:
        """The result of the lane's last probe; waits for it."""
        return self._running.pop(lane).attention_mass()

    def layer_probe(self, layer: int, filled: range, num_tokens: int) -> LayerProbe:
        """A probe of one layer by the lane's newest rows, see RecentRows.filled."""
        kind = self.mixers[layer].recent
        assert kind is not None, f"layer {layer} keeps no rows to probe with"
        return LayerProbe(kind, self._bodies[kind], filled, num_tokens, CHUNK_TOKENS)

    def zeros(self, num_tokens: int) -> Tensor:
        """The attention mass of each chunk before any layer has added its part."""
        return torch.zeros(num_chunks(num_tokens), device=self.platform.device)

    def reset(self, lane: int) -> None:
        """The lane restarts, or continues from elsewhere."""
        self.recent.reset(lane)
        self._passing.pop(lane, None)
        self._running.pop(lane, None)

    def close(self) -> None:
        """Drop all probes. May be called twice."""
        self._passing.clear()
        self._running.clear()
        self.recent.close()


class PassingProbe:
    """A probe inside a pass: each layer's newest rows score the blocks that stream by."""

    def __init__(self, probes: AttentionProbes, lane: int, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._probes = probes
        self._filled = probes.recent.filled(lane)
        self._mass = probes.zeros(num_tokens)
        self._layer: tuple[int, LayerProbe] | None = None  # of the layer that runs

    def probe(self, layer: int, recent: Tensor, rows: Tensor, begin: int) -> None:
        """Score a block. The last one ends at the lane's last token."""
        if self._layer is None or self._layer[0] != layer:
            self._layer = layer, self._probes.layer_probe(layer, self._filled, self.num_tokens)
        self._layer[1].probe(recent, rows, begin)
        if begin + len(rows) == self.num_tokens:
            self._mass.add_(self._layer[1].mass())

    def advance(self) -> bool:
        """No-op: it ran inside a pass."""
        return False

    def chunk_leaves(self, chunk: int) -> None:
        """No-op: all rows have been read."""

    def attention_mass(self) -> AttentionMass:
        return AttentionMass(self._mass.cpu(), 0.0)


class _BackgroundProbe:
    """A probe that reads keys again between the passes, using the newest rows as they were when it
    began."""

    def __init__(self, probes: AttentionProbes, lane: int, num_tokens: int, blocks: Blocks) -> None:
        self.num_tokens = num_tokens
        self._probes = probes
        self._mass = probes.zeros(num_tokens)
        self._watches: list[Stopwatch] = []
        self._filled = probes.recent.filled(lane)
        rings = {
            mixer: iter([*stack[0][:, lane].clone()])
            for mixer, stack in probes.recent.stacked.items()
            if stack
        }
        self._blocks = blocks
        self._block_map: dict[RecentSpec, Sequence[RowBlock]] = {}
        self._in_pages: set[int] = set()  # chunks that it reads from their pages
        self._layers = self._run(rings) if self._filled else iter(())

    def advance(self) -> bool:
        """Queue a layer, unless enough are queued."""
        ahead = self._watches[-MAX_AHEAD:]
        if len(ahead) == MAX_AHEAD and not ahead[0].is_over:
            return True
        return self._queue()

    def chunk_leaves(self, chunk: int) -> None:
        """Make the page's next writer wait for the layers queued so far. Later layers look up again
        where chunks lie, and read this one from host memory."""
        if chunk in self._in_pages:
            self._probes.platform.join_side_stream()
            self._block_map.clear()
            self._in_pages.clear()

    def attention_mass(self) -> AttentionMass:
        while self._queue():
            pass
        with self._probes.platform.side_stream():
            return AttentionMass(self._mass.cpu(), sum(watch.seconds() for watch in self._watches))

    def _queue(self) -> bool:
        return next(self._layers, None) is not None

    def _run(self, rings: Mapping[Mixer, Iterator[Tensor]]) -> Iterator[int]:
        """Queue one layer for each item taken. `rings`: the newest rows of each mixer's layers."""
        probes = self._probes
        for layer, mixer in probes.mixers.items():
            if (kind := mixer.recent) is None:
                continue
            ring = next(rings[mixer])
            with probes.platform.side_stream(ring, self._mass):
                # Inside the context, so that tensors with the places of rows belong to this stream.
                self._add(layer, ring, kind.probed_tensor, self._blocks_of(kind, layer))
            yield layer

    def _blocks_of(self, kind: RecentSpec, layer: int) -> Sequence[RowBlock]:
        """Blocks as they lie now, unless they were looked up already."""
        if kind not in self._block_map:
            row_bytes = self._probes.cache.rows_of(kind.probed_tensor, layer)[0, 0].nbytes
            blocks = self._blocks(self._probes.staging.tokens_that_fit(row_bytes))
            self._block_map[kind] = blocks
            self._in_pages |= {chunk for block in blocks for chunk in block.chunks_in_pages()}
        return self._block_map[kind]

    def _add(self, layer: int, ring: Tensor, name: str, blocks: Sequence[RowBlock]) -> None:
        watch = self._probes.platform.stopwatch()
        probe = self._probes.layer_probe(layer, self._filled, self.num_tokens)
        for begin, (rows,) in self._probes.staging.rows(blocks, layer, [name]):
            probe.probe(ring, rows, begin)
        self._mass += probe.mass()
        watch.stop()
        self._watches.append(watch)
