"""Static tensors that captured passes read, and what the host knows of their content.

A copy costs the host as much time as launching twenty kernels, so values that a tensor already
holds are not copied. After a step that fed itself, nothing needs to be copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from luceasync.models.pass_rows import NO_LANE
from luceasync.models.trees import chain
from luceasync.pipeline.passes import Batch, PassInput, positions_after_step
from luceasync.pipeline.transfer import Arrival, PassParameters, host_buffer, queue_copy
from luceasync.ranking.local import best_tokens

# Writes the best token of each row of logits [entries, vocab] to `found`, int64 [entries], and to
# `given`, int64 [entries, 1], the next step's input, and adds 1 to its position in `place`, int32
# [2, entries]: lanes, positions. A row without an allowed token gives `no_token` in `found`, but 0
# in `given`: the next step may begin before the host has looked, and the embedding has a row for
# every token and for nothing else. Padding entries keep `given`; their `found` is 0, the token that
# the host gives to padding.
Feed = Callable[[Tensor, Tensor, Tensor, Tensor, int], None]


def feed_best(logits: Tensor, given: Tensor, place: Tensor, found: Tensor, no_token: int) -> None:
    """Feed in torch, for any device."""
    is_lane = place[0] >= 0
    best = best_tokens(logits, None, no_token)[:, 0]
    found.copy_(torch.where(is_lane, best, 0))
    given.copy_(torch.where(is_lane, best.clamp_min(0), given[:, 0])[:, None])
    place[1] += is_lane


class FedTokens:
    """Best tokens that a step fed itself, on their way to the host: a KnownBest. `tokens`: None
    until the host has fetched them.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._copy = host_buffer(size, torch.int64, device)
        self._numbers = self._copy.numpy()  # the same memory
        self._arrival: Arrival | None = None
        self.tokens: tuple[int, ...] | None = None

    def take(self, found: Tensor) -> None:
        """Queue the copy of `found` after the step."""
        self.tokens, self._arrival = None, queue_copy(found, self._copy)

    def fetch(self) -> np.ndarray:
        """The tokens. Waits for the copy, but for nothing queued after it."""
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None
        self.tokens = tuple(self._numbers.tolist())
        return self._numbers.copy()[:, None]


class Feedback:
    """What a step that feeds itself returns to the host. `found`: int64 [size], see Feed.

    Two buffers alternate, so a step launched before the tokens of the last one were read does not
    overwrite them.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.found = torch.zeros(size, dtype=torch.int64, device=device)
        self._next, self._last = FedTokens(size, device), FedTokens(size, device)

    def send(self) -> FedTokens:
        """Copy the queued step's tokens. They are valid until the step after the next one."""
        self._next, self._last = self._last, self._next
        self._last.take(self.found)
        return self._last


class VerifiedTokens:
    """What a captured verify pass copies to the host: a KnownBest. Valid until its next replay."""

    def __init__(self, num_rows: int, place: PassParameters, device: torch.device) -> None:
        """`num_rows`: of all entries; `place`: of this pass, which records its replays."""
        self._place = place
        self._copy = host_buffer(num_rows * 3, torch.int64, device).view(num_rows, 3)

    def take(self, packed: Tensor) -> None:
        """Copy int64 [rows, 3]: token, parent, best token; captured at the end of the pass."""
        self._copy.copy_(packed, non_blocking=True)

    def fetch(self) -> np.ndarray:
        self._place.wait()
        return self._copy.numpy()


class KnownInputs:
    """What the host knows of a step's inputs: lanes, positions, and tokens, as set by the host
    (None: unknown) or as fed by a step."""

    def __init__(self) -> None:
        self._lanes: tuple[int, ...] = ()
        self._begins: tuple[int, ...] = ()
        self._tokens: tuple[int, ...] | None = None
        self._fed: FedTokens | None = None

    def is_at(self, batch: Batch) -> bool:
        """Whether the inputs have these lanes and positions."""
        return self._begins == batch.begins and self._lanes == batch.lanes

    def has(self, batch: Batch, tokens: Sequence[int]) -> bool:
        """Whether the inputs have these lanes, positions and tokens."""
        # Compare begins first: they usually differ. is_at is not called here: the device waits, and
        # code that the host runs once a millisecond takes ten times as long as in a loop.
        known = self._tokens if self._fed is None else self._fed.tokens
        return (
            self._begins == batch.begins and self._lanes == batch.lanes and known == tuple(tokens)
        )

    def put(self, batch: Batch) -> None:
        """Record the lanes and positions that were copied."""
        self._lanes, self._begins = batch.lanes, batch.begins

    def give(self, tokens: Sequence[int] | None) -> None:
        """Record the tokens that were copied."""
        self._tokens = None if tokens is None else tuple(tokens)
        self._fed = None

    def fed(self, fed: FedTokens) -> None:
        """Record that a step fed itself these tokens and advanced the positions."""
        self._begins = positions_after_step(self._lanes, self._begins)
        self._fed = fed


