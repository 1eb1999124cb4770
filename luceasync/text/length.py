"""Whether a text is too long for the context, said before much work is done for it.

Owns the refusal. Knows no chat and no history.
"""

from __future__ import annotations

from luceasync.errors import ContextLengthError
from luceasync.text.tokenizer import Tokenizer


def refuse_too_long(tokenizer: Tokenizer, text: str, most: int, param: str) -> None:
    """Raise ContextLengthError where `text` certainly has more than `most` tokens. That a text is
    let through says nothing: it may still have more.
    """
    num_least = tokenizer.least_tokens(text, most)
    if num_least > most:
        raise ContextLengthError(most, num_least, param, is_least=True)
