"""Looks of one shard: how much of a lane's attention falls on which chunk, wherever that lies.

Owns the newest rows of all lanes and looks that are under way: they run beside the passes, or take
up what comes by in a prompt's last one. Knows no kind of layer and no pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from luceasync.hoststore.staging import Block, Staging
from luceasync.kv.pages import CHUNK_TOKENS, num_chunks
from luceasync.models.mixers.mixer import LookBody, Mixer, Recent
from luceasync.models.recent import LayerLook, RecentRows
from luceasync.pipeline.passes import Masses
from luceasync.pipeline.platform import Platform, Stopwatch


@dataclass(frozen=True, slots=True)
class _Found:
    """`masses` float32 [chunks] on the device, of the first `num_tokens` tokens. `watch`: of what
    was done for it alone. `read`: what is read for it, which stays until it is over.
    """

    num_tokens: int
    masses: Tensor
    watch: Stopwatch | None
    read: object = None


class Looks:
    """Of one shard. Engine thread only."""

    def __init__(
        self,
        mixers: Sequence[Mixer],
        first_layer: int,
        recent: RecentRows,
        platform: Platform,
        staging: Staging,
    ) -> None:
        self.recent = recent
        self._mixers = dict(enumerate(mixers, first_layer))
        self._platform = platform
        self._staging = staging
        self._bodies: dict[Recent, LookBody] = {}
        for kind in {mixer.recent for mixer in mixers if mixer.recent is not None}:
            self._bodies[kind] = platform.ops.pick(kind.torch_body, kind.triton_body)
        self._passing: dict[int, _Found] = {}  # by lane, of its last pass that was looked at
        self._found: dict[int, _Found] = {}

    def pass_by(self, lane: int, num_tokens: int) -> PassingLook:
        """Have the rows that the next pass of the lane runs, up to `num_tokens`, look at what comes
        by; `begin` then takes it up.
        """
        found = _Found(num_tokens, self._nothing(num_tokens), None)
        self._passing[lane] = found
        return PassingLook(self, lane, found.masses, num_tokens)

    def begin(self, lane: int, num_tokens: int, blocks: Sequence[Block]) -> None:
        """Look at the lane's first `num_tokens` tokens, which lie in `blocks`."""
        passed = self._passing.pop(lane, None)
        if passed is not None and passed.num_tokens == num_tokens:
            self._found[lane] = passed
            return
        rings = [tuple(ring[lane].clone() for ring in state) for state in self.recent.layers]
        with self._platform.beside():
            watch = self._platform.stopwatch()
            total = self._nothing(num_tokens)
            for (layer, kind), ring in zip(self._kinds(), rings, strict=True):
                if kind is None or not self.recent.filled(lane):
                    continue
                look = self.look_of(layer, lane, num_tokens)
                for begin, (rows,) in self._staging.rows(blocks, layer, [kind.looks_at]):
                    look.look(ring[0], rows, begin)
                total += look.masses()
            watch.stop()
        self._found[lane] = _Found(num_tokens, total, watch, rings)

    def masses(self, lane: int) -> Masses:
        """What the lane's last look has found; it is waited for."""
        found = self._found.pop(lane)
        if found.watch is None:
            return Masses(found.masses.cpu(), 0.0)
        with self._platform.beside():
            return Masses(found.masses.cpu(), found.watch.seconds())

    def look_of(self, layer: int, lane: int, num_tokens: int) -> LayerLook:
        """One layer's look at the lane's first tokens."""
        kind = self._mixers[layer].recent
        assert kind is not None, f"layer {layer} keeps no rows to look with"
        return LayerLook(self._bodies[kind], self.recent.filled(lane), num_tokens, CHUNK_TOKENS)

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

    def _kinds(self) -> Iterator[tuple[int, Recent | None]]:
        return ((layer, mixer.recent) for layer, mixer in self._mixers.items())

    def _nothing(self, num_tokens: int) -> Tensor:
        return torch.zeros(num_chunks(num_tokens), device=self._platform.device)


class PassingLook:
    """The rows of a pass look at what comes by, layer by layer."""

    def __init__(self, looks: Looks, lane: int, masses: Tensor, num_tokens: int) -> None:
        self._looks = looks
        self._lane = lane
        self._masses = masses
        self._num_tokens = num_tokens
        self._look: tuple[int, LayerLook] | None = None  # of the layer that runs

    def look(self, layer: int, recent: Tensor, rows: Tensor, begin: int) -> None:
        """See Past; the last rows end at the last token."""
        if self._look is None or self._look[0] != layer:
            self._look = layer, self._looks.look_of(layer, self._lane, self._num_tokens)
        self._look[1].look(recent, rows, begin)
        if begin + len(rows) == self._num_tokens:
            self._masses.add_(self._look[1].masses())
