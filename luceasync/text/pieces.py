"""The text of one choice becomes typed pieces: what an API family shows of it, and as what.

Owns what a part of the text is. Knows no tokens, no stop strings and no API.
"""

from __future__ import annotations

from typing import Protocol

from luceasync.pieces import Piece, TextPiece


class PieceMaker(Protocol):
    """Parts the growing text of one choice; one maker serves one choice."""

    def make(self, text: str, *, is_last: bool, is_cut: bool = False) -> tuple[Piece, ...]:
        """The pieces that are certain with `text`, which follows what was given before. What may
        yet turn out to be of another type is held back, unless `text` `is_last`. `is_cut`: it is,
        and the model would have said more: a call that has just begun is not told then.
        """
        ...


class PlainText:
    """All of it is the answer's text; nothing is held back."""

    def make(self, text: str, *, is_last: bool, is_cut: bool = False) -> tuple[Piece, ...]:
        """See PieceMaker."""
        return (TextPiece(text),) if text else ()
