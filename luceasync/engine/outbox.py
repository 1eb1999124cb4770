"""What is to be told of generations: deltas that are made, and tokens whose text is not made out.

Owns both, whatever fails meanwhile. Text is made out when it is told, since that may be while a
device computes. Knows no lanes and nobody who listens.
"""

from __future__ import annotations

from luceasync.engine.generation import Generation
from luceasync.request import Delta, Residence, Speculation

Emitted = tuple[int, Delta]  # stream id, delta


class Outbox:
    """Everything that goes in comes out once, in order."""

    def __init__(self) -> None:
        self._deltas: list[Emitted] = []
        self._advanced: list[Generation] = []  # they have more to show

    def __bool__(self) -> bool:
        """Whether there may be something to tell."""
        return bool(self._deltas or self._advanced)

    @property
    def has_end(self) -> bool:
        """Whether somebody's last delta is among it."""
        return any(delta.finish for _, delta in self._deltas)

    def advanced(self, generation: Generation) -> None:
        """It has been given tokens, or has ended without a lane: what it shows is told next."""
        self._advanced.append(generation)

    def ended(
        self,
        generation: Generation,
        speculation: Speculation | None,
        residence: Residence | None = None,
    ) -> None:
        """Its last delta says all that it has not shown, what speculation did for it, and what of
        its context was on the devices.
        """
        last = generation.shown(speculation, residence)
        assert last is not None and last.finish is not None
        self._deltas.append((generation.prepared.stream_id, last))
        self._advanced = [g for g in self._advanced if g is not generation]

    def make_out(self) -> None:
        """Make out the text of what has come. Raises what a tokenizer raises; everything but that
        one's text is still told then.
        """
        while self._advanced:
            generation = self._advanced[0]
            delta = generation.shown()
            if delta is not None:
                self._deltas.append((generation.prepared.stream_id, delta))
            del self._advanced[0]

    def leave_unread(self) -> None:
        """Whose text is not made out by now shows it no more: it may be what has failed. Ends are
        told all the same.
        """
        self._advanced = [g for g in self._advanced if g.has_ended]

    def take(self) -> list[Emitted]:
        """All of it, once; see `make_out`."""
        self.make_out()
        taken, self._deltas = self._deltas, []
        return taken
