"""What several choices make of the rows that were verified for them in one pass.

Every row that is visited gets the token that plain decoding would have chosen there: the same
edits, the same draw for its position. Owns nothing; knows no lanes, no draft and no clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from luceasync.dflash.accept import Decide, lines, matching_child, walk
from luceasync.engine.generation import Generation
from luceasync.engine.sampling.choose import Ranked, nothing, rank
from luceasync.engine.sampling.row import RowSampling, has_penalties
from luceasync.ranking.logits import NO_TOKEN, Logits
from luceasync.ranking.proposals import Proposal

NO_NUMBERS = "the logits, with the penalties and biases of the request, are not finite numbers"


class Acceptance:
    """One round's acceptance for `generations`, the entries of the proposal in order.

    The call gives each its tokens and sets `arrived_at`, when the rows were on the host
    (time.perf_counter).
    """

    def __init__(
        self,
        generations: Sequence[Generation],
        decide: Decide = matching_child,
        meanwhile: Callable[[], None] = nothing,
    ) -> None:
        """See dflash.accept.walk for `decide`, engine.sampling.choose.rank for `meanwhile`."""
        self.arrived_at = 0.0
        self._generations = generations
        self._decide = decide
        self._meanwhile = meanwhile

    def __call__(self, proposal: Proposal, logits: Logits) -> list[list[int]]:
        """The path that stands for each entry. logits: of [entries, rows].

        The host waits for the device once; twice where a choice has penalties, since the edits of a
        row then depend on the proposed tokens above it.
        """
        num_rows = proposal.tokens.shape[1]
        carry = proposal.tokens[..., None].long()  # [entries, rows, 1 or 2]
        if proposal.parents is not None:
            carry = torch.cat([carry, proposal.parents[..., None].long()], -1)
        rows = self._rows(carry, num_rows)
        ranked = rank(logits, rows, carry=carry.flatten(0, 1), meanwhile=self._meanwhile)
        self.arrived_at = time.perf_counter()
        carried = ranked.carried.reshape(*carry.shape).tolist()
        return [self._walk(i, ranked, entry) for i, entry in enumerate(carried)]

    def _rows(self, carry: Tensor, num_rows: int) -> list[RowSampling]:
        """How each row's token is chosen; its position is told when it is visited."""
        wanted = [g.next_row for g in self._generations]
        if not any(has_penalties(row.sampling) for row in wanted):
            return [row for row in wanted for _ in range(num_rows)]
        rows = []
        for row, entry in zip(wanted, carry.tolist(), strict=True):
            if row.counts is None:
                rows += [row] * num_rows
                continue
            tokens, parents = _columns(entry)
            for line in lines(parents, num_rows):
                rows.append(replace(row, following=tuple(tokens[above] for above in line)))
        return rows

    def _walk(self, index: int, ranked: Ranked, entry: list[list[int]]) -> list[int]:
        """The entry's path; every token on it goes to its generation."""
        generation = self._generations[index]
        tokens, parents = _columns(entry)
        first = index * len(tokens)

        def follow(row: int) -> int | None:
            token, logprobs = ranked.choose(first + row, generation.position + 1)
            if token == NO_TOKEN:
                generation.end("error", NO_NUMBERS)
                return None
            return token if generation.append(token, logprobs) else None

        return walk(tokens, parents, follow, self._decide)


def _columns(entry: Sequence[Sequence[int]]) -> tuple[list[int], list[int] | None]:
    """Tokens and parents of an entry's rows [rows, 1 or 2]."""
    tokens = [row[0] for row in entry]
    return tokens, [row[1] for row in entry] if len(entry[0]) == 2 else None
