"""What tokens may come next in one answer, also below the rows of a proposal.

Owns where the answer stands: in its grammar, in its reasoning, before its least length. What is
walked of a proposal is taken back. Tokens that may come are entered once a device works on what
follows them. Knows no logits; lives in the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from luceasync.grammar.matcher import Lack, Matcher
from luceasync.grammar.vocabulary import WORD_BITS
from luceasync.text.answer.pieces import THINK, THINK_END

# How many tokens an answer has at least: until then, nothing that ends it may come. Owns the
# mask of what may. Pure.


class Least(NamedTuple):
    """How many tokens come before an end may; `others`: the mask of all but the ends."""

    num_tokens: int
    others: np.ndarray

    @classmethod
    def of(cls, num_tokens: int, end_ids: Iterable[int], num_words: int) -> Least:
        """The ends are these tokens."""
        others = np.full(num_words, 0xFFFFFFFF, np.uint32)
        for token in end_ids:
            if token < num_words * WORD_BITS:
                others[token // WORD_BITS] &= ~np.uint32(1 << (token % WORD_BITS))
        return cls(num_tokens, others.view(np.int32))


# How long an answer thinks: tokens of reasoning are counted, and at a limit it is closed. Owns
# where reasoning begins and ends in the tokens of an answer. Pure: a thought is a value, and
# each token makes another one of it.


OPEN, CLOSE = THINK.encode(), THINK_END.encode()

Phase = Literal["perhaps", "open", "closed"]


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `most_tokens` of reasoning; then `close_ids` come, which write its end. `spelled`:
    the bytes of a token.
    """

    most_tokens: int
    close_ids: tuple[int, ...]
    spelled: Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Thought:
    """Where an answer's reasoning stands: it has `num_tokens`; `seen` are the last bytes, in which
    a sign may have begun; `num_closing` of the close have come.
    """

    limit: Limit
    phase: Phase
    num_tokens: int = 0
    seen: bytes = b""
    num_closing: int = 0

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that come next, whatever the model would say; none where it may go on."""
        is_spent = self.phase == "open" and self.num_tokens >= self.limit.most_tokens
        return self.limit.close_ids[self.num_closing :] if is_spent else ()

    def after(self, token: int) -> Thought:
        """What it is once `token` has come."""
        if self.phase == "closed":
            return self
        forced = self.forced
        seen = self.seen + self.limit.spelled(token)
        if self.phase == "perhaps":
            return self._perhaps(seen)
        if CLOSE in seen:
            return replace(self, phase="closed", seen=b"")
        is_closing = bool(forced) and forced[0] == token
        return replace(
            self,
            num_tokens=self.num_tokens + 1,
            seen=seen[1 - len(CLOSE) :],
            num_closing=self.num_closing + 1 if is_closing else 0,
        )

    def _perhaps(self, seen: bytes) -> Thought:
        """An answer opens its reasoning before it says anything else, or has none."""
        said = seen.lstrip()
        if said.startswith(OPEN):
            return replace(self, phase="open", seen=said[len(OPEN) :])
        phase: Phase = "perhaps" if OPEN.startswith(said) else "closed"
        return replace(self, phase=phase, seen=seen)


Tokens = list[int]
Parents = list[int] | None


class Guide:
    """One choice's."""

    def __init__(
        self,
        matcher: Matcher | None,
        thought: Thought | None,
        num_words: int,
        least: Least | None = None,
    ) -> None:
        """`matcher` None: any text; `thought` None: as long as it takes; `least` None: it may
        end at once. `num_words`: of a mask.
        """
        self._least = least
        self._num_tokens = 0
        self._matcher = matcher
        self._thoughts = [] if thought is None else [thought]  # the last one is where it stands
        self._num_words = num_words
        self._lack = Lack() if matcher is None else matcher.lack
        self._sure: Tokens = []  # may come, one after the other; none of them is entered yet
        self._num_come = 0  # of these
        self._is_missed = False  # no row proposed the last of these

    @property
    def failure(self) -> str | None:
        """Why masks allow nothing any more; None: they do."""
        failure = None if self._matcher is None else self._matcher.failure
        return failure and f"the grammar of the answer cannot be followed further: {failure}"

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow but an end, or that has come."""
        if self._matcher is None or self._num_come < len(self._sure):
            return False
        self.catch_up()
        return self._matcher.is_over

    def consume(self, token: int) -> None:
        """`token` has come, which the last mask allowed."""
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
        del self._thoughts[:-1]
        if self._thoughts and self._thoughts[0].phase == "closed":
            self._thoughts.clear()
            self._lack.begin()

    def consume_all(self, tokens: Tokens) -> None:
        """`tokens` have come, one after the other."""
        num_come = self._num_come + len(tokens)
        if self._sure[self._num_come : num_come] == tokens:
            self._num_come = num_come
            return
        for token in tokens:
            self.consume(token)

    def allows(self, token: int) -> bool:
        """Whether `token` may come next: what `mask` says, for a fraction of the work."""
        if self._is_next(token):
            return True
        self.catch_up()
        if self._matcher is not None and self._is_plain and token >= 0:
            self._sure = [token][: self._matcher.num_allowed([token])]
        return self._is_next(token) or self._may_come(token)

    def _may_come(self, token: int) -> bool:
        if self._is_short:
            mask = self.mask()
            return mask is None or _allows(mask, token)
        forced = self._thoughts[-1].forced if self._thoughts else ()
        if forced and (self._matcher is None or self._matcher.allows(forced[0])):
            return token == forced[0]
        return token >= 0 and (self._matcher is None or self._matcher.allows(token))

    def mask(self) -> np.ndarray | None:
        """The tokens that may come next, int32 `[words]` as in luceasync.ranking.logits.Masks;
        None: any.
        """
        self.catch_up()
        mask = self._without_end(None if self._matcher is None else self._matcher.mask())
        forced = self._thoughts[-1].forced if self._thoughts else ()
        # A character that is not whole is finished first, where the grammar wants whole ones.
        if not forced or (mask is not None and not _allows(mask, forced[0])):
            return mask
        alone = np.zeros(self._num_words, np.uint32)
        alone[forced[0] // WORD_BITS] = 1 << (forced[0] % WORD_BITS)
        return alone.view(np.int32)

    @property
    def _is_plain(self) -> bool:
        """Whether the grammar alone says what may come."""
        return self._matcher is not None and not self._thoughts and not self._is_short

    @property
    def _is_short(self) -> bool:
        return self._least is not None and self._num_tokens < self._least.num_tokens

    def _without_end(self, mask: np.ndarray | None) -> np.ndarray | None:
        """The mask, as long as the answer has too few tokens without those that end it; a grammar
        after which nothing else can come ends it all the same.
        """
        if self._least is None or not self._is_short:
            return mask
        others = self._least.others if mask is None else mask & self._least.others
        return others if others.any() else mask

    # --- proposals -------------------------------------------------------------------------------

    def masks(self, tokens: Tokens, parents: Parents, first: int = 0) -> dict[int, np.ndarray]:
        """By row of a proposal, the mask of the token after it; see luceasync.ranking.proposals.
        The answer stands at row `first`; only the rows below have one. Rows to which no answer
        comes have none, nor those after which any token may come.
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
        """Whether it is worth while to wait for proposals on the host, and to fit them: as long as
        a drafter lately lacked what must come.
        """
        return self._lack.is_much

    def fit(self, tokens: Tokens, parents: Parents, most_rows: int) -> tuple[Tokens, Parents]:
        """The proposal with what must come at any rate: where its most probable path ends or goes
        astray and nothing else may be written, those tokens take the place of others. A path has at
        most `most_rows` rows, the first included.
        """
        self.catch_up()
        if parents is None:
            fitted: tuple[Tokens, Parents] = self._fit_chain(tokens[:]), None
        else:
            fitted = self._fit_tree(tokens[:], parents[:], most_rows)
        if fitted != (tokens, parents):
            self._lack.show()
        return fitted

    def _fit_chain(self, tokens: Tokens) -> Tokens:
        num_entered = 0
        while True:
            num_entered += self._enter_all(tokens[num_entered + 1 :])
            forced = self._forced()[: len(tokens) - 1 - num_entered]
            if not forced or forced[0] == tokens[num_entered + 1]:  # an end is not entered
                break
            tokens[num_entered + 1 : num_entered + 1 + len(forced)] = forced
        self._leave(num_entered)
        return tokens

    def _fit_tree(
        self, tokens: Tokens, parents: list[int], most_rows: int
    ) -> tuple[Tokens, Parents]:
        """The least probable rows, which come last, give their places."""
        row = depth = 0
        while depth + 1 < most_rows:
            below = (r for r in range(row + 1, len(tokens)) if parents[r] == row)
            child = next((r for r in below if self._enter_all([tokens[r]])), None)
            if child is None:
                forced = self._forced()[: min(most_rows - 1 - depth, len(tokens) - 1 - row)]
                first = len(tokens) - len(forced)
                tokens[first:] = forced
                parents[first:] = [row, *range(first, len(tokens) - 1)][: len(forced)]
                break
            row, depth = child, depth + 1
        self._leave(depth)
        return tokens, parents

    # --- what will probably come -----------------------------------------------------------------

    def foresee(self, tokens: Tokens, *, is_missed: bool) -> int:
        """How many of a round's tokens need not be asked for one by one: all of them, or those up
        to an end, if they may come; else none. They are known in one go, for a fraction of the
        work. `is_missed`: no row proposed the last of them.
        """
        self.catch_up()
        self._lack.end_round()
        if self._matcher is None or not self._is_plain:
            return 0
        self._sure = tokens[: self._matcher.num_allowed(tokens)]
        if len(self._sure) == len(tokens):
            self._is_missed = is_missed
        elif not (self._sure and self._matcher.is_end(self._sure[-1])):
            return 0
        return len(self._sure)

    def catch_up(self) -> None:
        """Enter what has come since the last time; of what has not nothing is sure any more. It is
        done anyway before it is needed: best is while a device works.
        """
        if not self._sure:
            return
        come, is_missed = self._sure[: self._num_come], self._is_missed
        is_missed &= self._num_come == len(self._sure)
        self._sure, self._num_come, self._is_missed = [], 0, False
        if is_missed:
            self._take(come[:-1])
            self.missed(come[-1])
            come = come[-1:]
        self._take(come)

    def _is_next(self, token: int) -> bool:
        """Whether it is known that `token` may come next."""
        return self._num_come < len(self._sure) and self._sure[self._num_come] == token

    def _take(self, tokens: Tokens) -> None:
        """They have come, and may."""
        if tokens and self._matcher is not None:
            self._matcher.take(tokens)
            self._num_tokens += len(tokens)

    def missed(self, token: int) -> None:
        """No row proposed `token`, which comes next, or the model itself would not have said it."""
        closing = self._thoughts[-1].forced if self._thoughts else ()
        by_grammar = self._matcher is not None and self._matcher.must_write(token)
        if closing[0] == token if closing else by_grammar:
            self._lack.show()

    def _forced(self) -> Tokens:
        """What comes next at any rate, as the tokenizer writes it."""
        if self._thoughts and (closing := self._thoughts[-1].forced):
            return list(closing)
        return [] if self._matcher is None else self._matcher.forced()

    def _enter_all(self, tokens: Tokens) -> int:
        """Enter as many of them as may come, one after the other."""
        if self._is_plain and self._matcher is not None:
            num_entered = self._matcher.advance_all(tokens)
            self._num_tokens += num_entered
            return num_entered
        for number, token in enumerate(tokens):
            if not (self._may_come(token) and self._enter(token)):
                return number
        return len(tokens)

    def _enter(self, token: int) -> bool:
        """Go on as if `token` had come; whether it may."""
        if self._matcher is not None and not self._matcher.advance(token):
            return False
        if self._thoughts:
            self._thoughts.append(self._thoughts[-1].after(token))
        self._num_tokens += 1
        return True

    def _leave(self, num_tokens: int) -> None:
        """The last so many have not come."""
        self._num_tokens -= num_tokens
        if self._matcher is not None:
            self._matcher.take_back(num_tokens)
        if self._thoughts and num_tokens:
            del self._thoughts[-num_tokens:]


def _allows(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token // WORD_BITS] >> (token % WORD_BITS) & 1)
