"""A round of speculation as one graph: propose, verify, accept, commit, and absorb what was kept.

The device accepts the best tokens itself and knows from there where each lane goes on, so the next
round can be queued before the host has read this one:

    start(lanes, begins, anchors)   what the host knows
    queue()  queue()                two rounds; the second begins where the first one ends
    fetch()                         the first one's tokens

Owns the lanes' places and the graph. Knows no drafter, only tensors in and out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct

import torch
from torch import Tensor

from luceasync.models.inference import inference_mode
from luceasync.models.pass_rows import NO_LANE
from luceasync.models.trees import chain
from luceasync.pipeline.capture import Capture
from luceasync.pipeline.passes import RoundWork
from luceasync.pipeline.shard import Shard
from luceasync.pipeline.transfer import Arrival, host_buffer, queue_copy
from luceasync.ranking.local import best_tokens
from luceasync.ranking.logits import NO_TOKEN

# Accepts the chains `proposed`, int64 [entries, rows], as far as each row's best token is the next
# row's: logits [entries * rows, vocab], place int32 [2, entries]: lanes, positions. Writes `path`,
# int32 [2, entries]: the positions, and how many rows stand, 0 of padding; `found`, int64 [entries,
# 1 + rows]: that number and the best tokens, the given token for a row that has none, which is the
# last to stand. Then moves the positions on, and sets `anchors`, int64 [entries], to each lane's
# newest token, or to 0 if that is none: an embedding has a row of each.
Accept = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], None]


def accept_best(
    logits: Tensor,
    proposed: Tensor,
    place: Tensor,
    anchors: Tensor,
    path: Tensor,
    found: Tensor,
    no_token: int,
) -> None:
    """Accept in torch, for any device."""
    is_lane, best = place[0] >= 0, best_tokens(logits, None, no_token).view(proposed.shape)
    goes_on = (best[:, :-1] == proposed[:, 1:]) & (best[:, :-1] != no_token)
    counts = torch.where(is_lane, 1 + goes_on.int().cumprod(1).sum(1), 0)
    path[0], path[1] = place[1], counts
    place[1] += counts
    last = best.gather(1, (counts - 1).clamp_min(0)[:, None])[:, 0]
    anchors.copy_(torch.where(is_lane, last.clamp_min(0), anchors))
    found[:, 0], found[:, 1:] = counts, best


def compile_accept(accept: Accept, logits: Tensor, num_rows: int) -> None:
    """Run `accept` for an entry of so many rows and no lane, so that its kernels are compiled."""
    place = torch.full((2, 1), NO_LANE, dtype=torch.int32, device=logits.device)
    tokens = torch.zeros(2 + 2 * num_rows, 1, dtype=torch.int64, device=logits.device)
    proposed, found, anchors = (
        part.view(1, -1) for part in tokens.split([num_rows, num_rows + 1, 1])
    )
    accept(logits[:num_rows], proposed, place, anchors[0], place.clone(), found, NO_TOKEN)


class FoundTokens:
    """The tokens of a queued round, on their way to the host: a ComingTokens."""

    def __init__(self, size: int, num_rows: int, device: torch.device) -> None:
        num_numbers = size * (1 + num_rows)
        self._copy = host_buffer(num_numbers, torch.int64, device).view(size, 1 + num_rows)
        self._numbers = self._copy.numpy()  # the same memory
        self._arrival: Arrival | None = None

    def take(self, found: Tensor) -> None:
        """Queue the copy of `found`, see Accept, behind the round."""
        self._arrival = queue_copy(found, self._copy)

    def fetch(self) -> list[list[int]]:
        if self._arrival is not None:
            self._arrival.synchronize()
        return [row[1 : 1 + row[0]] for row in self._numbers.tolist()]


class CapturedRound:
    """DeviceRounds of a shard that has all layers."""

    def __init__(
        self,
        shard: Shard,
        capture: Capture,
        accept: Accept,
        work: RoundWork,
        taps: Sequence[int],
        logits: Tensor,
    ) -> None:
        """`taps`: the layers whose rows the drafter absorbs, in its order; `logits`: where those of
        the pass go, float32 [entries, rows, vocab]. Captures the round.
        """
        self._shard, self._accept = shard, accept
        self._work, self._taps, self._logits = work, tuple(taps), logits
        self._size, num_rows = logits.shape[:2]
        size, device = self._size, shard.device
        self._format = Struct(f"={size}q{2 * size}i")
        # Anchors and places are adjacent: one copy sets both.
        held = torch.zeros(self._format.size, dtype=torch.uint8, device=device)
        self._held, self._bytes = held, bytearray(self._format.size)
        self._staged = torch.frombuffer(self._bytes, dtype=torch.uint8)  # the same memory
        self._anchors = held[: 8 * size].view(torch.int64)
        self._place = held[8 * size :].view(torch.int32).view(2, size)
        self._place[0] = NO_LANE
        self._path = torch.zeros(2, size, dtype=torch.int32, device=device)
        self._found = torch.zeros(size, 1 + num_rows, dtype=torch.int64, device=device)
        self._parents = chain(size, num_rows, device).contiguous()
        rows = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._rows = rows.expand(size, -1).contiguous()
        # Two alternate: a round is queued before the tokens of the last one were read.
        self._next, self._last = (FoundTokens(size, num_rows, device) for _ in range(2))
        self._captured = capture(self._run, num_warmups=1)

    @inference_mode
    def start(self, lanes: Sequence[int], begins: Sequence[int], anchors: Sequence[int]) -> None:
        padding = [0] * (self._size - len(lanes))
        no_lanes = [NO_LANE] * len(padding)
        self._format.pack_into(
            self._bytes, 0, *anchors, *padding, *lanes, *no_lanes, *begins, *padding
        )
        self._held.copy_(self._staged, non_blocking=True)  # so few bytes are staged by the call

    @inference_mode
    def queue(self, lanes: Sequence[int]) -> FoundTokens:
        with self._shard.on_device():
            self._shard.use(lanes)
            self._captured.replay()
            self._next, self._last = self._last, self._next
            self._last.take(self._found)
        return self._last

    def _run(self) -> None:
        shard, (lanes, begins) = self._shard, self._place
        proposed = self._work.propose(self._anchors, lanes, begins)
        trees = shard.trees(self._parents)
        rows = shard.rows_from((), lanes, begins[:, None] + trees.depths)
        logits = shard.ends.project(
            shard.verify(shard.ends.embed(proposed), rows, trees), self._logits
        )
        taps = [shard.taps[layer] for layer in self._taps]
        changed = (self._place, self._anchors, self._path, self._found)
        self._accept(logits.flatten(0, 1), proposed, *changed, NO_TOKEN)
        at, counts = self._path
        shard.commit(shard.paths_from((), lanes, at, self._rows, counts))
        self._work.absorb(taps, proposed, lanes, at, counts, self._rows)
