"""Logits in a backend's process: what is wanted goes there, what is found comes back.

Knows what crosses; how rows are ranked is for luceasync.ranking.local, there as here.
"""

from __future__ import annotations

from math import prod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from luceasync.ipc.supervised import Call
from luceasync.pipeline.remote import wire
from luceasync.pipeline.remote.link import Link
from luceasync.pipeline.remote.tensors import Sizes
from luceasync.ranking.logits import Block, Candidates, Logprobs, Ranking, Wanted, WholeRow


class RemoteLogits:
    """See Logits; of the last pass of a stage that has the last layer."""

    def __init__(self, link: Link, sizes: Sizes, shape: tuple[int, ...]) -> None:
        """`shape`: [entries], or [entries, rows]."""
        self._link = link
        self._sizes = sizes
        self._shape = shape
        self._num_rankings = 0

    @property
    def num_vocab(self) -> int:
        return self._sizes.num_vocab

    def rank(self, wanted: Wanted, carry: Tensor | None = None) -> Ranking:
        """The order is sent; nobody waits."""
        order = wire.Rank(
            num_entries=self._shape[0],
            num_ranked=wanted.num_ranked,
            num_top=wanted.num_top,
            num_masses=len(wanted.mass_at),
            edits=tuple((edits.num_rows, edits.table.shape[1]) for edits in wanted.edits),
            num_masked=0 if wanted.masks is None else len(wanted.masks.rows),
            is_of_masked=wanted.is_of_masked,
        )
        numbers = [np.array(wanted.mass_at, np.float64), *(edits.table for edits in wanted.edits)]
        given = [torch.from_numpy(n.astype(np.float64, copy=False)) for n in numbers if n.size]
        if (masks := wanted.masks) is not None:
            given += [torch.from_numpy(masks.rows), torch.from_numpy(masks.words)]
        number = self._link.tell(order, given)
        num_rows = order.num_masked if wanted.is_of_masked else prod(self._shape)
        place = self._num_rankings
        self._num_rankings += 1
        return _RemoteRanking(self._link, self._sizes, num_rows, wanted, carry, number, place)

    def whole(self) -> Tensor:
        """Row by row: it is for measurements."""
        spec = [((self.num_vocab,), torch.float32)]
        rows = [
            self._link.fetch(wire.Whole("raw", index), spec)[0]
            for index in range(prod(self._shape))
        ]
        return torch.stack(rows).view(*self._shape, self.num_vocab)


class _RemoteRanking:
    """See Ranking. What is carried does not cross: it comes to the host beside."""

    def __init__(
        self,
        link: Link,
        sizes: Sizes,
        num_rows: int,
        wanted: Wanted,
        carry: Tensor | None,
        number: int,
        place: int,
    ) -> None:
        """`number`: of what was told; `place`: among the rankings of the pass."""
        self._link = link
        self._sizes = sizes
        self._num_rows = num_rows
        self._wanted = wanted
        self._carry = carry
        self._number = number
        self._place = place

    def candidates(self) -> Candidates:
        wanted = self._wanted
        call = Call("rank", self._num_rows)  # it ends with the pass
        if not wanted.num_ranked:
            return Candidates(self._carried(), self._best(call), None)
        specs = self._sizes.ranked(self._num_rows, wanted.num_ranked, wanted.num_top)
        best, *rest = (tensor.numpy() for tensor in self._link.tensors(self._number, specs, call))
        values, ids, masses, *logprobs = rest
        known = Logprobs(*logprobs) if logprobs else None
        return Candidates(self._carried(), best, Block(values, ids, masses, known))

    def _best(self, call: Call) -> np.ndarray[Any, np.dtype[np.int64]]:
        tokens = self._link.answer(self._number, wire.Best, call).message.tokens
        if len(tokens) != self._num_rows or max(tokens) >= self._sizes.num_vocab:
            self._link.fail(f"it said that the best tokens of {self._num_rows} rows are {tokens}")
        return np.array(tokens, np.int64)

    def _carried(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        if self._carry is None:
            return np.empty((self._num_rows, 0), np.int64)
        return self._carry.cpu().numpy().astype(np.int64)

    def whole_row(self, index: int) -> WholeRow:
        return self._whole("edited", index)

    def whole_logprobs(self, index: int) -> WholeRow:
        return self._whole("logprobs", index)

    def logprob(self, index: int, token_id: int) -> float:
        return self._link.ask(wire.Logprob(index, token_id, self._place), wire.Told).value

    def _whole(self, what: Literal["edited", "logprobs"], index: int) -> WholeRow:
        spec = ((self._sizes.num_vocab,), torch.float64)
        values, ids = self._link.fetch(wire.Whole(what, index, self._place), [spec, spec])
        return WholeRow(values.numpy(), ids.numpy())
