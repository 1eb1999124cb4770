"""Which tokens of a verified proposal each choice accepts.

Every visited row gets the token that plain decoding would have chosen there: the same edits, and
the same draw for its position. Tokens of guided choices are checked once they are known, all tokens
of a round at once: most are allowed and need no mask. Does not know lanes or the drafter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from luceasync.engine.sampling.choose import MaskedRanking, RankedRows, is_checked, nothing, rank
from luceasync.engine.sampling.row import RowLogprobs, RowSampling, has_penalties
from luceasync.engine.sequence import Generation
from luceasync.grammar.guide import Guide, Parents, Tokens
from luceasync.pipeline.transfer import on_host
from luceasync.ranking.logits import NO_TOKEN, Logits
from luceasync.ranking.proposals import Proposal

NO_NUMBERS = "the logits, with the penalties and biases of the request, are not finite numbers"
ProposalRows = tuple[list[int], list[int] | None]  # tokens and parents of an entry's rows


def permitted(
    generations: Sequence[Generation],
    rows: Sequence[RowSampling],
    ranked: RankedRows,
    logits: Logits,
) -> list[tuple[int, RowLogprobs | None]]:
    """The token of each of `rows`, the rows of `logits`, that its guide allows. Waits for the
    device a second time if the candidates do not decide a token."""
    chosen: dict[int, tuple[int, RowLogprobs | None]] = {}
    masked = {}
    for i, (generation, row) in enumerate(zip(generations, rows, strict=True)):
        guide = generation.guide
        if guide is None or not is_checked(row):
            chosen[i] = ranked.choose(i, row.position)
            continue
        token = _unmasked(guide, ranked, i, row.position)
        if token is None:
            token = _from_candidates(guide, ranked, i, row.position)
        if token is None:
            masked[i] = replace(row, mask=guide.mask())
        else:
            chosen[i] = token, None
    if masked:
        ranking = MaskedRanking(logits, masked)
        chosen |= {i: (ranking.choose(i, row.position), None) for i, row in masked.items()}
    return [chosen[i] for i in range(len(rows))]


def _unmasked(guide: Guide, ranked: RankedRows, index: int, position: int) -> int | None:
    """The token of row `index` if it is unaffected by masking other tokens, and allowed. Tried
    before any mask: a mask may leave a single spelling of a forced text, while `allows` accepts
    every spelling."""
    token = ranked.unmasked(index, position)
    return token if token != NO_TOKEN and guide.allows(token) else None


def _from_candidates(guide: Guide, ranked: RankedRows, index: int, position: int) -> int | None:
    """The token of a row under the mask of its guide; None if the candidates do not decide it."""
    mask = guide.mask()
    if mask is None:
        return ranked.choose(index, position)[0]
    return ranked.masked(index, position, mask)


def catch_up(generations: Sequence[Generation]) -> None:
    """Advance the guides over the newest tokens while the devices work."""
    for generation in generations:
        if generation.guide is not None:
            generation.guide.catch_up()


class RowChecker:
    """Chooses the tokens of one guided entry of a proposal, row by row along its path. From the
    first row whose candidates do not decide, all rows below are masked at once, so that the host
    waits for the device once more rather than once per row."""

    def __init__(
        self,
        guide: Guide,
        row: RowSampling,
        logits: Logits,
        ranked: RankedRows,
        first: int,
        tokens: Tokens,
        parents: Parents,
    ) -> None:
        """`row`: how each token is chosen; `first`: the number of the entry's first row in `logits`
        and in `ranked`, which has no masks.
        """
        self._guide = guide
        self._row = row
        self._logits = logits
        self._ranked = ranked
        self._first = first
        self._tokens, self._parents = tokens, parents
        self._masked_rows: MaskedRanking | None = None

    def num_at_once(self, path: Sequence[int], said: Tokens) -> int:
        """How many of the tokens in `said`, chosen by the first rows of `path` and unaffected by
        masks, need no check row by row: all, or those up to an end token, if they are allowed;
        otherwise none."""
        is_missed = len(said) == len(path) and self._has_below(path[-1])
        return self._guide.foresee(said, is_missed=is_missed)

    def choose(self, row: int, position: int) -> int:
        """The token that follows row `row` at `position`, under the guide; NO_TOKEN if there is
        none."""
        number = self._first + row
        token = _unmasked(self._guide, self._ranked, number, position)
        if token is None and (self._masked_rows is None or number not in self._masked_rows):
            token = _from_candidates(self._guide, self._ranked, number, position)
        if token is None:
            token = self._masked(row).choose(number, position)
        proposed = self._proposed(row)
        if proposed and token not in proposed:
            self._guide.missed(token)
        return token

    def _masked(self, row: int) -> MaskedRanking:
        """This row and those below it, ranked under masks."""
        if self._masked_rows is None or self._first + row not in self._masked_rows:
            masks = self._guide.masks(self._tokens, self._parents, row)
            rows = {
                self._first + below: replace(self._row, mask=mask) for below, mask in masks.items()
            }
            self._masked_rows = MaskedRanking(self._logits, rows)
        return self._masked_rows

    def _has_below(self, row: int) -> bool:
        return row + 1 < len(self._tokens) if self._parents is None else row in self._parents

    def _proposed(self, row: int) -> list[int]:
        """The tokens of the rows right below."""
        if self._parents is None:
            return self._tokens[row + 1 : row + 2]
        pairs = zip(self._tokens, self._parents, strict=True)
        return [token for token, parent in pairs if parent == row]


# A walk from the anchor down a proposal's tree.
Follow = Callable[[int], int | None]


def matching_child(
    tokens: Sequence[int], parents: Sequence[int] | None, path: Sequence[int], token: int
) -> int | None:
    """The child of the last row of `path` that proposes `token`, or None.

    `parents` None: every row follows the one before it.
    """
    row = path[-1]
    if parents is None:
        return row + 1 if row + 1 < len(tokens) and tokens[row + 1] == token else None
    below = range(row + 1, len(tokens))
    return next((r for r in below if parents[r] == row and tokens[r] == token), None)


Decide = Callable[[Sequence[int], Sequence[int] | None, Sequence[int], int], int | None]


def walk(
    tokens: Sequence[int],
    parents: Sequence[int] | None,
    follow: Follow,
    decide: Decide = matching_child,
) -> list[int]:
    """The accepted rows, row 0 first. There are as many rows as emitted tokens: the last token has
    not been run, whether or not a row proposed it.

    `follow(row)` chooses and emits the token after a row, once for each row of the path; None ends
    the text. `decide` finds the row, if any, that proposes this token; only benchmarks replace it.
    """
    path = [0]
    while True:
        token = follow(path[-1])
        row = None if token is None else decide(tokens, parents, path, token)
        if row is None:
            return path
        path.append(row)


def lines(parents: Sequence[int] | None, num_rows: int) -> list[list[int]]:
    """For each row, the rows from the anchor's child down to itself; none for row 0."""
    above = range(-1, num_rows - 1) if parents is None else parents
    found: list[list[int]] = [[]]
    for row in range(1, num_rows):
        found.append([*found[above[row]], row])
    return found


