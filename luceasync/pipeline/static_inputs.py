"""Static tensors that a captured decode step reads, and what the host knows of them.

A copy takes the host as long as twenty kernels take the device to begin: what a tensor holds
already is not copied again. Of a step that has fed itself that is everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from luceasync.models.pass_rows import NO_LANE
from luceasync.models.trees import chain
from luceasync.pipeline.passes import Batch, PassInput, following
from luceasync.pipeline.transfer import Arrival, Brief, landing, queue_copy
from luceasync.ranking.local import best_tokens

# Of logits [entries, vocab]: the best token of every entry, or `no_token`, goes to `found`, int64
# [entries], and to `given`, int64 [entries, 1]: there 0 is in place of `no_token`, for an embedding
# has a row for every token and for nothing else, and the next step may begin before anybody has
# looked. One is added to its position in `place`, int32 [2, entries]: lanes, positions. What is
# given to entries of no lane stays, and 0 is found: nobody will have given them any other token.
Feed = Callable[[Tensor, Tensor, Tensor, Tensor, int], None]


def feed_best(logits: Tensor, given: Tensor, place: Tensor, found: Tensor, no_token: int) -> None:
    """Feed in torch, for any device."""
    is_lane = place[0] >= 0
    best = best_tokens(logits, None, no_token)[:, 0]
    found.copy_(torch.where(is_lane, best, 0))
    given.copy_(torch.where(is_lane, best.clamp_min(0), given[:, 0])[:, None])
    place[1] += is_lane


class FedTokens:
    """Best tokens that a step has fed, on their way to the host: a FoundBest. `tokens`: what the
    host knows of them, None before they are fetched.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._copy = landing(size, torch.int64, device)
        self._numbers = self._copy.numpy()  # the same memory
        self._arrival: Arrival | None = None
        self.tokens: tuple[int, ...] | None = None

    def take(self, found: Tensor) -> None:
        """Queue the copy behind the step."""
        self.tokens, self._arrival = None, queue_copy(found, self._copy)

    def fetch(self) -> np.ndarray:
        """See FoundBest. Waits for the copy and for nothing that is queued behind it."""
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None
        self.tokens = tuple(self._numbers.tolist())
        return self._numbers.copy()


