"""Logits to token ids: edits, temperature, filters and a seeded draw for a batch of rows.

Owns what of the logits comes to the host and when. Knows nothing of lanes or of text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from luceasync.engine.sampling.draws import draw, uniform
from luceasync.engine.sampling.edits import apply_edits
from luceasync.engine.sampling.row import RowLogprobs, RowSampling, is_edited, is_greedy
from luceasync.request import Sampling

# Without top_k, this many candidates nearly always hold the mass that top_p keeps.
NUM_CANDIDATES = 1024
# More candidates than top_k asks for: equal logits at its border (bf16 has many) need no full sort.
TIE_MARGIN = 64
# A row that asks for more than this is sorted whole, by itself: the others would pay for it too.
MOST_RANKED = 4096
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Choice:
    """One token id for each row, NO_TOKEN where the highest logit is no finite number;
    log-probabilities for the rows that asked and have a token, None for the others.
    """

    token_ids: list[int]
    logprobs: list[RowLogprobs | None]


@dataclass(frozen=True, slots=True)
class _Ranking:
    """A row's most probable tokens by logit, then by lowest id: float64 and int64 `[ranked]`."""

    values: np.ndarray
    ids: np.ndarray


class Ranked(Protocol):
    """Rows of logits of which everything that a choice needs is on the host. A row costs its draw
    only when it is chosen.
    """

    @property
    def carried(self) -> np.ndarray:
        """int64 [rows, n], what came to the host beside them."""
        ...

    def choose(self, index: int, position: int) -> tuple[int, RowLogprobs | None]:
        """The token of row `index` at `position` of its sequence; NO_TOKEN where the highest logit
        is no finite number. Log-probabilities if the row asked for them and has a token.
        """
        ...


def nothing() -> None:
    """Nothing is to be done meanwhile."""


def choose(
    logits: Tensor,
    rows: Sequence[RowSampling],
    *,
    num_candidates: int = NUM_CANDIDATES,
    meanwhile: Callable[[], None] = nothing,
) -> Choice:
    """Choose the next token of each row of `logits`; see `rank`."""
    ranked = rank(logits, rows, num_candidates=num_candidates, meanwhile=meanwhile)
    chosen = [ranked.choose(i, row.position) for i, row in enumerate(rows)]
    return Choice([token for token, _ in chosen], [logprobs for _, logprobs in chosen])


@torch.inference_mode()
def rank(
    logits: Tensor,
    rows: Sequence[RowSampling],
    *,
    carry: Tensor | None = None,
    num_candidates: int = NUM_CANDIDATES,
    meanwhile: Callable[[], None] = nothing,
) -> Ranked:
    """Make the rows of `logits` `[rows, vocab]`, any float dtype, any device, ready to be chosen
    from. `carry` int `[rows, n]`, on the same device, comes to the host in the same copy.
    `meanwhile` is called when all is queued and the host would wait for the device.

    Order: logit_bias, then repetition (over prompt and generated tokens, Keskar et al. 2019, CTRL),
    frequency and presence penalties (over generated tokens, as OpenAI defines them); temperature;
    top_k, top_p, min_p; inverse-CDF draw over the tokens sorted by probability, equal ones by id.
    This is the order of transformers; vLLM differs in that it applies min_p before top_k.
    A temperature of nothing takes the highest logit after the penalties, the lowest id among
    equals. A row whose highest logit, so edited, is not a finite number has no token.
    Log-probabilities are of the raw logits, in float32.

    A row's tokens depend on nothing but that row. Only the best `num_candidates` (or top_k) go to
    the host, in one copy; a row whose filters or draw reach further is sorted whole, with the same
    result as if it always were.
    """
    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    if carry is None:
        carry = torch.empty(len(rows), 0, dtype=torch.int64, device=logits.device)
    edited = logits
    if any(is_edited(row.sampling) for row in rows):
        edited = apply_edits(logits.float(), rows)
    if all(is_greedy(row.sampling) and row.top_logprobs is None for row in rows):
        peaks, ids = edited.max(-1, keepdim=True)  # a peak is NaN where any logit is
        is_odd = (peaks - peaks).isnan()  # infinite, or NaN
        packed = torch.cat([carry, ids.masked_fill_(is_odd, NO_TOKEN)], 1)
        meanwhile()
        host = packed.cpu().numpy()
        return _GreedyRows(host[:, :-1], host[:, -1].tolist())
    return _rank_on_host(logits, edited.float(), rows, carry, num_candidates, meanwhile)


@dataclass(frozen=True, slots=True)
class _GreedyRows:
    """Rows that take their highest logit."""

    carried: np.ndarray
    tokens: list[int]

    def choose(self, index: int, position: int) -> tuple[int, RowLogprobs | None]:
        return self.tokens[index], None


@dataclass(frozen=True, slots=True)
class _RankedRows:
    """`edited` and `logprobs` float32 `[rows, vocab]` on the device, `logprobs` None where nobody
    wants them; `blocks` are the host's, see `_token` and `_row_logprobs`.
    """

    carried: np.ndarray
    rows: Sequence[RowSampling]
    edited: Tensor
    logprobs: Tensor | None
    blocks: list[np.ndarray]

    def choose(self, index: int, position: int) -> tuple[int, RowLogprobs | None]:
        row = replace(self.rows[index], position=position)
        block = [b[index] for b in self.blocks]
        token = _token(self.edited[index], row, *block[:5])
        if self.logprobs is None or token == NO_TOKEN:
            return token, None
        known_ids = np.concatenate([block[0], block[2]])
        return token, _row_logprobs(self.logprobs[index], row, token, known_ids, *block[5:])


