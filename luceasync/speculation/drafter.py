"""The two ends that speculation works between: a drafter, and the target that verifies.

Protocols alone; bodies of a drafter are in dflash/, in this process or in another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from luceasync.pipeline.passes import TapRing
from luceasync.ranking.logits import Logits
from luceasync.ranking.proposals import Proposal
from luceasync.speculation.choice import RoundShape


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


class DraftPasses(TapRing, Protocol):
    """A drafter with its ring of features, wherever it runs. Engine thread only."""

    @property
    def num_unsettled(self) -> int:
        """How many passes so far took longer than the next of their kind will, as they compiled or
        captured something: their times say nothing of the cost of a round.
        """
        ...

    def propose(
        self, tokens: Sequence[int], lanes: Sequence[int], begins: Sequence[int], shape: RoundShape
    ) -> Proposal:
        """Rows to verify behind each lane's last token; valid until the next pass. Raises
        DraftFailed if the drafter is gone; all other methods then do nothing.
        """
        ...

    def reset(self, lane: int, begin: int = 0) -> None:
        """Let the lane go on at position `begin`, without features of earlier positions."""
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
