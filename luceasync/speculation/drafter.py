"""The ends that speculation works between: drafters, and the target that verifies.

Protocols and what they are told; bodies of a drafter are lookup, mtp and those in dflash/.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from luceasync.cyext.copies import CopyIndex
from luceasync.pipeline.passes import ComingTokens, DeviceRounds, RoundWork, TapRing
from luceasync.ranking.logits import Logits
from luceasync.ranking.proposals import DraftCandidates, Proposal
from luceasync.speculation.choice import Promise, RoundShape


class Target(Protocol):
    """What speculation needs of the target model. luceasync.pipeline.backend.LayerSplitBackend is
    one, and says what each method means.
    """

    def verify(
        self,
        lanes: Sequence[int],
        begins: Sequence[int],
        tokens: Tensor,
        parents: Tensor | None = None,
    ) -> Logits: ...

    def commit(self, paths: Sequence[Sequence[int]]) -> None: ...

    def send_taps(
        self,
        ring: TapRing,
        lanes: Sequence[int],
        begins: Sequence[int],
        paths: Sequence[Sequence[int]],
        num_rows: int,
    ) -> None: ...

    def send_chunk_taps(self, ring: TapRing, lane: int, begin: int, num_tokens: int) -> None: ...

    def embed(self, tokens: Tensor) -> Tensor: ...

    def propose_from(self, rows: Tensor, anchors: Tensor, budget: int | None) -> Proposal: ...

    def candidates_from(self, rows: Tensor, num_candidates: int) -> DraftCandidates: ...

    def device_rounds(self, work: RoundWork, num_lanes: int) -> DeviceRounds | None: ...

    def queue_round(
        self, rounds: DeviceRounds, lanes: Sequence[int], ends: Sequence[int]
    ) -> ComingTokens | None: ...


class LiveText(NamedTuple):
    """A lane's tokens, the last one included, which has not been run; more come during the answer.
    `copies`: an index of their beginning, or of all; only what drafts from it may extend it.
    """

    ids: array[int]
    copies: CopyIndex


@dataclass(frozen=True, slots=True)
class Anchor:
    """The last token of a lane, which has not been run. `text` None: nothing may be copied."""

    lane: int
    position: int
    token: int
    text: LiveText | None = None


class Tapped(TapRing, Protocol):
    """The part of a drafter that is fed with rows of the target, whoever proposes."""

    def reset(self, lane: int, begin: int = 0) -> None:
        """Let the lane go on at position `begin`, without features of earlier positions."""
        ...


class Liveness(Protocol):
    """Whether a drafter is there, wherever it runs."""

    @property
    def num_unsettled(self) -> int:
        """How many passes so far took longer than the next of their kind will, as they compiled or
        captured something: their times say nothing of the cost of a round.
        """
        ...

    @property
    def off_reason(self) -> str | None:
        """Why nothing is proposed now; None: it is. Any thread may ask."""
        ...

    def refresh(self) -> None:
        """Let go of a drafter that is known to be gone, and take up one that has been restarted,
        which has nothing of what lanes did meanwhile.
        """
        ...

    def check_alive(self) -> None:
        """Find out whether it is still there. Call while nothing runs: an answer is waited for."""
        ...


@dataclass(frozen=True, slots=True)
class DraftInRounds:
    """A drafter's part of rounds that need nothing of the host, and what the host tells it of them.

    `begin(lanes, begins)`: a round is queued for lanes of which the host knows where they end.
    `kept(lane, begin, num_tokens, end)`: so many tokens from `begin` on stand; it may have absorbed
    rows of positions up to `end`.
    """

    work: RoundWork
    begin: Callable[[Sequence[int], Sequence[int]], None]
    kept: Callable[[int, int, int, int], None]


class Drafter(Liveness, Protocol):
    """Proposes the rows of rounds. Engine thread only."""

    name: str  # in plans, metrics and shapes
    shapes: tuple[RoundShape, ...]  # of its rounds, largest first
    promises: bool  # what a round will give is known before it; else its record on the lane tells
    tapped: Tapped | None  # None: it needs no rows of the target

    def start(self, lane: int) -> None:
        """Begin another text on the lane, which is empty."""
        ...

    def promise(self, anchor: Anchor) -> Promise | None:
        """What a round for the lane is expected to give; None: nothing, or nothing is known."""
        ...

    def promise_after(self, lane: int) -> Promise | None:
        """The most that `promise` can return for the lane after one more token."""
        ...

    def propose(self, anchors: Sequence[Anchor], shape: RoundShape) -> Proposal:
        """Rows to verify behind each anchor; valid until the next pass. Of any of its shapes, or of
        another drafter's if it promises. Raises DraftFailed if the drafter is gone.
        """
        ...

    def in_rounds(self, shape: RoundShape, end: int) -> DraftInRounds | None:
        """Its part of rounds of this shape on the target's device, for lanes that have up to `end`
        tokens; None: the host takes part in each.
        """
        ...

    def num_proposed(self, lane: int, shape: RoundShape) -> int:
        """How many rows of its last proposal for the lane were more than padding."""
        ...


class DraftPasses(Tapped, Liveness, Protocol):
    """The passes of a drafter with a ring of features, wherever it runs. Engine thread only."""

    def propose(
        self, tokens: Sequence[int], lanes: Sequence[int], begins: Sequence[int], shape: RoundShape
    ) -> Proposal:
        """Rows to verify behind each lane's last token; valid until the next pass. Raises
        DraftFailed if the drafter is gone; all other methods then do nothing.
        """
        ...

    def in_rounds(self, shape: RoundShape, end: int) -> DraftInRounds | None:
        """See Drafter."""
        ...


class BlockDrafter:
    """A Drafter over passes that fill a block from features of the target's layers."""

    promises = False

    def __init__(self, passes: DraftPasses, shapes: Sequence[RoundShape]) -> None:
        """`shapes`: largest first, of one drafter."""
        self.passes = passes
        self.shapes = tuple(shapes)
        self.name = self.shapes[0].drafter
        self.tapped: Tapped | None = passes

    @property
    def num_unsettled(self) -> int:
        return self.passes.num_unsettled

    @property
    def off_reason(self) -> str | None:
        return self.passes.off_reason

    def refresh(self) -> None:
        self.passes.refresh()

    def check_alive(self) -> None:
        self.passes.check_alive()

    def start(self, lane: int) -> None:
        self.passes.reset(lane)

    def promise(self, anchor: Anchor) -> None:
        return None

    def promise_after(self, lane: int) -> None:
        return None

    def propose(self, anchors: Sequence[Anchor], shape: RoundShape) -> Proposal:
        lanes, begins = [a.lane for a in anchors], [a.position for a in anchors]
        return self.passes.propose([a.token for a in anchors], lanes, begins, shape)

    def in_rounds(self, shape: RoundShape, end: int) -> DraftInRounds | None:
        return self.passes.in_rounds(shape, end)

    def num_proposed(self, lane: int, shape: RoundShape) -> int:
        return shape.num_rows - 1