def _rank_on_host(
    raw: Tensor,
    edited: Tensor,
    rows: Sequence[RowSampling],
    carry: Tensor,
    num_candidates: int,
    meanwhile: Callable[[], None],
) -> _RankedRows:
    """`rank` for logits as they came and float32 edited ones: all is queued on the device, then
    copied once.
    """
    num_vocab = raw.shape[1]
    peaks, best = edited.max(-1, keepdim=True)
    num_ranked = max(_num_ranked(row.sampling, num_candidates) for row in rows)
    values, ids = edited.topk(min(num_vocab, num_ranked))
    blocks = [best, values, ids, _totals(edited, values, rows, num_candidates), peaks]
    logprobs = None
    if any(row.top_logprobs is not None for row in rows):
        logprobs = raw.float().log_softmax(-1)
        num_top = max(row.top_logprobs or 0 for row in rows) + TIE_MARGIN
        blocks.append(logprobs.gather(1, torch.cat([best, ids], 1)))
        blocks.extend(logprobs.topk(min(num_vocab, num_top)))
    carried, *host = _to_host([carry, *blocks], meanwhile)
    return _RankedRows(carried.astype(np.int64), rows, edited, logprobs, host)


def _num_ranked(sampling: Sampling, num_candidates: int) -> int:
    if is_greedy(sampling):
        return 1
    num_wanted = sampling.top_k + TIE_MARGIN
    return num_wanted if sampling.top_k and num_wanted <= MOST_RANKED else num_candidates


def _totals(
    edited: Tensor, values: Tensor, rows: Sequence[RowSampling], num_candidates: int
) -> Tensor:
    """float64 `[rows, 1]`: sum over the vocabulary of exp((logit - highest) / temperature), where
    needed.

    Row by row, so that the order of summation cannot depend on how many rows there are.
    """
    totals = [torch.zeros((), dtype=torch.float64, device=edited.device)] * len(rows)
    for i, row in enumerate(rows):
        sampling, num_vocab = row.sampling, edited.shape[1]
        is_whole = not 0 < sampling.top_k < num_vocab
        if is_whole and not is_greedy(sampling) and num_candidates < num_vocab:
            scaled = (edited[i] - values[i, 0]) / sampling.temperature  # [vocab]
            totals[i] = scaled.exp_().sum(dtype=torch.float64)
    return torch.stack(totals)[:, None]


def _to_host(blocks: Sequence[Tensor], meanwhile: Callable[[], None] = nothing) -> list[np.ndarray]:
    """`[rows, n]` blocks of any dtype as float64 arrays, in one copy; an id stays exact in it."""
    packed = torch.cat([block.double() for block in blocks], dim=1)
    meanwhile()
    return np.split(packed.cpu().numpy(), np.cumsum([b.shape[1] for b in blocks])[:-1], axis=1)


def _token(
    edited: Tensor,
    row: RowSampling,
    best: np.ndarray,
    values: np.ndarray,
    ids: np.ndarray,
    total: np.ndarray,
    peak: np.ndarray,
) -> int:
    """The token of one row: `edited` `[vocab]` on the device, the others its blocks on the host."""
    if not np.isfinite(peak[0]):
        return NO_TOKEN
    if is_greedy(row.sampling):
        return int(best[0])
    num_vocab = edited.shape[0]
    u = uniform(row.seed, row.position)
    ranking = _certain(values, ids, num_vocab)
    rank = draw(ranking.values, ranking.ids, num_vocab, total[0], row.sampling, u)
    if rank is None:
        ranking = _rank_all(edited)
        rank = draw(ranking.values, ranking.ids, num_vocab, total[0], row.sampling, u)
        assert rank is not None, "a whole ranking decides every draw"
    return int(ranking.ids[rank])


def _certain(values: np.ndarray, ids: np.ndarray, num_vocab: int) -> _Ranking:
    """The ranking that follows from a top-k selection, whose last value may have equals left
    outside.
    """
    order = np.lexsort((ids, -values))
    values, ids = values[order], ids[order]
    if len(values) < num_vocab:
        num_certain = np.searchsorted(-values, -values[-1])
        values, ids = values[:num_certain], ids[:num_certain]
    return _Ranking(values, ids.astype(np.int64))


def _rank_all(row: Tensor) -> _Ranking:
    ranked = row[None].sort(descending=True, stable=True)  # stable: equals stay in order of id
    values, ids = _to_host([ranked.values, ranked.indices])
    return _Ranking(values[0], ids[0].astype(np.int64))


def _row_logprobs(
    logprobs: Tensor,
    row: RowSampling,
    token_id: int,
    known_ids: np.ndarray,
    known_logprobs: np.ndarray,
    top_values: np.ndarray,
    top_ids: np.ndarray,
) -> RowLogprobs | None:
    """`logprobs` `[vocab]` on the device; on the host those of `known_ids`, and the highest with
    their ids.
    """
    if row.top_logprobs is None:
        return None
    known = np.flatnonzero(known_ids == token_id)
    chosen = known_logprobs[known[0]] if len(known) else logprobs[token_id].item()
    num_top = min(row.top_logprobs, logprobs.shape[0])
    ranking = _certain(top_values, top_ids, logprobs.shape[0])
    if len(ranking.ids) < num_top:
        ranking = _rank_all(logprobs)
    top = zip(ranking.ids[:num_top].tolist(), ranking.values[:num_top].tolist(), strict=True)
    return RowLogprobs(float(chosen), tuple(top))
