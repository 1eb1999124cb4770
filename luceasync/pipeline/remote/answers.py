"""What a stage's process answers to the commands of wire.py."""

from __future__ import annotations

from luceasync.ipc.packets import Message, Natural
from luceasync.pipeline.offer import Offer


class Offers(Message, frozen=True):
    """What the devices offer, in the order in which they were named."""

    offers: tuple[Offer, ...]


class CommandFailure(Message, frozen=True):
    """What was asked for cannot be had: the words for the user."""

    words: str


class LoadProgress(Message, frozen=True):
    """So many bytes more of the weights have been read."""

    num_bytes: Natural


class Result(Message, frozen=True):
    """The command is done; its tensors come along."""


class BestTokens(Message, frozen=True):
    """The best token of each row that was to be ranked."""

    tokens: tuple[Natural, ...]


class Scalar(Message, frozen=True):
    """A number that was asked for."""

    value: float


class ExpertCounts(Message, frozen=True):
    """Experts of all passes so far by what became of them, and bytes: see status.ExpertsStatus."""

    hits: Natural
    misses: Natural
    read_through: Natural
    num_bytes: Natural

    @property
    def by_name(self) -> dict[str, int]:
        """As Stage has them."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "read through": self.read_through,
            "bytes": self.num_bytes,
        }


class NodeRoom(Message, frozen=True):
    """Whether there was room for a node, and whether all copies have arrived; if not, they complete
    later under the command's ticket.
    """

    is_there: bool
    have_arrived: bool = True


ANSWERS: tuple[type[Message], ...] = (
    *(Offers, CommandFailure, LoadProgress, Result, BestTokens, Scalar, NodeRoom, ExpertCounts),
)
