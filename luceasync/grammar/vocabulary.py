"""A tokenizer as llguidance is told of it: the bytes of each token, and which are no text.

Owns the table. Knows no grammar.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from luceasync.text.tokenizer import Tokenizer

WORD_BITS = 32


class Vocabulary:
    """The tokens of one model. Made when it is first used, for that takes a second where there are
    many; may be asked from any thread.
    """

    def __init__(self, tokenizer: Tokenizer, num_logits: int) -> None:
        """`num_logits`: how many tokens the model's logits are of; the rest may not come."""
        self.tokenizer = tokenizer
        self.num_words = -(-num_logits // WORD_BITS)
        self._num_logits = num_logits
        self._lock = threading.Lock()
        self._made: LLTokenizer | None = None

    @property
    def table(self) -> LLTokenizer:
        """What matchers are made with."""
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end a text. One that no model can write where there are none: something
        has to stand for the end.
        """
        known = sorted(i for i in self.tokenizer.eos_ids if i < self._num_logits)
        return known or [self.num_words * WORD_BITS]

    def _make(self) -> LLTokenizer:
        told = _Told(self.tokenizer, self._num_logits, self.end_ids)
        made = LLTokenizer(told, n_vocab=len(told.tokens), eos_token=self.end_ids)
        told(
            "a"
        )  # the first text takes a second where there are many, for which no engine is to wait
        return made


class _Told(TokenizerWrapper):
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, num_logits: int, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.is_tokenizer_wrapper = True
        self.eos_token_id, self.bos_token_id = end_ids[0], None
        num_tokens = max(-(-num_logits // WORD_BITS) * WORD_BITS, end_ids[-1] + 1)
        self.tokens = [
            tokenizer.token_bytes(i) if i < num_logits else b"" for i in range(num_tokens)
        ]
        silent = {i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)}
        self.special_token_ids = sorted((silent & set(range(num_tokens))) | set(end_ids))
        for i in self.special_token_ids:
            self.tokens[i] = self.tokens[i] or b"<|end|>"

    def __call__(self, text: str) -> list[int]:
        """How the model would write `text`, none of which is a control token."""
        return self._tokenizer.encode(text, special=False)
