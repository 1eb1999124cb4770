"""Logits on a device of this process: edited, masked, ranked and packed there, for one copy to the
host.
"""

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
    Candidates,
    Edits,
    Logprobs,
    Masks,
    Ranking,
    RankRequest,
    TopLogits,
    WholeRow,
)
from luceasync.ranking.proposals import Proposal

# Of a mask.
_WORD_BITS = 32
# By the value of a byte, its bits as eight bytes of 0 or 1, lowest bit first.
_BYTES = np.arange(256, dtype=np.uint8)[:, None]
_SPREAD = np.unpackbits(_BYTES, axis=1, bitorder="little").view(np.int64)[:, 0]
assert sys.byteorder == "little", "the bytes of a mask's words are in the order of its tokens"


def apply_edits(logits: Tensor, parts: Sequence[Edits]) -> Tensor:
    """Apply bias and penalties to float32 `logits` `[rows, vocab]`, one part after the other.
    Returns a copy, or `logits` if nothing is edited.
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


def apply_masks(logits: Tensor, masks: Masks) -> Tensor:
    """A copy of float32 `logits` `[rows, vocab]` with -inf for tokens that are not allowed."""
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
    """int32 [rows, words] -> bool [rows, words * 32], lowest bit first: True for each bit that is
    not set. A table takes a tenth of the time and memory of shifting each word 32 times on a CPU.
    """
    spread = torch.from_numpy(_SPREAD).to(words.device, non_blocking=True)
    return spread[words.bitwise_not().view(torch.uint8).int()].view(torch.bool)


# The lowest id of the highest logit of float rows `[rows, vocab]`, NO_TOKEN if that is not finite:
# int64 `[rows, n + 1]`, after the carried columns, int64 `[rows, n]`.
BestTokens = Callable[[Tensor, Tensor | None, int], Tensor]


def best_tokens(rows: Tensor, carry: Tensor | None, no_token: int) -> Tensor:
    """BestTokens in torch, for any device."""
    peaks, ids = rows.max(-1, keepdim=True)  # a peak is NaN where any logit is
    is_odd = (peaks - peaks).isnan()  # infinite, or NaN
    ids.masked_fill_(is_odd, no_token)
    return ids if carry is None else torch.cat([carry, ids], 1)


# The highest logits of float rows `[rows, vocab]`, as many as requested, or all, in float64 `[rows,
# n + 2 + 2 * ranked]`: after the carried columns, int64 `[rows, n]`, the best token as above, the
# mass at the temperature of each row, 0 where that is 0 (see TopLogits; temperatures are float32
# numbers, or empty for no row), then values, descending, and their ids, equal ones in any order.
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
    return torch.cat([block.double() for block in blocks], dim=1)  # an id is exact in float64


class PendingHostCopy(Protocol):
    """A copy to the host in progress."""

    def fetch(self) -> np.ndarray:
        """Block until it is ready; returns an array of the same shape."""
        ...


@dataclass(frozen=True, slots=True)
class LazyHostCopy:
    """A HostCopy for any device, made when it is fetched."""

    numbers: Tensor

    def fetch(self) -> np.ndarray:
        return self.numbers.cpu().numpy()


@dataclass(frozen=True, slots=True)
class RankingKernels:
    """The functions that rank logits on a device. `send` begins a copy to the host, after
    everything that is queued, without waiting.
    """

    best: BestTokens = best_tokens
    highest: HighestTokens = highest_tokens
    send: Callable[[Tensor], PendingHostCopy] = LazyHostCopy


# A weight of 1 in a sum of integers: int64 has room for 2 million tokens, and what 2**18 tokens
# lose by rounding is less than the error of float32 weights.
_ONE = 2.0**42
_FLOAT32 = np.finfo(np.float32)


class KnownBest(Protocol):
    """The best tokens of logits, found by the pass that computed them."""

    def fetch(self) -> np.ndarray:
        """Wait for int64 `[rows, n + 1]`: the columns of the proposal that the pass verified, if it
        verified one, then the tokens as BestTokens finds them. The result may include rows and
        columns of a proposal that were not requested. The pass is notified that the host has the
        tokens."""
        ...


class LocalLogits:
    """Logits on a device of this process; see luceasync.ranking.logits.Logits."""

    def __init__(
        self,
        logits: Tensor,
        kernels: RankingKernels = RankingKernels(),
        found: KnownBest | None = None,
    ) -> None:
        """`logits`: `[..., vocab]`, any float dtype, any device; never modified. `kernels`: for
        that device. `found`: the best tokens, if the pass has computed them already."""
        self._logits = logits
        self._kernels = kernels
        self._found = found

    @property
    def num_vocab(self) -> int:
        return self._logits.shape[-1]

    def whole(self) -> Tensor:
        return self._logits

    def rank(self, request: RankRequest, proposal: Proposal | None = None) -> Ranking:
        """See Logits. A row's candidates depend on that row alone. Log-probabilities are of the raw
        logits, in float32.
        """
        if self._found is not None and request == BEST:
            num_columns = 0 if proposal is None else proposal.num_columns
            return _BestOfPass(self._found, self._logits.shape[:-1].numel(), num_columns)
        columns = None if proposal is None else proposal.columns()
        if columns is not None:  # the proposal may have been made on the host
            columns = columns.to(self._logits.device, non_blocking=True)
        return self._rank(request, columns)

    @torch.inference_mode()
    def _rank(self, request: RankRequest, carry: Tensor | None) -> Ranking:
        raw = self._logits if self._logits.ndim == 2 else self._logits.flatten(0, -2)
        masks = request.masks
        if request.is_of_masked and masks is not None:
            assert not request.edits, "edits name rows by their place among all"
            rows = torch.from_numpy(masks.rows).to(raw.device, non_blocking=True)
            raw, carry = raw[rows], None if carry is None else carry[rows]
            masks = Masks(np.arange(len(masks.rows)), masks.words)
        edited = apply_edits(raw.float(), request.edits) if request.edits else raw
        if masks is not None:
            edited = apply_masks(edited.float(), masks)
        if request.num_ranked:
            return _ranked(raw, edited.float(), request, carry, self._kernels)
        return _BestRanking(self._kernels.send(self._kernels.best(edited, carry, NO_TOKEN)))


class _BestOnly:
    """A ranking of the highest logit only."""

    __slots__ = ()

    def whole_row(self, index: int) -> WholeRow:
        raise AssertionError("no logits were requested")

    def whole_logprobs(self, index: int) -> WholeRow:
        raise AssertionError("no log-probabilities were requested")

    def logprob(self, index: int, token_id: int) -> float:
        raise AssertionError("no log-probabilities were requested")


@dataclass(frozen=True, slots=True)
class _BestOfPass(_BestOnly):
    """The highest logits as computed by the pass."""

    found: KnownBest
    num_rows: int
    num_columns: int  # columns of the proposal

    def candidates(self) -> Candidates:
        host = self.found.fetch()[: self.num_rows]
        return Candidates(host[:, : self.num_columns], host[:, -1], None)


@dataclass(frozen=True, slots=True)
class _BestRanking(_BestOnly):
    """The highest logits. `packed` int64 `[rows, n + 1]`: the carried columns, then their ids."""

    packed: PendingHostCopy

    def candidates(self) -> Candidates:
        host = self.packed.fetch()
        return Candidates(host[:, :-1], host[:, -1], None)


@dataclass(frozen=True, slots=True)
class _TopRanking:
    """`edited` and `logprobs` float32 `[rows, vocab]`, `logprobs` None if they were not requested.
    `packed`: float64 `[rows, n]`, blocks of `widths` columns side by side.
    """

    edited: Tensor
    logprobs: Tensor | None
    packed: PendingHostCopy
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
        assert self.logprobs is not None, "no log-probabilities were requested"
        return _sorted(self.logprobs[index])

    def logprob(self, index: int, token_id: int) -> float:
        assert self.logprobs is not None, "no log-probabilities were requested"
        return float(self.logprobs[index, token_id].item())


def _ranked(
    raw: Tensor, edited: Tensor, request: RankRequest, carry: Tensor | None, kernels: RankingKernels
) -> _TopRanking:
    """Queue the ranking of float32 `edited` on the device, for one copy."""
    num_carried = 0 if carry is None else carry.shape[1]
    num_ranked = min(edited.shape[1], request.num_ranked)
    packed = kernels.highest(edited, carry, num_ranked, _clamped(request.mass_at), NO_TOKEN)
    widths = [num_carried, 1, 1, num_ranked, num_ranked]
    if request.num_top is None:
        return _TopRanking(edited, None, kernels.send(packed), tuple(widths))
    logprobs = raw.float().log_softmax(-1)
    best, _, _, ids = packed[:, num_carried:].split(widths[1:], 1)
    known = logprobs.gather(1, torch.cat([best, ids], 1).long().clamp_(min=0))
    blocks = [known, *logprobs.topk(min(raw.shape[1], request.num_top))]
    packed = torch.cat([packed, *(block.double() for block in blocks)], dim=1)
    widths.extend(block.shape[1] for block in blocks)
    return _TopRanking(edited, logprobs, kernels.send(packed), tuple(widths))


def _clamped(mass_at: Sequence[float]) -> list[float]:
    """Temperatures, clamped to what float32 can divide by; 0 stays 0."""
    least, most = (float(limit) for limit in (_FLOAT32.tiny, _FLOAT32.max))
    return [min(max(one, least), most) if one else 0.0 for one in map(float, mass_at)]


def _masses(edited: Tensor, values: Tensor, mass_at: Sequence[float]) -> Tensor:
    """float64 `[rows, 1]`. Weights are added as integers, so that neither their order nor the
    number of rows changes a sum.
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
    here = torch.tensor([[mass_at[i]] for i in rows], dtype=torch.float32)
    temperatures = here.to(device, non_blocking=True)
    scaled = (edited - values[:, :1]).div_(temperatures).exp_()  # [rows, vocab], the highest 1
    sums = scaled.mul_(_ONE).long().sum(-1, keepdim=True).double().div_(_ONE)
    return sums if at is None else masses.index_copy_(0, at, sums)


def _sorted(row: Tensor) -> WholeRow:
    # Stable: equal logits stay in order of id.
    ranked = row[None].sort(descending=True, stable=True)
    host = torch.cat([ranked.values.double(), ranked.indices.double()]).cpu().numpy()
    return WholeRow(host[0], host[1])
