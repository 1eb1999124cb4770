"""Looks of one shard: how much of a lane's attention falls on which chunk, wherever that lies.

Owns the newest rows of all lanes and probes that are under way: they run beside the passes, a layer
at a time, or take up what comes by in a prompt's last one. Knows no kind of layer and no pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from luceasync.host_cache.staging import Block, Staging
from luceasync.kv.cache import LaneCache
from luceasync.kv.pages import CHUNK_TOKENS, num_chunks
from luceasync.models.mixers.mixer import Mixer, ProbeBody, RecentSpec
from luceasync.models.recent import LayerProbe, RecentRows
from luceasync.pipeline.passes import AttentionMass
from luceasync.pipeline.platform import Platform, Stopwatch

# Layers of a look that are queued at a time: a bus is never idle, and who waits does not for long.
MOST_AHEAD = 2

# A lane's first tokens in blocks of so many.
Blocks = Callable[[int], Sequence[Block]]


class _Probe(Protocol):
    """A look that is under way, or over."""

    @property
    def num_tokens(self) -> int: ...

    def go_on(self) -> bool:
        """Queue some more of it; whether there was anything left."""
        ...

    def chunk_leaves(self, chunk: int) -> None:
        """The chunk is about to leave the lane's pages."""
        ...

    def attention_mass(self) -> AttentionMass:
        """What is found; all of it is queued, and waited for."""
        ...


class AttentionProbes:
    """Of one shard. Engine thread only."""

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
        self._passing: dict[int, PassingProbe] = {}  # by lane, of its last pass that was looked at
        self._found: dict[int, _Probe] = {}

    def probe_next_pass(self, lane: int, num_tokens: int) -> PassingProbe:
        """Have the rows that the next pass of the lane runs, up to `num_tokens`, look at what comes
        by; `begin` then takes it up.
        """
        self._passing[lane] = PassingProbe(self, lane, num_tokens)
        return self._passing[lane]

    def begin(self, lane: int, num_tokens: int, blocks: Blocks) -> None:
        """Look at the lane's first `num_tokens` tokens, which lie in `blocks`."""
        passed = self._passing.pop(lane, None)
        if passed is not None and passed.num_tokens == num_tokens:
            self._found[lane] = passed
        else:
            self._found[lane] = _BackgroundProbe(self, lane, num_tokens, blocks)

    def go_on(self) -> None:
        """Queue a part of a look that is under way: behind a pass that has just been queued, while
        the host waits for it.
        """
        for found in self._found.values():
            if found.go_on():
                return

    def chunk_leaves(self, lane: int, chunk: int) -> None:
        """The chunk is about to leave the lane's pages; host memory has it, if not for longer."""
        if lane in self._found:
            self._found[lane].chunk_leaves(chunk)

    def attention_mass(self, lane: int) -> AttentionMass:
        """What the lane's last look has found; it is waited for."""
        return self._found.pop(lane).attention_mass()

    def layer_probe(self, layer: int, filled: range, num_tokens: int) -> LayerProbe:
        """One layer's look at a lane's first tokens, by its newest rows: see RecentRows.filled."""
        kind = self.mixers[layer].recent
        assert kind is not None, f"layer {layer} keeps no rows to look with"
        return LayerProbe(kind, self._bodies[kind], filled, num_tokens, CHUNK_TOKENS)

    def zeros(self, num_tokens: int) -> Tensor:
        """Masses of which nothing is known yet."""
        return torch.zeros(num_chunks(num_tokens), device=self.platform.device)

    def reset(self, lane: int) -> None:
        """The lane begins anew, or goes on from elsewhere."""
        self.recent.reset(lane)
        self._passing.pop(lane, None)
        self._found.pop(lane, None)

    def close(self) -> None:
        """Forget everything. May be called twice."""
        self._passing.clear()
        self._found.clear()
        self.recent.close()


class PassingProbe:
    """The rows of a pass look at what comes by, layer by layer."""

    def __init__(self, probes: AttentionProbes, lane: int, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._probes = probes
        self._filled = probes.recent.filled(lane)
        self._mass = probes.zeros(num_tokens)
        self._layer: tuple[int, LayerProbe] | None = None  # of the layer that runs

    def probe(self, layer: int, recent: Tensor, rows: Tensor, begin: int) -> None:
        """See Past; the last rows end at the last token."""
        if self._layer is None or self._layer[0] != layer:
            self._layer = layer, self._probes.layer_probe(layer, self._filled, self.num_tokens)
        self._layer[1].probe(recent, rows, begin)
        if begin + len(rows) == self.num_tokens:
            self._mass.add_(self._layer[1].mass())

    def go_on(self) -> bool:
        """It was part of a pass."""
        return False

    def chunk_leaves(self, chunk: int) -> None:
        """Nothing is read any more."""

    def attention_mass(self) -> AttentionMass:
        return AttentionMass(self._mass.cpu(), 0.0)


class _BackgroundProbe:
    """A look that reads keys again, beside the passes, by what the lane's newest rows are now."""

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
        self._block_map: dict[RecentSpec, Sequence[Block]] = {}
        self._in_pages: set[int] = set()  # chunks that are read there
        self._layers = self._run(rings) if self._filled else iter(())

    def go_on(self) -> bool:
        """See _Found: a layer, unless enough are under way."""
        ahead = self._watches[-MOST_AHEAD:]
        if len(ahead) == MOST_AHEAD and not ahead[0].is_over:
            return True
        return self._queue()

    def chunk_leaves(self, chunk: int) -> None:
        """See _Found. Who writes its page next comes after what is queued here, and the layers that
        are not queued yet read it elsewhere.
        """
        if chunk in self._in_pages:
            self._probes.platform.join_beside()
            self._block_map.clear()
            self._in_pages.clear()

    def attention_mass(self) -> AttentionMass:
        while self._queue():
            pass
        with self._probes.platform.beside():
            return AttentionMass(self._mass.cpu(), sum(watch.seconds() for watch in self._watches))

    def _queue(self) -> bool:
        return next(self._layers, None) is not None

    def _run(self, rings: Mapping[Mixer, Iterator[Tensor]]) -> Iterator[int]:
        """Queues a layer at a time: the newest rows of each are in `rings`, in order."""
        probes = self._probes
        for layer, mixer in probes.mixers.items():
            if (kind := mixer.recent) is None:
                continue
            ring = next(rings[mixer])
            with probes.platform.beside(ring, self._mass):
                # Told here: what tells where rows lie belongs there too.
                self._add(layer, ring, kind.probed_tensor, self._blocks_of(kind, layer))
            yield layer

    def _blocks_of(self, kind: RecentSpec, layer: int) -> Sequence[Block]:
        """As they lie now, unless that is known."""
        if kind not in self._block_map:
            row_bytes = self._probes.cache.rows_of(kind.probed_tensor, layer)[0, 0].nbytes
            blocks = self._blocks(self._probes.staging.tokens_that_fit(row_bytes))
            self._block_map[kind] = blocks
            self._in_pages |= {chunk for block in blocks for chunk in block.chunks_in_pages()}
        return self._block_map[kind]

    def _add(self, layer: int, ring: Tensor, name: str, blocks: Sequence[Block]) -> None:
        watch = self._probes.platform.stopwatch()
        probe = self._probes.layer_probe(layer, self._filled, self.num_tokens)
        for begin, (rows,) in self._probes.staging.rows(blocks, layer, [name]):
            probe.probe(ring, rows, begin)
        self._mass += probe.mass()
        watch.stop()
        self._watches.append(watch)
