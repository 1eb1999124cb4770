"""Where one answer stands in a compiled program: what may come next, and what has come.

Owns the matcher of llguidance, which it advances and takes back. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np
from llguidance import LLMatcher

from luceasync.grammar.vocabulary import WORD_BITS

# How much a drafter lacks of what a grammar says must come: whether to look into its proposals.
# Owns one number, which rises with each round that has shown a lack and falls with every round.


FIRST, SHOWN, LITTLE, MOST = 4, 3, 3, 7


class Lack:
    """Of a drafter, in the answers of one program. Much after two rounds of three that have shown
    it, and before the first round of all, which tells whether the drafter knows the form.
    """

    def __init__(self) -> None:
        self._level = FIRST

    @property
    def is_much(self) -> bool:
        return self._level > LITTLE

    def begin(self) -> None:
        """Another form begins."""
        self._level = max(self._level, FIRST)

    def show(self) -> None:
        """This round has shown it."""
        self._level = min(MOST, self._level + SHOWN)

    def end_round(self) -> None:
        """A round more."""
        self._level = max(0, self._level - 1)


class Matcher:
    """One answer's. What llguidance cannot go on with shows as masks that allow nothing; `failure`
    then says why.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        num_words: int,
        end_ids: Sequence[int],
        spelled: Callable[[int], bytes],
        lack: Lack | None = None,
        *,
        is_stepwise: bool = False,
    ) -> None:
        """`num_words`: of a mask, of as many tokens as there are logits. `spelled`: the bytes of a
        token. `lack`: what a drafter has shown in other answers of the same program.
        `is_stepwise`: llguidance knows only of one token ahead what the program says of it, and
        takes none back.
        """
        self._matcher = matcher
        self._spelled = spelled
        self.lack = lack or Lack()
        self._is_stepwise = is_stepwise
        self._before: list[LLMatcher] = []  # each token that may be taken back, if it is stepwise
        self._num_words = num_words
        self._end_ids = tuple(end_ids)
        self._ends = frozenset(end_ids)
        self._has_ended = False
        most_words = max(num_words, -(-(max(end_ids) + 1) // WORD_BITS))
        self._words = np.zeros(most_words, np.int32)
        self._at, self._num_bytes = self._words.ctypes.data, self._words.nbytes

    def another(self) -> Matcher:
        """One that stands where this one does, for another answer."""
        return Matcher(
            self._matcher.deep_copy(),
            self._num_words,
            self._end_ids,
            self._spelled,
            self.lack,
            is_stepwise=self._is_stepwise,
        )

    @property
    def failure(self) -> str | None:
        """Why there is nothing more to be had from it; None: there is."""
        return self._matcher.get_error().partition("\n")[0] if self._matcher.is_error() else None

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow but the end, or that has come."""
        return self._has_ended or self._matcher.is_stopped()

    def mask(self) -> np.ndarray:
        """The tokens that may come, int32 `[num_words]`; a copy."""
        if self._matcher.is_error():
            return np.zeros(self._num_words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(self._at, self._num_bytes)
        if self._matcher.is_error():
            self._words.fill(0)
        return self._words[: self._num_words].copy()

    def allows(self, token: int) -> bool:
        """Whether `token` may come: what its mask says, for a hundredth of the work."""
        if token in self._ends:
            return not self._matcher.is_error() and self._matcher.is_accepting()
        return token >= 0 and self._matcher.validate_tokens([token]) == 1

    def num_allowed(self, tokens: list[int]) -> int:
        """How many of `tokens`, from the first on, are known to be ones that may come one after the
        other; none after an end. Nothing changes. A third of the work of `advance_all`.
        """
        return self._matcher.validate_tokens(tokens[:1] if self._is_stepwise else tokens)

    def forced(self) -> list[int]:
        """The tokens that would be written next if a model wrote as its tokenizer does, because no
        other text may come; few or none.
        """
        if self._matcher.is_stopped():
            return list(self._end_ids[:1])
        return self._matcher.compute_ff_tokens()

    def must_write(self, token: int) -> bool:
        """Whether nothing else may come next than what `token` spells, by itself or as a part."""
        forced = self._matcher.compute_ff_bytes()  # mostly none
        return bool(forced) and forced.startswith(self._spelled(token))

    def is_end(self, token: int) -> bool:
        """Whether nothing follows it."""
        return token in self._ends

    def end(self, token: int) -> bool:
        """Whether `token`, which has come, is an end."""
        self._has_ended |= token in self._ends
        return self._has_ended

    def advance(self, token: int) -> bool:
        """`token` has come; False, and nothing has changed, where it may not, or is an end."""
        if token in self._ends:
            return False
        before = self._matcher.deep_copy() if self._is_stepwise else None
        has_come: bool = self._matcher.try_consume_tokens([token]) == 1
        if has_come and before is not None:
            self._before.append(before)
        return has_come

    def advance_all(self, tokens: list[int]) -> int:
        """How many of `tokens`, from the first on, may come, and have; an end is none of them."""
        if not self._ends.isdisjoint(tokens):
            tokens = list(takewhile(lambda token: token not in self._ends, tokens))
        if self._is_stepwise:
            return sum(1 for _ in takewhile(self.advance, tokens))
        return self._matcher.try_consume_tokens(tokens) if tokens else 0

    def take(self, tokens: list[int]) -> None:
        """These have come, all of which may; the last one may be an end. What cannot be followed
        shows as `failure`.
        """
        self._matcher.consume_tokens(tokens[:-1] if self.end(tokens[-1]) else tokens)
        self.settle()

    def settle(self) -> None:
        """What has come is not taken back any more."""
        self._before.clear()

    def take_back(self, num_tokens: int) -> None:
        """The last so many have not come; where there is a failure, it stays."""
        if self._is_stepwise and num_tokens:
            if self.failure is None:
                self._matcher = self._before[-num_tokens]
            del self._before[-num_tokens:]
        elif num_tokens and not self._matcher.rollback(num_tokens):
            assert self._matcher.is_error(), "more is taken back than has come"