class Acceptance:
    """One round's acceptance for `generations`, the entries of the proposal in order.

    The call gives each generation its tokens and sets `arrived_at`, the time at which the rows
    were on the host (time.perf_counter).
    """

    def __init__(
        self,
        generations: Sequence[Generation],
        decide: Decide = matching_child,
        meanwhile: Callable[[], None] = nothing,
    ) -> None:
        """`decide`: see speculator.walk; `meanwhile`: see engine.sampling.choose.rank."""
        self.arrived_at = 0.0
        self._generations = generations
        self._decide = decide
        self._meanwhile = meanwhile
        self._known: list[ProposalRows] | None = None  # the proposal, if the host knows it already
        self._wanted = [g.next_row for g in generations]  # of row 0; others have later positions
        self._are_checked = [is_checked(row) for row in self._wanted]

    def fit(self, proposal: Proposal, max_rows: int) -> Proposal:
        """Fit the proposal to the guides; see speculator.Accept. The host waits for the draft if
        that is worthwhile for a guided answer, or if masks need the proposal anyway."""
        fitting = [
            g.guide if g.guide is not None and (g.guide.is_fitting or not checked) else None
            for g, checked in zip(self._generations, self._are_checked, strict=True)
        ]
        if not any(fitting):
            return proposal
        given = _rows_of(proposal)
        self._known = [
            rows if guide is None else guide.fit(*rows, max_rows)
            for guide, rows in zip(fitting, given, strict=True)
        ]
        return proposal if self._known == given else _proposal_of(self._known, proposal)

    def __call__(self, proposal: Proposal, logits: Logits) -> list[list[int]]:
        """The accepted path of each entry. logits: of [entries, rows].

        The host waits for the device once; twice if a choice has penalties and `fit` has not
        waited, since the edits of a row then depend on the proposed tokens above it.
        """
        rows = self._rows(proposal)
        ranked = rank(logits, rows, proposal=proposal, meanwhile=self._while_verifying)
        self.arrived_at = time.perf_counter()
        entries = ranked.proposal.reshape(*proposal.tokens.shape, -1).tolist()
        return [self._walk(i, logits, ranked, entry) for i, entry in enumerate(entries)]

    def _while_verifying(self) -> None:
        """Called once everything is queued: guides catch up, and `meanwhile` runs."""
        catch_up(self._generations)
        self._meanwhile()

    def _rows(self, proposal: Proposal) -> list[RowSampling]:
        """How each row's token is chosen, except for its position, which is known when it is
        visited."""
        num_rows = proposal.tokens.shape[1]
        wanted = self._wanted
        pairs = zip(self._generations, self._are_checked, strict=True)
        guides = [None if checked else g.guide for g, checked in pairs]
        if not any(guides) and not any(has_penalties(row.sampling) for row in wanted):
            return [row for row in wanted for _ in range(num_rows)]
        rows = []
        known = self._known or _rows_of(proposal)
        for guide, row, (tokens, parents) in zip(guides, wanted, known, strict=True):
            masks = {} if guide is None else guide.masks(tokens, parents)
            for i, line in enumerate(lines(parents, num_rows)):
                following = () if row.counts is None else tuple(tokens[above] for above in line)
                rows.append(replace(row, following=following, mask=masks.get(i)))
        return rows

    def _walk(
        self, index: int, logits: Logits, ranked: RankedRows, entry: list[list[int]]
    ) -> list[int]:
        """The entry's accepted path; its tokens are appended to the generation."""
        generation = self._generations[index]
        tokens, parents = _columns(entry)
        first, guide = index * len(tokens), generation.guide
        checking: RowChecker | None = None
        known: dict[int, int] = {}  # by row, tokens that are appended in one go
        if self._are_checked[index]:
            path, said = self._said(index, ranked, tokens, parents)
            num_unmasked = num_known = said.index(NO_TOKEN) if NO_TOKEN in said else len(said)
            if guide is not None:
                row = self._wanted[index]
                checking = RowChecker(guide, row, logits, ranked, first, tokens, parents)
                num_known = checking.num_at_once(path, said[:num_unmasked])
            if num_known:
                num_come = generation.extend(said[:num_known])
                if num_come < num_unmasked or num_come == len(path) or generation.has_ended:
                    return path[:num_come]
                known = dict(zip(path, said[:num_known], strict=False))

        def follow(row: int) -> int | None:
            if row in known:
                return known[row]
            logprobs = None
            if checking is None:
                token, logprobs = ranked.choose(first + row, generation.position + 1)
            else:
                token = checking.choose(row, generation.position + 1)
            if token == NO_TOKEN:
                end_without_token(generation)
                return None
            return token if generation.append(token, logprobs) else None

        return walk(tokens, parents, follow, self._decide)

    def _said(
        self, index: int, ranked: RankedRows, tokens: list[int], parents: list[int] | None
    ) -> tuple[list[int], list[int]]:
        """The entry's path through the tokens that its rows choose without a mask, and these
        tokens; NO_TOKEN where a mask might change a token."""
        generation = self._generations[index]
        first, position = index * len(tokens), generation.position + 1
        said: list[int] = []

        def follow(row: int) -> int:
            at = first + row, position + len(said)
            is_free = generation.guide is None
            said.append(ranked.choose(*at)[0] if is_free else ranked.unmasked(*at))
            return said[-1]

        return walk(tokens, parents, follow, self._decide), said


