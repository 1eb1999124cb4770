"""The tokens that may come next in one answer, and after each row of a proposal.

Owns the state of the answer: in its grammar, in its reasoning, and relative to its minimum length.
Advances made for a proposal are rolled back. Tokens already known to be allowed are entered into
the grammar while the device computes the next step. Independent of logits; used in the engine
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from luceasync.grammar.matcher import WORD_BITS, DraftGap, Matcher
from luceasync.text.answer.pieces import THINK, ReasoningWords

Phase = Literal["perhaps", "open", "closed"]  # of reasoning
Tokens = list[int]
Parents = list[int] | None


class Guide:
    """The constraints on one choice, and the state of its answer in them."""

    def __init__(
        self,
        matcher: Matcher | None,
        reasoning: ReasoningBudget | None,
        num_words: int,
        min_tokens: MinTokens | None = None,
    ) -> None:
        """`matcher` None: any text; `reasoning` None: unlimited; `min_tokens` None: no minimum
        length. `num_words` is the number of words of a mask.
        """
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._matcher = matcher
        self._budgets = [] if reasoning is None else [reasoning]  # after each token not settled yet
        self._num_words = num_words
        self._gap = DraftGap() if matcher is None else matcher.gap
        self._allowed: Tokens = []  # in sequence; none of them has been entered yet
        self._num_come = 0  # how many of these have been generated
        self._is_missed = False  # no row proposed the last of these

    @property
    def failure(self) -> str | None:
        """Why masks allow no token any more; None: they do."""
        failure = None if self._matcher is None else self._matcher.failure
        return failure and f"the grammar of the answer cannot be followed further: {failure}"

    @property
    def is_over(self) -> bool:
        """Whether only an end token may follow, or has come."""
        if self._matcher is None or self._num_come < len(self._allowed):
            return False
        self.catch_up()
        return self._matcher.is_over

    def consume(self, token: int) -> None:
        """Consume `token`, which the last mask allowed."""
        if self._is_next(token):
            self._num_come += 1
            return
        self.catch_up()
        if self._matcher is not None and self._matcher.end(token):
            return
        is_allowed = self._enter(token)
        assert is_allowed or self.failure, "a token that its mask did not allow"
        if self._matcher is not None:
            self._matcher.settle()
        del self._budgets[:-1]
        if self._budgets and self._budgets[0].phase == "closed":
            self._budgets.clear()
            self._gap.begin()

    def consume_all(self, tokens: Tokens) -> None:
        """Consume `tokens` in order."""
        num_come = self._num_come + len(tokens)
        if self._allowed[self._num_come : num_come] == tokens:
            self._num_come = num_come
            return
        for token in tokens:
            self.consume(token)

    def allows(self, token: int) -> bool:
        """Whether `token` may come next: the same as its bit in `mask`, but much cheaper."""
        if self._is_next(token):
            return True
        self.catch_up()
        if self._matcher is not None and self._is_plain and token >= 0:
            self._allowed = [token][: self._matcher.num_allowed([token])]
        return self._is_next(token) or self._may_come(token)

    def _may_come(self, token: int) -> bool:
        if self._is_short:
            mask = self.mask()
            return mask is None or _allows(mask, token)
        forced = self._budgets[-1].forced if self._budgets else ()
        if forced and (self._matcher is None or self._matcher.allows(forced[0])):
            return token == forced[0]
        return token >= 0 and (self._matcher is None or self._matcher.allows(token))

    def mask(self) -> np.ndarray | None:
        """The tokens that may come next, int32 `[words]` as in luceasync.ranking.logits.Masks;
        None: any token.
        """
        self.catch_up()
        mask = self._without_end(None if self._matcher is None else self._matcher.mask())
        forced = self._budgets[-1].forced if self._budgets else ()
        # An incomplete character is finished first, if the grammar requires whole characters.
        if not forced or (mask is not None and not _allows(mask, forced[0])):
            return mask
        alone = np.zeros(self._num_words, np.uint32)
        alone[forced[0] // WORD_BITS] = 1 << (forced[0] % WORD_BITS)
        return alone.view(np.int32)

    @property
    def _is_plain(self) -> bool:
        """Whether the grammar alone decides which tokens are allowed."""
        return self._matcher is not None and not self._budgets and not self._is_short

    @property
    def _is_short(self) -> bool:
        return self._min_tokens is not None and self._num_tokens < self._min_tokens.num_tokens

    def _without_end(self, mask: np.ndarray | None) -> np.ndarray | None:
        """`mask` without the end tokens while the answer is too short, unless the grammar allows no
        others.
        """
        if self._min_tokens is None or not self._is_short:
            return mask
        others = self._min_tokens.others if mask is None else mask & self._min_tokens.others
        return others if others.any() else mask

    # --- proposals -------------------------------------------------------------------------------

    def masks(self, tokens: Tokens, parents: Parents, first: int = 0) -> dict[int, np.ndarray]:
        """By row of a proposal, the mask of the token after it; see luceasync.ranking.proposals.

        The answer so far ends at row `first`: only that row and its descendants have masks. Rows
        that no allowed answer can reach have none, nor do rows after which any token may come.
        """
        below: list[list[int]] = [[] for _ in tokens]
        for row in range(1, len(tokens)):
            below[row - 1 if parents is None else parents[row]].append(row)
        found: dict[int, np.ndarray] = {}

        def walk(row: int) -> None:
            mask = self.mask()
            if mask is not None:
                found[row] = mask
            for child in below[row]:
                is_open = mask is None or _allows(mask, tokens[child])
                if is_open and self._enter(tokens[child]):
                    walk(child)
                    self._leave(1)

        walk(first)
        return found

    @property
    def is_fitting(self) -> bool:
        """Whether the host should wait for proposals and correct them: true while the drafter fails
        to propose tokens that the grammar demands.
        """
        return self._gap.is_large

    def fit(self, tokens: Tokens, parents: Parents, max_rows: int) -> tuple[Tokens, Parents]:
        """Complete the proposal with forced tokens. Where its most probable path ends or is not
        allowed, and only one text may follow, that text replaces other rows. A path has at most
        `max_rows` rows, including the first.
        """
        self.catch_up()
        if parents is None:
            fitted: tuple[Tokens, Parents] = self._fit_chain(tokens[:]), None
        else:
            fitted = self._fit_tree(tokens[:], parents[:], max_rows)
        if fitted != (tokens, parents):
            self._gap.show()
        return fitted

    def _fit_chain(self, tokens: Tokens) -> Tokens:
        num_entered = 0
        while True:
            num_entered += self._enter_all(tokens[num_entered + 1 :])
            forced = self._forced()[: len(tokens) - 1 - num_entered]
            if not forced or forced[0] == tokens[num_entered + 1]:  # end tokens are not entered
                break
            tokens[num_entered + 1 : num_entered + 1 + len(forced)] = forced
        self._leave(num_entered)
        return tokens

    def _fit_tree(
        self, tokens: Tokens, parents: list[int], max_rows: int
    ) -> tuple[Tokens, Parents]:
        """As `fit`, for a tree. The last rows, which are the least probable, are replaced."""
        row = depth = 0
        while depth + 1 < max_rows:
            below = (r for r in range(row + 1, len(tokens)) if parents[r] == row)
            child = next((r for r in below if self._enter_all([tokens[r]])), None)
            if child is None:
                forced = self._forced()[: min(max_rows - 1 - depth, len(tokens) - 1 - row)]
                first = len(tokens) - len(forced)
                tokens[first:] = forced
                parents[first:] = [row, *range(first, len(tokens) - 1)][: len(forced)]
                break
            row, depth = child, depth + 1
        self._leave(depth)
        return tokens, parents

    # --- tokens that are allowed and not entered yet ---------------------------------------------

    def foresee(self, tokens: Tokens, *, is_missed: bool) -> int:
        """How many of a round's tokens need no individual checks: all of them, or those up to an
        end token, if they are allowed; otherwise none. They are checked at once, at a fraction of
        the cost. `is_missed`: no row proposed the last of them.
        """
        self.catch_up()
        self._gap.end_round()
        if self._matcher is None or not self._is_plain:
            return 0
        self._allowed = tokens[: self._matcher.num_allowed(tokens)]
        if len(self._allowed) == len(tokens):
            self._is_missed = is_missed
        elif not (self._allowed and self._matcher.is_end(self._allowed[-1])):
            return 0
        return len(self._allowed)

    def catch_up(self) -> None:
        """Enter the allowed tokens that have been generated, and drop the others. Done on demand,
        but best called while a device computes.
        """
        if not self._allowed:
            return
        come, is_missed = self._allowed[: self._num_come], self._is_missed
        is_missed &= self._num_come == len(self._allowed)
        self._allowed, self._num_come, self._is_missed = [], 0, False
        if is_missed:
            self._take(come[:-1])
            self.missed(come[-1])
            come = come[-1:]
        self._take(come)

    def _is_next(self, token: int) -> bool:
        """Whether `token` is known to be allowed next."""
        return self._num_come < len(self._allowed) and self._allowed[self._num_come] == token

    def _take(self, tokens: Tokens) -> None:
        """Enter tokens that are allowed."""
        if tokens and self._matcher is not None:
            self._matcher.take(tokens)
            self._num_tokens += len(tokens)

    def missed(self, token: int) -> None:
        """Record a gap in the proposals if the grammar demands `token`, the next one: no row
        proposed it, or the model without the constraint would not have generated it.
        """
        closing = self._budgets[-1].forced if self._budgets else ()
        by_grammar = self._matcher is not None and self._matcher.must_write(token)
        if closing[0] == token if closing else by_grammar:
            self._gap.show()

    def _forced(self) -> Tokens:
        """The tokens that must come next, as the tokenizer encodes their text."""
        if self._budgets and (closing := self._budgets[-1].forced):
            return list(closing)
        return [] if self._matcher is None else self._matcher.forced()

    def _enter_all(self, tokens: Tokens) -> int:
        """Enter tokens up to the first that is not allowed. Returns their number."""
        if self._is_plain and self._matcher is not None:
            num_entered = self._matcher.advance_all(tokens)
            self._num_tokens += num_entered
            return num_entered
        for number, token in enumerate(tokens):
            if not (self._may_come(token) and self._enter(token)):
                return number
        return len(tokens)

    def _enter(self, token: int) -> bool:
        """Advance by `token`. Returns False if it is not allowed."""
        if self._matcher is not None and not self._matcher.advance(token):
            return False
        if self._budgets:
            self._budgets.append(self._budgets[-1].after(token))
        self._num_tokens += 1
        return True

    def _leave(self, num_tokens: int) -> None:
        """Undo the last `num_tokens`."""
        self._num_tokens -= num_tokens
        if self._matcher is not None:
            self._matcher.roll_back(num_tokens)
        if self._budgets and num_tokens:
            del self._budgets[-num_tokens:]


class MinTokens(NamedTuple):
    """The number of tokens before which the answer may not end; `others` is the mask of all tokens
    except the end tokens.
    """

    num_tokens: int
    others: np.ndarray

    @classmethod
    def of(cls, num_tokens: int, end_ids: Iterable[int], num_words: int) -> MinTokens:
        """Build the mask; `end_ids` are the tokens that end an answer."""
        others = np.full(num_words, 0xFFFFFFFF, np.uint32)
        for token in end_ids:
            if token < num_words * WORD_BITS:
                others[token // WORD_BITS] &= ~np.uint32(1 << (token % WORD_BITS))
        return cls(num_tokens, others.view(np.int32))


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    """At most `max_tokens` tokens of reasoning between `words`; then `close_ids`, the tokens of its
    end tag, are forced.
    """

    max_tokens: int
    close_ids: tuple[int, ...]
    token_bytes: Callable[[int], bytes]
    words: ReasoningWords = THINK


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """The state of an answer's reasoning, as an immutable value: `num_tokens` of it have come;
    `seen` are the last bytes, in which a tag may have begun; `num_closing` of the forced tokens
    have come.
    """

    limit: ReasoningLimit
    phase: Phase
    num_tokens: int = 0
    seen: bytes = b""
    num_closing: int = 0

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that must come next; none while reasoning may go on."""
        is_spent = self.phase == "open" and self.num_tokens >= self.limit.max_tokens
        return self.limit.close_ids[self.num_closing :] if is_spent else ()

    def after(self, token: int) -> ReasoningBudget:
        """The budget after `token`."""
        if self.phase == "closed":
            return self
        forced = self.forced
        seen = self.seen + self.limit.token_bytes(token)
        if self.phase == "perhaps":
            return self._perhaps(seen)
        close = self.limit.words.end.encode()
        if close in seen:
            return replace(self, phase="closed", seen=b"")
        is_closing = bool(forced) and forced[0] == token
        return replace(
            self,
            num_tokens=self.num_tokens + 1,
            seen=seen[1 - len(close) :],
            num_closing=self.num_closing + 1 if is_closing else 0,
        )

    def _perhaps(self, seen: bytes) -> ReasoningBudget:
        """The budget while reasoning may begin: before any other text, or not at all."""
        text, begin = seen.lstrip(), self.limit.words.begin.encode()
        if text.startswith(begin):
            return replace(self, phase="open", seen=text[len(begin) :])
        phase: Phase = "perhaps" if begin.startswith(text) else "closed"
        return replace(self, phase=phase, seen=seen)


def _allows(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token // WORD_BITS] >> (token % WORD_BITS) & 1)