class StaticInputs:
    """Inputs of a decode step. `given`: tokens int64 [size, 1] for the first shard, else the
    activation [size, 1, hidden]; `place`: int32 [2, size], the lanes and their committed tokens.
    """

    def __init__(
        self, size: int, device: torch.device, activation: tuple[int, torch.dtype] | None
    ) -> None:
        """`activation`: its width and dtype; None: the input is tokens."""
        num_tokens = 0 if activation else size
        self._tokens, self._place = Struct(f"={num_tokens}q"), Struct(f"={2 * size}i")
        num_bytes = self._tokens.size
        # Tokens and place are adjacent: one copy sets both.
        self._all = torch.zeros(num_bytes + self._place.size, dtype=torch.uint8, device=device)
        self._bytes = bytearray(len(self._all))
        self._staged = torch.frombuffer(self._bytes, dtype=torch.uint8)  # the same memory
        self._staged_place = self._staged[num_bytes:]
        self.place = self._all[num_bytes:].view(torch.int32).view(2, size)
        self.place[0] = NO_LANE
        if activation:
            width, dtype = activation
            self.given = torch.zeros((size, 1, width), dtype=dtype, device=device)
        else:
            self.given = self._all[:num_bytes].view(torch.int64).view(size, 1)
        self._known = KnownInputs()

    def set(self, batch: Batch, given: PassInput) -> None:
        """Set the input and place of the next replay."""
        if isinstance(given, Tensor):
            if given.device == self._all.device or not self._tokens.size:
                self.given.copy_(given, non_blocking=True)
                self._known.give(None)
                self.set_place(batch)
                return
            given = tuple(given.flatten().tolist())
        if self._known.has(batch, given):
            return
        self._tokens.pack_into(self._bytes, 0, *given)
        self._place.pack_into(self._bytes, self._tokens.size, *batch.lanes, *batch.begins)
        self._all.copy_(self._staged, non_blocking=True)  # this few bytes are staged by the call
        self._known.put(batch)
        self._known.give(given)

    def set_place(self, batch: Batch) -> None:
        """Set only the place of the next replay."""
        if self._known.is_at(batch):
            return
        self._place.pack_into(self._bytes, self._tokens.size, *batch.lanes, *batch.begins)
        self.place.view(-1).view(torch.uint8).copy_(self._staged_place, non_blocking=True)
        self._known.put(batch)

    def is_at(self, batch: Batch) -> bool:
        """Whether the place is that of the batch."""
        return self._known.is_at(batch)

    def fed(self, fed: FedTokens) -> None:
        """The queued step writes its next inputs itself, see Feed."""
        self._known.fed(fed)


class TreeInputs:
    """Inputs of a pass over trees of rows. `given`: tokens int64 [size, rows] for the first shard,
    else the activation [size, rows, hidden]; `parents`: int32 [size, rows], initially a chain.

    Parameters: `place` holds `lanes` and `begins`, int32 [size], the lanes and their committed
    tokens; `paths` holds `rows`, int32 [size, rows], of which the first `counts`, int32 [size], are
    accepted.
    """

    def __init__(
        self,
        size: int,
        num_rows: int,
        device: torch.device,
        activation: tuple[int, torch.dtype] | None,
    ) -> None:
        """`activation`: its width and dtype; None: the input is tokens."""
        self._size, self._num_rows = size, num_rows
        width, dtype = ((), torch.int64) if activation is None else (activation[:1], activation[1])
        self.given = torch.zeros((size, num_rows, *width), dtype=dtype, device=device)
        self.parents = chain(size, num_rows, device).contiguous()
        self._are_chains = True
        self.place = PassParameters([NO_LANE] * size + [0] * size, device)
        self.lanes, self.begins = self.place.values.view(2, size)
        self.paths = PassParameters([0] * (size * num_rows + size), device)
        rows, self.counts = self.paths.values.split([size * num_rows, size])
        self.rows = rows.view(size, num_rows)

    def set_parents(self, parents: Tensor | None) -> None:
        """Set the parents, int32 [size, rows]; None: each row follows the one before it."""
        if parents is not None:
            self.parents.copy_(parents, non_blocking=True)
        elif not self._are_chains:
            self.parents.copy_(chain(self._size, self._num_rows, self.parents.device))
        self._are_chains = parents is None

    def path_numbers(self, paths: Sequence[Sequence[int]]) -> list[int]:
        """The numbers of `paths` for a path of each entry."""
        num_rows = self._num_rows
        filled = [row for path in paths for row in [*path, *[0] * (num_rows - len(path))]]
        return [*filled, *map(len, paths)]


def place_numbers(batch: Batch) -> tuple[int, ...]:
    """The numbers of `place` for the batch."""
    return batch.lanes + batch.begins