def end_without_token(generation: Generation) -> None:
    """End a generation for which no token could be chosen, with the reason."""
    guide = generation.guide
    if guide is not None and guide.failure is not None:
        generation.end("error", guide.failure, "request")
    else:
        generation.end("error", NO_NUMBERS)


def take_best(generation: Generation, tokens: list[int]) -> int:
    """Give the generation best tokens that the device has accepted, up to its end. Returns how many
    rows stay valid: the anchor's, and one for each accepted token but the last."""
    has_all = tokens[-1] != NO_TOKEN
    known = tokens if has_all else tokens[:-1]
    num_taken = generation.extend(known) if known else 0
    if not has_all and not generation.has_ended:
        end_without_token(generation)
    return max(1, num_taken)


def _columns(entry: Sequence[Sequence[int]]) -> ProposalRows:
    """Split an entry's rows [rows, 1 or 2] into tokens and parents."""
    tokens = [row[0] for row in entry]
    return tokens, [row[1] for row in entry] if len(entry[0]) == 2 else None


def _rows_of(proposal: Proposal) -> list[ProposalRows]:
    """Tokens and parents of every entry; waits for the draft."""
    tokens = proposal.tokens.tolist()
    parents = [None] * len(tokens) if proposal.parents is None else proposal.parents.tolist()
    return list(zip(tokens, parents, strict=True))


def _proposal_of(rows: Sequence[ProposalRows], like: Proposal) -> Proposal:
    """A proposal of these rows on the device of `like`."""
    tokens = on_host([tokens for tokens, _ in rows], np.int64)
    parents = like.parents
    if parents is not None:
        held = on_host([above for _, above in rows if above is not None], np.int32)
        parents = held.to(parents.device, parents.dtype, non_blocking=True)
    return Proposal(tokens.to(like.tokens.device, like.tokens.dtype, non_blocking=True), parents)
