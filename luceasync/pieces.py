"""What a model says in an answer, by type: its text, its reasoning, its calls of tools.

Owns the words only: luceasync.text makes pieces, API families show them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A part of the answer's text, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """A part of what the model thought before it answered, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A call of the tool `name` begins, the answer's `index`th; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """A part of the arguments of call `index`, never empty; all of them together are a JSON object,
    unless the answer ended before they did.
    """

    index: int
    text: str


Piece = TextPiece | ReasoningPiece | CallPiece | ArgumentsPiece
