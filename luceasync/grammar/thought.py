"""How long an answer thinks: tokens of reasoning are counted, and at a limit it is closed.

Owns where reasoning begins and ends in the tokens of an answer. Pure: a thought is a value, and
each token makes another one of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from luceasync.text.answer.pieces import THINK, THINK_END

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
