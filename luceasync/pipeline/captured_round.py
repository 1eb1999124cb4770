"""A round of speculation as one graph: propose, verify, accept, commit, and absorb the accepted
rows.

The device knows where each lane continues, so a round can be queued before the host has read the
last one. Owns the lanes' places and the graph. Does not know drafters, only input and output
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from struct import Struct

import torch
from torch import Tensor

from luceasync.models.inference import inference_mode
from luceasync.models.pass_rows import NO_LANE
from luceasync.models.trees import chain
from luceasync.pipeline.capture import Capture
from luceasync.pipeline.passes import MAX_STOPS, LaneText, RoundWork
from luceasync.pipeline.shard import Shard
from luceasync.pipeline.transfer import host_buffer, new_arrival
from luceasync.ranking.local import best_tokens
from luceasync.ranking.logits import NO_TOKEN

# Accepts the chains `proposed`, int64 [entries, rows], as far as each row's best token is the next
# row's and does not end the text. Reads logits [entries * rows, vocab]; place, int32 [3, entries]:
# lanes, positions, and how many tokens are left; stops, int64 [entries, stops]: tokens that end a
# text, or NO_TOKEN. Writes path, int32 [3, entries]: lanes and positions as they were, and how many
# rows stand, 0 of padding; found, int64 [entries, 1 + rows]: that number and the best tokens, the
# given token for a row that has none, which is the last to stand. Then moves the places on, an
# entry whose text has ended being padding from now on, and sets anchors, int64 [entries], to each
# lane's newest token, or to 0 if that is none: an embedding has a row of each.
# (logits, proposed, place, stops, anchors, path, found, no_token)
Accept = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], None]


def accept_best(
    logits: Tensor,
    proposed: Tensor,
    place: Tensor,
    stops: Tensor,
    anchors: Tensor,
    path: Tensor,
    found: Tensor,
    no_token: int,
) -> None:
    """Accept in torch, for any device."""
    is_lane, best = place[0] >= 0, best_tokens(logits, None, no_token).view(proposed.shape)
    row = torch.arange(1, best.shape[1] + 1, device=best.device)
    ends = (best[:, :, None] == stops[:, None]).any(-1) | (best == no_token)
    ends |= row >= place[2][:, None]
    goes_on = (best[:, :-1] == proposed[:, 1:]) & ~ends[:, :-1]
    counts = 1 + goes_on.int().cumprod(1).sum(1)
    last = counts[:, None] - 1
    has_ended, newest = ends.gather(1, last)[:, 0], best.gather(1, last)[:, 0]
    counts = torch.where(is_lane, counts, 0)
    path[0], path[1], path[2] = place[0], place[1], counts
    place[0] = torch.where(has_ended, NO_LANE, place[0])
    place[1] += counts
    place[2] -= counts
    anchors.copy_(torch.where(is_lane, newest.clamp_min(0), anchors))
    found[:, 0], found[:, 1:] = counts, best


def compile_accept(accept: Accept, logits: Tensor, num_rows: int) -> None:
    """Run `accept` for an entry of this many rows and no lane, so that its kernels are compiled."""
    numbers = partial(torch.zeros, dtype=torch.int64, device=logits.device)
    place = torch.full((3, 1), NO_LANE, dtype=torch.int32, device=logits.device)
    stops, found = numbers(1, MAX_STOPS), numbers(1, 1 + num_rows)
    proposed, path = numbers(1, num_rows), place.clone()
    accept(logits[:num_rows], proposed, place, stops, numbers(1), path, found, NO_TOKEN)


class FoundTokens:
    """The tokens of a queued round, on their way to the host: a ComingTokens."""

    def __init__(self, size: int, num_rows: int, device: torch.device) -> None:
        num_numbers = size * (1 + num_rows)
        self._copy = host_buffer(num_numbers, torch.int64, device).view(size, 1 + num_rows)
        self._numbers = self._copy.numpy()  # the same memory
        self._arrival = new_arrival(device)

    def take(self, found: Tensor) -> None:
        """Queue the copy of `found` (see Accept) after the round."""
        self._copy.copy_(found, non_blocking=True)
        if self._arrival is not None:
            self._arrival.record()

    def fetch(self) -> list[list[int]]:
        if self._arrival is not None:
            self._arrival.synchronize()
        return [row[1 : 1 + row[0]] for row in self._numbers.tolist()]


class CapturedRound:
    """DeviceRounds of a shard that has all layers.

    start(texts)        what the host knows
    queue()  queue()    two rounds; the second begins where the first one ends
    fetch()             the first one's tokens
    """

    def __init__(
        self,
        shard: Shard,
        capture: Capture,
        accept: Accept,
        work: RoundWork,
        taps: Sequence[int],
        logits: Tensor,
    ) -> None:
        """`taps`: the layers whose rows the drafter absorbs, in its order; `logits`: where the
        logits of the pass are written, float32 [entries, rows, vocab]. Captures the round."""
        self._shard, self._accept = shard, accept
        self._work, self._taps, self._logits = work, tuple(taps), logits
        self._size, num_rows = logits.shape[:2]
        size, device = self._size, shard.device
        self._format = Struct(f"={(1 + MAX_STOPS) * size}q{3 * size}i")
        # Everything that the host sets is adjacent: one copy sets it all.
        held = self._held = torch.zeros(self._format.size, dtype=torch.uint8, device=device)
        # Pinned: a copy of pageable memory queued after other work may block the host.
        self._staged = host_buffer(self._format.size, torch.uint8, device)
        self._bytes = self._staged.numpy().data  # the same memory
        self._taken = new_arrival(device)  # the numbers being staged
        anchors, stops, place = held.split([8 * size, 8 * MAX_STOPS * size, 12 * size])
        self._anchors = anchors.view(torch.int64)
        self._stops = stops.view(torch.int64).view(size, MAX_STOPS)
        self._place = place.view(torch.int32).view(3, size)
        self._place[0] = NO_LANE
        self._path = torch.zeros(3, size, dtype=torch.int32, device=device)
        self._found = torch.zeros(size, 1 + num_rows, dtype=torch.int64, device=device)
        self._parents = chain(size, num_rows, device).contiguous()
        rows = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._rows = rows.expand(size, -1).contiguous()
        # Two alternate: a round is queued before the tokens of the last one are read.
        self._next, self._last = (FoundTokens(size, num_rows, device) for _ in range(2))
        self._captured = capture(self._run, num_warmups=1)

    @inference_mode
    def start(self, texts: Sequence[LaneText]) -> None:
        padding = [LaneText(NO_LANE, 0, 0, 0, ())] * (self._size - len(texts))
        lanes, begins, anchors, nums_left, stops = zip(*texts, *padding, strict=True)
        padded = [token for each in stops for token in (*each, *[NO_TOKEN] * MAX_STOPS)[:MAX_STOPS]]
        if self._taken is not None:
            self._taken.synchronize()  # long ago
        self._format.pack_into(self._bytes, 0, *anchors, *padded, *lanes, *begins, *nums_left)
        with self._shard.on_device():
            self._shard.use([text.lane for text in texts])
            self._held.copy_(self._staged, non_blocking=True)
            if self._taken is not None:
                self._taken.record()

    @inference_mode
    def queue(self) -> FoundTokens:
        self._next, last = self._last, self._next
        self._last = last
        self._shard.cache.begin_pass()
        with self._shard.on_device():
            self._captured.replay()
            last.take(self._found)
        return last

    def _run(self) -> None:
        shard, (lanes, begins, _) = self._shard, self._place
        proposed = self._work.propose(self._anchors, lanes, begins)
        trees = shard.trees(self._parents)
        rows = shard.rows_from((), lanes, begins[:, None] + trees.depths)
        logits = shard.ends.project(
            shard.verify(shard.ends.embed(proposed), rows, trees), self._logits
        )
        taps = [shard.taps[layer] for layer in self._taps]
        changed = (self._anchors, self._path, self._found)
        self._accept(logits.flatten(0, 1), proposed, self._place, self._stops, *changed, NO_TOKEN)
        lanes, at, counts = self._path
        shard.commit(shard.paths_from((), lanes, at, self._rows, counts))
        self._work.absorb(taps, proposed, lanes, at, counts, self._rows)
