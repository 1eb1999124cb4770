"""What of a choice has come and was not sent yet: here ids become text.

Owns tokens, their text and log-probabilities until they are taken. Knows no lane and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from luceasync.request import TokenLogprob
from luceasync.text.detokenizer import Detokenizer

Logprobs = tuple[TokenLogprob, ...]


@dataclass(slots=True)
class Unsent:
    """`unspelled`: those of `ids` whose text is not made out; `scores`: of the prompt's tokens."""

    detokenizer: Detokenizer
    ids: list[int] = field(default_factory=list)
    unspelled: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    _text: str = ""

    @property
    def has_logprobs(self) -> bool:
        return bool(self.logprobs or self.scores)

    def add(self, tokens: Sequence[int]) -> None:
        """They have come; what they spell is made out later."""
        self.ids += tokens
        self.unspelled += tokens

    def spell(self) -> bool:
        """Make out the text of the tokens that have come; whether a stop string has ended it."""
        for token in self.unspelled:
            self._text += self.detokenizer.push(token).text
        self.unspelled.clear()
        return self.detokenizer.stopped

    def end(self, *, is_sound: bool) -> None:
        """Nothing follows, and nothing is held back any more. What is not sound stays unspelled: it
        may be what has failed.
        """
        if not is_sound:
            self.unspelled.clear()
        self.spell()
        self._text += self.detokenizer.flush()

    def take_text(self) -> str:
        """What is known of the text."""
        self.spell()
        text, self._text = self._text, ""
        return text

    def take(self) -> tuple[tuple[int, ...], Logprobs, Logprobs]:
        """Ids, their log-probabilities, and those of the prompt."""
        taken = tuple(self.ids), tuple(self.logprobs), tuple(self.scores)
        for each in (self.ids, self.logprobs, self.scores):
            each.clear()
        return taken
