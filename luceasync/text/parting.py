"""How many of a prompt's tokens it shares with another text, of which the tokens are not known.

Owns the way from characters to tokens. Knows no template.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, takewhile

from luceasync.text.control_tokens import BREAK
from luceasync.text.tokenizer import Tokenizer


class Parting:
    """Of one tokenizer's tokens. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._num_bytes = _TokenLengths(tokenizer)

    def num_tokens(self, text: str, ids: Sequence[int], others: Iterable[str]) -> int:
        """How many of the first `ids`, which spell `text`, all `others` begin with too."""
        shared = text[: min(_num_shared(text, other) for other in others)]
        num_bytes = len(shared.replace(BREAK, "").encode("utf-8", "surrogatepass"))
        ends = accumulate(map(self._num_bytes.__getitem__, ids))
        return sum(1 for _ in takewhile(num_bytes.__ge__, ends))


class _TokenLengths(dict[int, int]):
    """How many bytes each token has, once it was asked for: to look that up takes a while."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> int:
        num_bytes = self[token_id] = len(self._tokenizer.token_bytes(token_id))
        return num_bytes


def _num_shared(text: str, other: str) -> int:
    """How many characters both begin with."""
    least = min(len(text), len(other))
    return bisect_left(range(least), True, key=lambda i: text[: i + 1] != other[: i + 1])
