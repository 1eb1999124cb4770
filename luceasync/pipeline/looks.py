"""Looks of one shard: how much of a lane's attention falls on which chunk, wherever that lies.

Owns the newest rows of all lanes and looks that are under way: they run beside the passes, a layer
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
from luceasync.models.mixers.mixer import LookBody, Mixer, Recent
from luceasync.models.recent import LayerLook, RecentRows
from luceasync.pipeline.passes import Masses
from luceasync.pipeline.platform import Platform, Stopwatch

# Layers of a look that are queued at a time: a bus is never idle, and who waits does not for long.
MOST_AHEAD = 2

# A lane's first tokens in blocks of so many.
Blocks = Callable[[int], Sequence[Block]]


class _Found(Protocol):
    """A look that is under way, or over."""

    @property
    def num_tokens(self) -> int: ...

    def go_on(self) -> bool:
        """Queue some more of it; whether there was anything left."""
        ...

    def goes(self, chunk: int) -> None:
        """The chunk is about to leave the lane's pages."""
        ...

    def masses(self) -> Masses:
        """What is found; all of it is queued, and waited for."""
        ...


class Looks:
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
        self._bodies: dict[Recent, LookBody] = {}
        for kind in {mixer.recent for mixer in mixers if mixer.recent is not None}:
            bodies = (kind.torch_body, kind.triton_body, kind.torch_body)
            self._bodies[kind] = platform.ops.pick(*bodies)
        self._passing: dict[int, PassingLook] = {}  # by lane, of its last pass that was looked at
        self._found: dict[int, _Found] = {}

    def pass_by(self, lane: int, num_tokens: int) -> PassingLook:
        """Have the rows that the next pass of the lane runs, up to `num_tokens`, look at what comes
        by; `begin` then takes it up.
        """
        self._passing[lane] = PassingLook(self, lane, num_tokens)
        return self._passing[lane]

    def begin(self, lane: int, num_tokens: int, blocks: Blocks) -> None:
        """Look at the lane's first `num_tokens` tokens, which lie in `blocks`."""
        passed = self._passing.pop(lane, None)
        if passed is not None and passed.num_tokens == num_tokens:
            self._found[lane] = passed
        else:
            self._found[lane] = _LookBeside(self, lane, num_tokens, blocks)

    def go_on(self) -> None:
        """Queue a part of a look that is under way: behind a pass that has just been queued, while
        the host waits for it.
        """
        for found in self._found.values():
            if found.go_on():
                return

    def goes(self, lane: int, chunk: int) -> None:
        """The chunk is about to leave the lane's pages; host memory has it, if not for longer."""
        if lane in self._found:
            self._found[lane].goes(chunk)

    def masses(self, lane: int) -> Masses:
        """What the lane's last look has found; it is waited for."""
        return self._found.pop(lane).masses()

    def look_of(self, layer: int, filled: range, num_tokens: int) -> LayerLook:
        """One layer's look at a lane's first tokens, by its newest rows: see RecentRows.filled."""
        kind = self.mixers[layer].recent
        assert kind is not None, f"layer {layer} keeps no rows to look with"
        return LayerLook(kind, self._bodies[kind], filled, num_tokens, CHUNK_TOKENS)

    def nothing(self, num_tokens: int) -> Tensor:
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


class PassingLook:
    """The rows of a pass look at what comes by, layer by layer."""

    def __init__(self, looks: Looks, lane: int, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._looks = looks
        self._filled = looks.recent.filled(lane)
        self._masses = looks.nothing(num_tokens)
        self._look: tuple[int, LayerLook] | None = None  # of the layer that runs

    def look(self, layer: int, recent: Tensor, rows: Tensor, begin: int) -> None:
        """See Past; the last rows end at the last token."""
        if self._look is None or self._look[0] != layer:
            self._look = layer, self._looks.look_of(layer, self._filled, self.num_tokens)
        self._look[1].look(recent, rows, begin)
        if begin + len(rows) == self.num_tokens:
            self._masses.add_(self._look[1].masses())

    def go_on(self) -> bool:
        """It was part of a pass."""
        return False

    def goes(self, chunk: int) -> None:
        """Nothing is read any more."""

    def masses(self) -> Masses:
        """See _Found."""
        return Masses(self._masses.cpu(), 0.0)


class _LookBeside:
    """A look that reads keys again, beside the passes, by what the lane's newest rows are now."""

    def __init__(self, looks: Looks, lane: int, num_tokens: int, blocks: Blocks) -> None:
        self.num_tokens = num_tokens
        self._looks = looks
        self._masses = looks.nothing(num_tokens)
        self._watches: list[Stopwatch] = []
        self._filled = looks.recent.filled(lane)
        rings = {
            mixer: iter([*stack[0][:, lane].clone()])
            for mixer, stack in looks.recent.stacked.items()
            if stack
        }
        self._blocks = blocks
        self._told: dict[Recent, Sequence[Block]] = {}
        self._in_pages: set[int] = set()  # chunks that are read there
        self._layers = self._run(rings) if self._filled else iter(())

    def go_on(self) -> bool:
        """See _Found: a layer, unless enough are under way."""
        ahead = self._watches[-MOST_AHEAD:]
        if len(ahead) == MOST_AHEAD and not ahead[0].is_over:
            return True
        return self._queue()

    def goes(self, chunk: int) -> None:
        """See _Found. Who writes its page next comes after what is queued here, and the layers that
        are not queued yet read it elsewhere.
        """
        if chunk in self._in_pages:
            self._looks.platform.join_beside()
            self._told.clear()
            self._in_pages.clear()

    def masses(self) -> Masses:
        """See _Found."""
        while self._queue():
            pass
        with self._looks.platform.beside():
            return Masses(self._masses.cpu(), sum(watch.seconds() for watch in self._watches))

    def _queue(self) -> bool:
        return next(self._layers, None) is not None

    def _run(self, rings: Mapping[Mixer, Iterator[Tensor]]) -> Iterator[int]:
        """Queues a layer at a time: the newest rows of each are in `rings`, in order."""
        looks = self._looks
        for layer, mixer in looks.mixers.items():
            if (kind := mixer.recent) is None:
                continue
            ring = next(rings[mixer])
            with looks.platform.beside(ring, self._masses):
                # Told here: what tells where rows lie belongs there too.
                self._add(layer, ring, kind.looks_at, self._blocks_of(kind, layer))
            yield layer

    def _blocks_of(self, kind: Recent, layer: int) -> Sequence[Block]:
        """As they lie now, unless that is known."""
        if kind not in self._told:
            row_bytes = self._looks.cache.rows_of(kind.looks_at, layer)[0, 0].nbytes
            blocks = self._blocks(self._looks.staging.tokens_that_fit(row_bytes))
            self._told[kind] = blocks
            self._in_pages |= {chunk for block in blocks for chunk in block.chunks_in_pages()}
        return self._told[kind]

    def _add(self, layer: int, ring: Tensor, name: str, blocks: Sequence[Block]) -> None:
        watch = self._looks.platform.stopwatch()
        look = self._looks.look_of(layer, self._filled, self.num_tokens)
        for begin, (rows,) in self._looks.staging.rows(blocks, layer, [name]):
            look.look(ring, rows, begin)
        self._masses += look.masses()
        watch.stop()
        self._watches.append(watch)
