"""Logits on a device of this process: edited, ranked and packed there, in one copy to the host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from luceasync.ranking.logits import (
    BEST,
    NO_TOKEN,
    TopLogits,
    Candidates,
    Edits,
    Logprobs,
    Masks,
    Ranking,
    RankRequest,
    WholeRow,
)

# Bias and penalties on the device, for a batch of rows at once. Owns no logits.


def apply_edits(logits: Tensor, parts: Sequence[Edits]) -> Tensor:
    """`parts` applied to float32 `logits` `[rows, vocab]`, one after the other; a copy, or `logits`
    when they edit nothing.
    """
    if not any(part.table.shape[1] for part in parts):
        return logits
    packed = np.concatenate([part.table for part in parts], axis=1)
    assert packed[1].max() < logits.shape[1], "token id outside the vocabulary"
    # Pageable memory is staged before the call returns: asynchronous, and safe.
    here = torch.from_numpy(packed).to(logits.device, non_blocking=True)
    result = logits.clone()
    begin = 0
    for edits in parts:
        part = here[:, begin : begin + edits.table.shape[1]]
        begin += edits.table.shape[1]
        below = torch.arange(edits.num_rows, device=logits.device)[:, None]
        where = (part[0].long() + below, part[1].long().expand(edits.num_rows, -1))
        bias, repetition, shift = part[2:].float()  # [edits] each
        edited = logits[where] + bias
        edited = torch.where(edited > 0, edited / repetition, edited * repetition) - shift
        result.index_put_(where, edited)
    return result


# Which tokens may come, applied on the device: a bit for each, as they cross. Owns no logits.


_WORD_BITS = 32
# By the value of a byte, its bits as eight bytes of 0 or 1, lowest bit first.
_BYTES = np.arange(256, dtype=np.uint8)[:, None]
_SPREAD = np.unpackbits(_BYTES, axis=1, bitorder="little").view(np.int64)[:, 0]
assert sys.byteorder == "little", "the bytes of a mask's words stand in the order of its tokens"


def apply_masks(logits: Tensor, masks: Masks) -> Tensor:
    """float32 `logits` `[rows, vocab]` with -inf for what may not come; a copy."""
    num_rows, num_vocab = logits.shape
    assert masks.words.shape[1] * _WORD_BITS >= num_vocab, "a mask of fewer tokens than logits"
    # Pageable memory is staged before the call returns: asynchronous, and safe.
    words = torch.from_numpy(masks.words).to(logits.device, non_blocking=True)
    is_refused = _refused(words)[:, :num_vocab]
    if len(masks.rows) == num_rows:
        return logits.masked_fill(is_refused, -torch.inf)
    assert masks.rows[-1] < num_rows, "a mask of a row that is not there"
    rows = torch.from_numpy(masks.rows).to(logits.device, non_blocking=True)
    masked = logits[rows].masked_fill_(is_refused, -torch.inf)
    return logits.index_copy(0, rows, masked)


def _refused(words: Tensor) -> Tensor:
    """int32 [rows, words] -> bool [rows, words * 32], lowest bit first: where none is set. By a
    table: on a CPU a tenth of the time and of the memory that shifting each word 32 times takes.
    """
    spread = torch.from_numpy(_SPREAD).to(words.device, non_blocking=True)
    return spread[words.bitwise_not().view(torch.uint8).int()].view(torch.bool)


# Of float rows `[rows, vocab]` the lowest id of the highest logit, NO_TOKEN where that is no finite
# number: int64 `[rows, n + 1]`, behind what is carried, int64 `[rows, n]`.
BestTokens = Callable[[Tensor, Tensor | None, int], Tensor]


def best_tokens(rows: Tensor, carry: Tensor | None, no_token: int) -> Tensor:
    """BestTokens in torch, for any device."""
    peaks, ids = rows.max(-1, keepdim=True)  # a peak is NaN where any logit is
    is_odd = (peaks - peaks).isnan()  # infinite, or NaN
    ids.masked_fill_(is_odd, no_token)
    return ids if carry is None else torch.cat([carry, ids], 1)


# Of float rows `[rows, vocab]` as many of the highest logits as are asked for, or all, in float64
# `[rows, n + 2 + 2 * ranked]`: behind what is carried, int64 `[rows, n]`, the best token as above,
# the mass at a temperature for each row, 0 where it is 0 (see Block; float32 numbers, or none for
# no row), then values, descending, and their ids, equal ones in any order.
HighestTokens = Callable[[Tensor, Tensor | None, int, Sequence[float], int], Tensor]


def highest_tokens(
    rows: Tensor,
    carry: Tensor | None,
    num_ranked: int,
    mass_at: Sequence[float],
    no_token: int,
) -> Tensor:
    """HighestTokens in torch, for any device."""
    rows = rows.float()
    values, ids = rows.topk(min(rows.shape[1], num_ranked))
    best = best_tokens(rows, carry, no_token)
    blocks = [best, _masses(rows, values, mass_at), values, ids]
    return torch.cat([block.double() for block in blocks], dim=1)  # an id stays exact in it


class HostCopy(Protocol):
    """Numbers that come to the host."""

    def fetch(self) -> np.ndarray:
        """They, waited for; of no other shape than where they were."""
        ...


@dataclass(frozen=True, slots=True)
class LazyHostCopy:
    """They cross when they are read: a Coming for any device."""

    numbers: Tensor

    def fetch(self) -> np.ndarray:
        """See Coming."""
        return self.numbers.cpu().numpy()


@dataclass(frozen=True, slots=True)
class RankingKernels:
    """What finds tokens where the logits are. `send`: has numbers begin to come to the host, behind
    all that is queued; nobody waits.
    """

    best: BestTokens = best_tokens
    highest: HighestTokens = highest_tokens
    send: Callable[[Tensor], HostCopy] = LazyHostCopy


# What a weight of 1 counts in a sum: int64 holds it for 2 million tokens, and what is cut off of
# 2**18 tokens is less than float32 is off in the weights.
_ONE = 2.0**42
_FLOAT32 = np.finfo(np.float32)


class KnownBest(Protocol):
    """The best tokens of logits, which the pass that gave them has found as well."""

    def fetch(self) -> np.ndarray:
        """int64 `[rows]` as BestTokens finds them, and after these of rows that nobody asks for;
        waits for the device. Whoever reads them there again hears that the host knows them.
        """
        ...


class LocalLogits:
    """See Logits."""

    def __init__(
        self,
        logits: Tensor,
        bodies: RankingKernels = RankingKernels(),
        found: KnownBest | None = None,
    ) -> None:
        """`logits`: `[..., vocab]`, any float dtype, any device. They are left as they are.
        `bodies`: for that device. `found`: what its best tokens are, if that is there already.
        """
        self._logits = logits
        self._bodies = bodies
        self._found = found

    @property
    def num_vocab(self) -> int:
        return self._logits.shape[-1]

    def whole(self) -> Tensor:
        return self._logits

    def rank(self, wanted: RankRequest, carry: Tensor | None = None) -> Ranking:
        """A row's candidates depend on nothing but that row. Log-probabilities are of the raw
        logits, in float32.
        """
        found = self._found
        if found is not None and carry is None and wanted == BEST:
            return _Found(found, np.empty((len(self._logits), 0), np.int64))
        return self._rank(wanted, carry)

    @torch.inference_mode()
    def _rank(self, wanted: RankRequest, carry: Tensor | None) -> Ranking:
        raw = self._logits if self._logits.ndim == 2 else self._logits.flatten(0, -2)
        masks = wanted.masks
        if wanted.is_of_masked and masks is not None:
            assert not wanted.edits, "edits name rows by their place among all"
            rows = torch.from_numpy(masks.rows).to(raw.device, non_blocking=True)
            raw, carry = raw[rows], None if carry is None else carry[rows]
            masks = Masks(np.arange(len(masks.rows)), masks.words)
        edited = apply_edits(raw.float(), wanted.edits) if wanted.edits else raw
        if masks is not None:
            edited = apply_masks(edited.float(), masks)
        if wanted.num_ranked:
            return _ranked(raw, edited.float(), wanted, carry, self._bodies)
        return _Best(self._bodies.send(self._bodies.best(edited, carry, NO_TOKEN)))


class _HighestAlone:
    """What a ranking of nothing else does not know."""

    __slots__ = ()

    def whole_row(self, index: int) -> WholeRow:
        raise AssertionError("nothing was to be ranked")

    def whole_logprobs(self, index: int) -> WholeRow:
        raise AssertionError("no log-probabilities were wanted")

    def logprob(self, index: int, token_id: int) -> float:
        raise AssertionError("no log-probabilities were wanted")


@dataclass(frozen=True, slots=True)
class _Found(_HighestAlone):
    """Which is the highest, as the pass has found it; `carried` int64 `[rows, 0]`."""

    found: KnownBest
    carried: np.ndarray

    def candidates(self) -> Candidates:
        return Candidates(self.carried, self.found.fetch()[: len(self.carried)], None)


@dataclass(frozen=True, slots=True)
class _Best(_HighestAlone):
    """Only which is the highest. `packed` int64 `[rows, n + 1]`: what is carried, then that."""

    packed: HostCopy

    def candidates(self) -> Candidates:
        host = self.packed.fetch()
        return Candidates(host[:, :-1], host[:, -1], None)


@dataclass(frozen=True, slots=True)
class _Ranked:
    """`edited` and `logprobs` float32 `[rows, vocab]`, `logprobs` None where nobody wants them.
    `packed`: float64 `[rows, n]`, blocks of `widths` columns side by side.
    """

    edited: Tensor
    logprobs: Tensor | None
    packed: HostCopy
    widths: tuple[int, ...]

    def candidates(self) -> Candidates:
        host, ends = self.packed.fetch(), [0, *accumulate(self.widths)]
        blocks = [host[:, begin:end] for begin, end in pairwise(ends)]
        carried, best, masses, values, ids, *rest = blocks
        logprobs = Logprobs(*rest) if rest else None
        block = TopLogits(values, ids, masses[:, 0], logprobs)
        return Candidates(carried.astype(np.int64), best[:, 0].astype(np.int64), block)

    def whole_row(self, index: int) -> WholeRow:
        return _sorted(self.edited[index])

    def whole_logprobs(self, index: int) -> WholeRow:
        assert self.logprobs is not None, "no log-probabilities were wanted"
        return _sorted(self.logprobs[index])

    def logprob(self, index: int, token_id: int) -> float:
        assert self.logprobs is not None, "no log-probabilities were wanted"
        return float(self.logprobs[index, token_id].item())


def _ranked(
    raw: Tensor, edited: Tensor, wanted: RankRequest, carry: Tensor | None, bodies: RankingKernels
) -> _Ranked:
    """`edited` float32: all is queued on the device, to be copied once."""
    num_carried = 0 if carry is None else carry.shape[1]
    num_ranked = min(edited.shape[1], wanted.num_ranked)
    packed = bodies.highest(edited, carry, num_ranked, _told(wanted.mass_at), NO_TOKEN)
    widths = [num_carried, 1, 1, num_ranked, num_ranked]
    if wanted.num_top is None:
        return _Ranked(edited, None, bodies.send(packed), tuple(widths))
    logprobs = raw.float().log_softmax(-1)
    best, _, _, ids = packed[:, num_carried:].split(widths[1:], 1)
    known = logprobs.gather(1, torch.cat([best, ids], 1).long().clamp_(min=0))
    blocks = [known, *logprobs.topk(min(raw.shape[1], wanted.num_top))]
    packed = torch.cat([packed, *(block.double() for block in blocks)], dim=1)
    widths.extend(block.shape[1] for block in blocks)
    return _Ranked(edited, logprobs, bodies.send(packed), tuple(widths))


def _told(mass_at: Sequence[float]) -> list[float]:
    """Temperatures that float32 can divide by; 0 stays."""
    least, most = (float(limit) for limit in (_FLOAT32.tiny, _FLOAT32.max))
    return [min(max(one, least), most) if one else 0.0 for one in map(float, mass_at)]


def _masses(edited: Tensor, values: Tensor, mass_at: Sequence[float]) -> Tensor:
    """float64 `[rows, 1]`; weights are added as integers, so that neither the order nor how many
    rows there are can change a sum.
    """
    device = edited.device
    masses = torch.zeros(len(edited), 1, dtype=torch.float64, device=device)
    rows = [i for i, temperature in enumerate(mass_at) if temperature]
    if not rows:
        return masses
    at = None
    if len(rows) < len(edited):
        at = torch.from_numpy(np.array(rows)).to(device, non_blocking=True)
        edited, values = edited[at], values[at]
    told = torch.tensor([[mass_at[i]] for i in rows], dtype=torch.float32)
    temperatures = told.to(device, non_blocking=True)
    scaled = (edited - values[:, :1]).div_(temperatures).exp_()  # [rows, vocab], the highest 1
    sums = scaled.mul_(_ONE).long().sum(-1, keepdim=True).double().div_(_ONE)
    return sums if at is None else masses.index_copy_(0, at, sums)


def _sorted(row: Tensor) -> WholeRow:
    ranked = row[None].sort(descending=True, stable=True)  # stable: equals stay in order of id
    host = torch.cat([ranked.values.double(), ranked.indices.double()]).cpu().numpy()
    return WholeRow(host[0], host[1])