class Feedback:
    """What a step that feeds itself tells the host: `found` int64 [size], on the device; see Feed.

    Two copies take turns, so that a step that is launched before the tokens of the one before it
    have been read does not write over them.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.found = torch.zeros(size, dtype=torch.int64, device=device)
        self._next, self._last = FedTokens(size, device), FedTokens(size, device)

    def send(self) -> FedTokens:
        """Those of the step that is queued; they hold until the step after the next one."""
        self._next, self._last = self._last, self._next
        self._last.take(self.found)
        return self._last


class KnownInputs:
    """What the host knows of a step's inputs: which lanes, at which positions, with which tokens:
    those that it has told (None: it does not know them), or those that a step has fed.
    """

    def __init__(self) -> None:
        self._lanes: tuple[int, ...] = ()
        self._begins: tuple[int, ...] = ()
        self._tokens: tuple[int, ...] | None = None
        self._fed: FedTokens | None = None

    def is_at(self, batch: Batch) -> bool:
        """Whether the lanes are these, at these positions."""
        return self._begins == batch.begins and self._lanes == batch.lanes

    def has(self, batch: Batch, tokens: Sequence[int]) -> bool:
        """Whether the pass would be given these tokens there."""
        # Begins first: they are what differs. No call of is_at, here once a step: the device waits,
        # and whatever the host does once a millisecond takes it ten times as long as in a loop.
        known = self._tokens if self._fed is None else self._fed.tokens
        return (
            self._begins == batch.begins and self._lanes == batch.lanes and known == tuple(tokens)
        )

    def put(self, batch: Batch) -> None:
        """The lanes and positions have been copied."""
        self._lanes, self._begins = batch.lanes, batch.begins

    def give(self, tokens: Sequence[int] | None) -> None:
        """The tokens are these now."""
        self._tokens = None if tokens is None else tuple(tokens)
        self._fed = None

    def fed(self, fed: FedTokens) -> None:
        """The pass has fed itself these: see Feed."""
        self._begins = following(self._lanes, self._begins)
        self._fed = fed


class StaticInputs:
    """`given`: tokens int64 [size, 1] of the first shard, else [size, 1, hidden]; `place`: int32
    [2, size], lanes, and how many tokens each has committed.
    """

    def __init__(
        self, size: int, device: torch.device, activation: tuple[int, torch.dtype] | None
    ) -> None:
        """`activation`: how wide it is, and of what; None: tokens are given."""
        num_tokens = 0 if activation else size
        self._tokens, self._place = Struct(f"={num_tokens}q"), Struct(f"={2 * size}i")
        num_bytes = self._tokens.size
        # Tokens and place follow each other, so that one copy tells both.
        self._all = torch.zeros(num_bytes + self._place.size, dtype=torch.uint8, device=device)
        self._bytes = bytearray(len(self._all))
        self._told = torch.frombuffer(self._bytes, dtype=torch.uint8)  # the same memory
        self._told_place = self._told[num_bytes:]
        self.place = self._all[num_bytes:].view(torch.int32).view(2, size)
        self.place[0] = NO_LANE
        if activation:
            width, dtype = activation
            self.given = torch.zeros((size, 1, width), dtype=dtype, device=device)
        else:
            self.given = self._all[:num_bytes].view(torch.int64).view(size, 1)
        self._held = KnownInputs()

    def tell(self, batch: Batch, given: PassInput) -> None:
        """Have them hold what the pass is given, and its place."""
        if isinstance(given, Tensor):
            if given.device == self._all.device or not self._tokens.size:
                self.given.copy_(given, non_blocking=True)
                self._held.give(None)
                self.tell_place(batch)
                return
            given = tuple(given.flatten().tolist())
        if self._held.has(batch, given):
            return
        self._tokens.pack_into(self._bytes, 0, *given)
        self._place.pack_into(self._bytes, self._tokens.size, *batch.lanes, *batch.begins)
        self._all.copy_(self._told, non_blocking=True)  # so few bytes are staged at once
        self._held.put(batch)
        self._held.give(given)

    def tell_place(self, batch: Batch) -> None:
        """Have them hold the place of the pass, whatever it is given."""
        if self._held.is_at(batch):
            return
        self._place.pack_into(self._bytes, self._tokens.size, *batch.lanes, *batch.begins)
        self.place.view(-1).view(torch.uint8).copy_(self._told_place, non_blocking=True)
        self._held.put(batch)

    def is_at(self, batch: Batch) -> bool:
        """Whether the place that they hold is that of the batch."""
        return self._held.is_at(batch)

    def fed(self, fed: FedTokens) -> None:
        """The pass that is queued writes them itself: see Feed."""
        self._held.fed(fed)


# Static tensors that captured passes over trees of rows read: verify passes, short chunks.


class TreeInputs:
    """`given`: tokens int64 [size, rows] of the first shard, else [size, rows, hidden]; `parents`:
    int32 [size, rows], a chain at first. `lanes`, `begins`: int32 [size], how many tokens each lane
    has committed; `rows`: int32 [size, rows], of which the first `counts`, int32 [size], are
    accepted. These are briefs: `place` of the former two, `paths` of the latter two.
    """

    def __init__(
        self,
        size: int,
        num_rows: int,
        device: torch.device,
        activation: tuple[int, torch.dtype] | None,
    ) -> None:
        """`activation`: how wide it is, and of what; None: tokens are given."""
        self._size, self._num_rows = size, num_rows
        width, dtype = ((), torch.int64) if activation is None else (activation[:1], activation[1])
        self.given = torch.zeros((size, num_rows, *width), dtype=dtype, device=device)
        self.parents = chain(size, num_rows, device).contiguous()
        self._are_chains = True
        self.place = Brief([NO_LANE] * size + [0] * size, device)
        self.lanes, self.begins = self.place.there.view(2, size)
        self.paths = Brief([0] * (size * num_rows + size), device)
        rows, self.counts = self.paths.there.split([size * num_rows, size])
        self.rows = rows.view(size, num_rows)

    def hang(self, parents: Tensor | None) -> None:
        """Have the rows follow these, int32 [size, rows]; None: each the one before it."""
        if parents is not None:
            self.parents.copy_(parents, non_blocking=True)
        elif not self._are_chains:
            self.parents.copy_(chain(self._size, self._num_rows, self.parents.device))
        self._are_chains = parents is None

    def of_paths(self, paths: Sequence[Sequence[int]]) -> list[int]:
        """What `paths` is told: a path for each entry."""
        num_rows = self._num_rows
        filled = [row for path in paths for row in [*path, *[0] * (num_rows - len(path))]]
        return [*filled, *map(len, paths)]


def of_place(batch: Batch) -> tuple[int, ...]:
    """What `place` is told."""
    return batch.lanes + batch.begins
