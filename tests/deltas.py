"""Deltas as tests write them: text in, a Delta with that piece out."""

from __future__ import annotations

from luceasync.request import Delta, Finish, TextPiece, TokenLogprob


def text_delta(
    index: int,
    text: str,
    token_ids: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprob, ...] = (),
    finish: Finish | None = None,
) -> Delta:
    """A delta whose only piece is `text`; "" is no piece."""
    return Delta(index, (TextPiece(text),) if text else (), token_ids, logprobs, finish)
