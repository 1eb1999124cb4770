"""The state of one answer in a compiled grammar: which tokens may come next, and which have come.

Owns the matcher of llguidance, which it advances and rolls back. Used by one thread at a time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np
from llguidance import LLMatcher

# Messages of llguidance that are unclear without its source, and their replacements.
IN_WORDS = (
    (re.compile(r"\s*<non-verbose/>\s*"), ""),
    (re.compile(r"json-schema:///"), ""),
    (re.compile(r"^(parser error: )?NoExtensionBias.*", re.DOTALL), "nothing is an answer to it"),
    (
        re.compile(r"^(parser error: )?(Too many items|Current row has).*", re.DOTALL | re.I),
        "it can be read in too many ways, or is nested too deep",
    ),
    (re.compile(r"^Unsatisfiable schema: Regex is empty:.*", re.DOTALL), "no text satisfies it"),
    (
        re.compile(r"lookarounds not supported yet; \w+ in"),
        "a boundary or anchor is not supported:",
    ),
    (
        re.compile(r"^Failed to generate regex for \w+ range:.*", re.DOTALL),
        "its range exceeds numbers of 64 bits",
    ),
    (
        re.compile(r"(invalid regex .* \(in regex\): )?regex parse error:.*\nerror: ", re.DOTALL),
        "invalid regex: ",
    ),
    (re.compile(r" \(at \".*\" \(.*\)\)$", re.DOTALL), ""),
    (re.compile(r"; following .*? available:.*", re.DOTALL), ""),
    (re.compile(r"is not present in a registry and .*", re.DOTALL), "is not part of the schema"),
    (re.compile(r"^oneOf constraints are not supported\..*"), "oneOf cannot be enforced"),
    (re.compile(r"^Unimplemented keys: \[(.*)\]"), r"these words cannot be enforced: \1"),
    (re.compile(r"^(lexer error: )?too many expressions.*"), "its expressions are too large"),
    (re.compile(r"^schema too large"), "it is too large with all its references"),
)
WORD_BITS = 32  # tokens in a word of a mask
STOCK_S, TOKEN_S = 0.5, 0.005  # of processor time: see CostLimit
TOO_COSTLY = (
    f"with so many readings it takes more than {TOKEN_S * 1000:g} ms of processor time a token"
)
FIRST_LEVEL, LEVELS_PER_GAP, LOW_LEVEL, MAX_LEVEL = 4, 3, 3, 7  # of a DraftGap


def in_words(error: str) -> str:
    """An error of llguidance in words for clients."""
    for pattern, words in IN_WORDS:
        error = pattern.sub(words, error)
    return error


class DraftGap:
    """How often the drafter failed to propose what the grammar demands, over all answers to one
    program. Decides whether to read its proposals on the host and complete them.

    Keeps a level that each gap raises and each round lowers. It is large after gaps in two of three
    rounds, and before the first round, which shows whether the drafter knows the format.
    """

    def __init__(self) -> None:
        self._level = FIRST_LEVEL

    @property
    def is_large(self) -> bool:
        return self._level > LOW_LEVEL

    def begin(self) -> None:
        """Record that text in another format begins."""
        self._level = max(self._level, FIRST_LEVEL)

    def show(self) -> None:
        """Record that this round has shown a gap."""
        self._level = min(MAX_LEVEL, self._level + LEVELS_PER_GAP)

    def end_round(self) -> None:
        """Count a round."""
        self._level = max(0, self._level - 1)


class CostLimit:
    """Limits the processor time spent on following one answer, which delays all other answers:
    TOKEN_S for each token. Unused time accumulates up to STOCK_S, since the first tokens cost more.
    Time within a `with` block is counted.
    """

    def __init__(self) -> None:
        self._left_s = STOCK_S
        self._begin_s = 0.0

    @property
    def is_exceeded(self) -> bool:
        return self._left_s < 0

    def add(self, num_tokens: int) -> None:
        """Add the time for new tokens. Once exceeded, the limit stays exceeded."""
        if not self.is_exceeded:
            self._left_s = min(STOCK_S, self._left_s + num_tokens * TOKEN_S)

    def __enter__(self) -> None:
        self._begin_s = time.thread_time()

    def __exit__(self, *exc: object) -> None:
        self._left_s -= time.thread_time() - self._begin_s


class Matcher:
    """The matcher of one answer. Once llguidance fails, or its cost exceeds the limit, masks allow
    nothing and `failure` gives the reason.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        num_words: int,
        end_ids: Sequence[int],
        token_bytes: Callable[[int], bytes],
        gap: DraftGap | None = None,
        *,
        is_stepwise: bool = False,
    ) -> None:
        """`num_words` is the size of a mask, which covers as many tokens as there are logits. `gap`
        is shared with other answers to the same program. `is_stepwise`: llguidance can check only
        one token ahead, and cannot roll back.
        """
        self._matcher = matcher
        self._token_bytes = token_bytes
        self.gap = gap or DraftGap()
        self._is_stepwise = is_stepwise
        self._before: list[LLMatcher] = []  # for rolling back, if stepwise
        self._num_words = num_words
        self._end_ids = tuple(end_ids)
        self._ends = frozenset(end_ids)
        self._has_ended = False
        self._cost = CostLimit()
        max_words = max(num_words, -(-(max(end_ids) + 1) // WORD_BITS))
        self._words = np.zeros(max_words, np.int32)
        self._at, self._num_bytes = self._words.ctypes.data, self._words.nbytes

    def copy(self) -> Matcher:
        """A matcher in the same state, for another answer."""
        return Matcher(
            self._matcher.deep_copy(),
            self._num_words,
            self._end_ids,
            self._token_bytes,
            self.gap,
            is_stepwise=self._is_stepwise,
        )

    @property
    def failure(self) -> str | None:
        """Why the matcher cannot continue; None: it can."""
        if self._cost.is_exceeded:
            return TOO_COSTLY
        error = self._matcher.get_error() if self._matcher.is_error() else None
        return None if error is None else in_words(error).partition("\n")[0]

    def warm_up(self) -> None:
        """Compute the first mask in advance: it costs more than any later one."""
        self.mask()

    @property
    def _has_failed(self) -> bool:
        return self._cost.is_exceeded or self._matcher.is_error()

    @property
    def is_over(self) -> bool:
        """Whether only an end token may follow, or has come. False after a failure."""
        return self._has_ended or (self._matcher.is_stopped() and not self._has_failed)

    def mask(self) -> np.ndarray:
        """A copy of the mask of allowed tokens, int32 `[num_words]`."""
        if self._has_failed:
            return np.zeros(self._num_words, np.int32)
        with self._cost:
            self._matcher.unsafe_compute_mask_ptr(self._at, self._num_bytes)
        if self._matcher.is_error():
            self._words.fill(0)
        return self._words[: self._num_words].copy()

    def allows(self, token: int) -> bool:
        """Whether `token` may come next: its bit in the mask, at a hundredth of the cost."""
        if token in self._ends:
            return not self._has_failed and self._matcher.is_accepting()
        return token >= 0 and self.num_allowed([token]) == 1

    def num_allowed(self, tokens: list[int]) -> int:
        """How many of `tokens`, from the first on, are known to be allowed in sequence; none after
        an end token. Changes nothing, at a third of the cost of `advance_all`.
        """
        if self._cost.is_exceeded:
            return 0
        with self._cost:
            return self._matcher.validate_tokens(tokens[:1] if self._is_stepwise else tokens)

    def forced(self) -> list[int]:
        """The tokens of the only text that may come next, as the tokenizer encodes it, if any."""
        if self._cost.is_exceeded:
            return []
        if self._matcher.is_stopped():
            return list(self._end_ids[:1])
        with self._cost:
            return self._matcher.compute_ff_tokens()

    def must_write(self, token: int) -> bool:
        """Whether the only text that may come next begins with the text of `token`."""
        if self._cost.is_exceeded:
            return False
        with self._cost:
            forced = self._matcher.compute_ff_bytes()  # empty in most cases
        return bool(forced) and forced.startswith(self._token_bytes(token))

    def is_end(self, token: int) -> bool:
        """Whether the token ends an answer."""
        return token in self._ends

    def end(self, token: int) -> bool:
        """Consume `token` if it is an end token. Returns whether the answer has ended."""
        self._has_ended |= token in self._ends
        return self._has_ended

    def advance(self, token: int) -> bool:
        """Consume `token`. Returns False, and changes nothing, if it is not allowed or is an end
        token.
        """
        if token in self._ends:
            return False
        before = self._matcher.deep_copy() if self._is_stepwise else None
        is_taken = self._consume([token]) == 1
        if is_taken and before is not None:
            self._before.append(before)
        return is_taken

    def advance_all(self, tokens: list[int]) -> int:
        """Consume `tokens` up to the first that is not allowed or is an end token. Returns their
        number.
        """
        if not self._ends.isdisjoint(tokens):
            tokens = list(takewhile(lambda token: token not in self._ends, tokens))
        if self._is_stepwise:
            return sum(1 for _ in takewhile(self.advance, tokens))
        return self._consume(tokens) if tokens else 0

    def _consume(self, tokens: list[int]) -> int:
        if self._cost.is_exceeded:
            return 0
        with self._cost:
            num_taken: int = self._matcher.try_consume_tokens(tokens)
        self._cost.add(num_taken)
        return num_taken

    def take(self, tokens: list[int]) -> None:
        """Consume `tokens` without the option to roll back. All of them are allowed; the last one
        may be an end token. Sets `failure` if the grammar cannot be followed.
        """
        with self._cost:
            self._matcher.consume_tokens(tokens[:-1] if self.end(tokens[-1]) else tokens)
        self._cost.add(len(tokens))
        self.settle()

    def settle(self) -> None:
        """Drop the information needed to roll back earlier tokens."""
        self._before.clear()

    def roll_back(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` tokens. A failure stays."""
        if self._is_stepwise and num_tokens:
            if self.failure is None:
                self._matcher = self._before[-num_tokens]
            del self._before[-num_tokens:]
        elif num_tokens and not self._matcher.rollback(num_tokens):
            assert self._matcher.is_error(), "more is rolled back than has come"
