"""Chooses token ids: what a batch of rows requests of its logits, then a seeded draw for each.

Does not know lanes, text, or where the logits are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from luceasync.engine.sampling.draw import (
    draw,
    draw_masked,
    known_order,
    uniform,
    unmasked,
    whole_order,
)
from luceasync.engine.sampling.row import RowLogprobs, RowSampling, edits_of, is_edited, is_greedy
from luceasync.ranking.logits import (
    BEST,
    NO_TOKEN,
    Candidates,
    Logits,
    Logprobs,
    Masks,
    Ranking,
    RankRequest,
    TopLogits,
)
from luceasync.ranking.proposals import Proposal
from luceasync.request import Sampling

# Without top_k, so many candidates nearly always hold the mass that top_p keeps.
NUM_CANDIDATES = 1024
# a draw tries this many candidates before it uses all
NUM_FIRST = 256
# Candidates beyond top_k: logits that are equal at its border (bf16 has many) then need no full
# sort.
TIE_MARGIN = 64
# A row with a larger top_k is sorted in full, on its own: otherwise the other rows would pay too.
MAX_RANKED = 4096


def nothing() -> None:
    """No-op."""


def rank(
    logits: Logits,
    rows: Sequence[RowSampling],
    *,
    proposal: Proposal | None = None,
    num_candidates: int = NUM_CANDIDATES,
    meanwhile: Callable[[], None] = nothing,
) -> RankedRows:
    """Rank the rows of `logits`, to choose from them. `proposal`: the one that was verified, which
    comes to the host in the same copy. `meanwhile` is called when everything is queued and the host
    would wait for the device.

    Order: logit_bias, then repetition (over prompt and generated tokens, Keskar et al. 2019, CTRL),
    frequency and presence penalties (over generated tokens, as OpenAI defines them); mask;
    temperature; top_k, top_p, min_p; inverse-CDF draw over the tokens sorted by probability, equal
    ones by id. This is the order of transformers; vLLM differs in that it applies min_p before
    top_k. Temperature 0 takes the highest logit after the penalties, the lowest id among equals. A
    row whose highest edited logit is not finite has no token. Log-probabilities are of the raw
    logits, in float32.

    A row's token depends on that row alone. Only the best `num_candidates` (or top_k) come to the
    host, in one copy; a row whose filters or draw reach further is fetched whole, with the same
    result as if it always were.
    """
    ranking = logits.rank(rank_request_of(rows, logits.num_vocab, num_candidates), proposal)
    meanwhile()
    return RankedRows(rows, logits.num_vocab, ranking, ranking.candidates())


def is_checked(row: RowSampling) -> bool:
    """Whether the row's token is chosen from unedited logits. Masking then waits until the token
    turns out not to be allowed: if it is allowed, masking would mostly not change it."""
    return row.top_logprobs is None and not is_edited(row.sampling)


def rank_request_of(
    rows: Sequence[RowSampling], num_vocab: int, num_candidates: int
) -> RankRequest:
    """The request to rank the logits of these rows."""
    edits = edits_of(rows) if any(is_edited(row.sampling) for row in rows) else ()
    masks = _masks(rows)
    if all(is_greedy(row.sampling) and row.top_logprobs is None for row in rows):
        return RankRequest(edits, masks=masks) if edits or masks else BEST
    return RankRequest(
        edits,
        num_ranked=max(_num_ranked(row.sampling, num_candidates) for row in rows),
        mass_at=tuple(_mass_at(row.sampling, num_vocab, num_candidates) for row in rows),
        num_top=max(row.top_logprobs or 0 for row in rows) + TIE_MARGIN
        if any(row.top_logprobs is not None for row in rows)
        else None,
        masks=masks,
    )


def _masks(rows: Sequence[RowSampling]) -> Masks | None:
    """The masks of the rows that have one."""
    found = [(i, row.mask) for i, row in enumerate(rows) if row.mask is not None]
    if not found:
        return None
    numbers, words = zip(*found, strict=True)
    return Masks(np.array(numbers, np.int64), np.stack(words))


def _num_ranked(sampling: Sampling, num_candidates: int) -> int:
    if is_greedy(sampling):
        return 1
    num_wanted = sampling.top_k + TIE_MARGIN
    return num_wanted if sampling.top_k and num_wanted <= MAX_RANKED else num_candidates


def _mass_at(sampling: Sampling, num_vocab: int, num_candidates: int) -> float:
    """The temperature at which a draw needs the mass of the whole vocabulary; 0: it needs none."""
    is_whole = not 0 < sampling.top_k < num_vocab
    needs_it = is_whole and not is_greedy(sampling) and num_candidates < num_vocab
    return sampling.temperature if needs_it else 0.0


class RankedRows:
    """Rows whose candidates are on the host. A row is drawn only when it is chosen."""

    def __init__(
        self,
        rows: Sequence[RowSampling],
        num_vocab: int,
        ranking: Ranking,
        candidates: Candidates,
    ) -> None:
        self._rows = rows
        self._num_vocab = num_vocab
        self._ranking = ranking
        self.best: list[int] = candidates.best.tolist()  # by row; NO_TOKEN as in `choose`
        self._block = candidates.block
        self.proposal = candidates.proposal  # int64 [rows, n], its columns

    def choose(self, index: int, position: int) -> tuple[int, RowLogprobs | None]:
        """The token of row `index` at `position` of its sequence; NO_TOKEN if the highest logit is
        not finite. With log-probabilities if the row requested them and has a token."""
        token = self.best[index]
        if self._block is None or token == NO_TOKEN:
            return token, None
        row = self._rows[index]
        if not is_greedy(row.sampling):
            token = self._draw(self._block, index, row.sampling, uniform(row.seed, position))
        if row.top_logprobs is None:
            return token, None
        return token, self.logprobs(index, token, row.top_logprobs)

    def unmasked(self, index: int, position: int) -> int:
        """The token of row `index` if masking other tokens cannot change it, so that only this
        token has to be checked; NO_TOKEN if that is not known."""
        token, row = self.best[index], self._rows[index]
        if self._block is None or token == NO_TOKEN or is_greedy(row.sampling):
            return token
        u = uniform(row.seed, position)
        found = self._unmasked(self._block, index, row.sampling, u)
        return NO_TOKEN if found is None else found

    def masked(self, index: int, position: int, mask: np.ndarray) -> int | None:
        """The token of row `index` under `mask`; None if its candidates do not decide it. The row
        has no mask itself."""
        block, row = self._block, self._rows[index]
        if block is None or self.best[index] == NO_TOKEN or is_greedy(row.sampling):
            return None
        order = known_order(block.values[index], block.ids[index], self._num_vocab)
        u = uniform(row.seed, position)
        return draw_masked(order, block.masses[index], row.sampling, u, mask)

    def logprobs(self, index: int, token: int, num_top: int) -> RowLogprobs:
        """The log-probability of `token` in row `index`, and the highest ones. Requires rows that
        were ranked with log-probabilities.
        """
        assert self._block is not None and self._block.logprobs is not None, "none were requested"
        return self._logprobs(self._block, self._block.logprobs, index, token, num_top)

    def _unmasked(self, block: TopLogits, index: int, sampling: Sampling, u: float) -> int | None:
        values, ids, mass = block.values[index], block.ids[index], float(block.masses[index])
        return unmasked(values, ids, self._num_vocab, mass, sampling, u)

    def _draw(self, block: TopLogits, index: int, sampling: Sampling, u: float) -> int:
        token = self._unmasked(block, index, sampling, u)
        if token is not None:
            return token
        values, ids, mass = block.values[index], block.ids[index], float(block.masses[index])
        for num_known in (NUM_FIRST, len(values)):  # the first candidates decide most draws
            order = known_order(values[:num_known], ids[:num_known], self._num_vocab)
            token = draw(order.values, order.ids, order.num_all, mass, sampling, u)
            if token is not None:
                return token
        order = whole_order(self._ranking.whole_row(index))
        token = draw(order.values, order.ids, order.num_all, mass, sampling, u)
        assert token is not None, "a whole ranking decides every draw"
        return token

    def _logprobs(
        self, block: TopLogits, logprobs: Logprobs, index: int, token: int, num_top: int
    ) -> RowLogprobs:
        known_ids = np.concatenate([[self.best[index]], block.ids[index]])
        known = np.flatnonzero(known_ids == token)
        if len(known):
            chosen = float(logprobs.known[index, known[0]])
        else:
            chosen = self._ranking.logprob(index, token)
        num_top = min(num_top, self._num_vocab)
        values, ids = logprobs.top_values[index], logprobs.top_ids[index]
        by_id = np.lexsort((ids, -values))
        order = known_order(values[by_id], ids[by_id], self._num_vocab)
        if len(order.ids) < num_top:
            order = whole_order(self._ranking.whole_logprobs(index))
        top = zip(order.ids[:num_top].tolist(), order.values[:num_top].tolist(), strict=True)
        return RowLogprobs(chosen, tuple(top))


class MaskedRanking:
    """Some rows of `logits`, ranked again under masks; the host waits for the device once more."""

    def __init__(
        self, logits: Logits, rows: Mapping[int, RowSampling], num_candidates: int = NUM_CANDIDATES
    ) -> None:
        """`rows`: by row number, each with a mask, none edited."""
        numbers = sorted(rows)
        chosen = [rows[number] for number in numbers]
        request = rank_request_of(chosen, logits.num_vocab, num_candidates)
        assert request.masks is not None, "rows without masks"
        masks = Masks(np.array(numbers, np.int64), request.masks.words)
        ranking = logits.rank(replace(request, masks=masks, is_of_masked=True))
        self._ranked = RankedRows(chosen, logits.num_vocab, ranking, ranking.candidates())
        self._places = {number: place for place, number in enumerate(numbers)}

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def choose(self, number: int, position: int) -> int:
        """The token of row `number` at `position`; NO_TOKEN as in RankedRows.choose."""
        return self._ranked.choose(self._places[number], position)[0]
