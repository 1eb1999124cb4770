"""Pages of lanes around passes: the protocol, and the implementation for lanes that hold their
whole context.

Carries out the decisions of the page map: notifies stages, saves, recalls and probes. Decides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from luceasync.host_cache.nodes import Nodes, NodesInParts, Span
from luceasync.kv.pages import PageEvent, PageMap
from luceasync.models.pass_rows import NO_LANE
from luceasync.nodes import NodeKey
from luceasync.pipeline.passes import AttentionMass, Passes
from luceasync.request import Residence
from luceasync.status import ResidenceStatus

Pins = Sequence[tuple[int, int]]  # spans of tokens [begin, end)
# Frees this many bytes of host memory and calls the function; False if it cannot.
Keep = Callable[[Callable[[], object], int], bool]
MakeReady = Callable[[int, int, Sequence[NodeKey]], None]  # of NodesInParts
Ledger = Sequence[tuple[bool, float]]  # for each chunk: whether it was resident, and its score


def keep_if_room(save: Callable[[], object], num_bytes: int) -> bool:
    """Call `save`; returns False if it runs out of host memory. Does not free any."""
    try:
        save()
    except MemoryError:
        return False
    return True


class ProbeSource(Protocol):
    """Measures how much attention chunks get; see Passes."""

    def start_probe(self, lane: int, num_tokens: int) -> None: ...

    def attention_mass(self, lane: int) -> AttentionMass: ...


class Paging(Protocol):
    """Pages of all lanes. Synchronous; engine thread only."""

    @property
    def nodes(self) -> Nodes:
        """Saved state of lanes by name. Restoring a node also places the lane's pages."""
        ...

    def make_room(self, lane: int, num_tokens: int) -> None:
        """Provide pages for the lane's first `num_tokens` tokens. Raises LaneMemoryExhausted."""
        ...

    def have_room(self, lanes: Sequence[int], begins: Sequence[int]) -> bool:
        """Whether a step of one row at `begins` needs no work first: no page to place, nothing to
        save, recall or probe. Padding entries need nothing.
        """
        ...

    def prefilled(self, lane: int, num_tokens: int) -> None:
        """A prompt's last pass is queued; the lane now has `num_tokens` tokens."""
        ...

    def before_steps(self, lanes: Sequence[int], begins: Sequence[int], num_rows: int) -> None:
        """Prepare lanes that have `begins` tokens for a step of `num_rows` rows each. Raises
        LaneMemoryExhausted for a lane.
        """
        ...

    def reset(self, lane: int) -> None:
        """Empty the lane."""
        ...

    def node_saved(self, lane: int, node: NodeKey, span: Span) -> None:
        """The node holds the lane's tokens of this span."""
        ...

    def probe_with(self, source: ProbeSource) -> None:
        """Set what scores chunks. Without it, the oldest chunks are evicted, and none is
        recalled."""
        ...

    def keep_with(self, keep: Keep) -> None:
        """Set the function that frees host memory for tokens outside all nodes."""
        ...

    @property
    def own_bytes(self) -> int:
        """Host memory that lanes take for tokens outside all nodes."""
        ...

    def vacate(self, lane: int) -> None:
        """The lane's content is no longer needed."""
        ...

    def exact_end(self, lane: int, end: int) -> int:
        """How many of the lane's first `end` tokens equal full attention's."""
        ...

    def pin(self, lane: int, spans: Pins) -> None:
        """Keep tokens of an empty lane on the devices. Raises NoVictim."""
        ...

    def expect_restore(self, lane: int, ledger: Ledger) -> None:
        """Set the scores of the chunks that the lane's next restore places."""
        ...

    def ledger(self, lane: int, end: int) -> Ledger | None:
        """The ledger of the lane's first `end` tokens; None if all are resident."""
        ...

    def residence(self, lane: int) -> Residence | None:
        """What is resident and what moved; None for lanes that are always whole."""
        ...

    @property
    def status(self) -> ResidenceStatus | None:
        """The same for all lanes, since the start. May be called from any thread."""
        ...


class PageEventSender:
    """Sends page events to the stages, numbered."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._epoch = 0

    def __call__(self, events: Sequence[PageEvent]) -> None:
        """Send the events, if there are any."""
        if events:
            self._epoch += 1
            self._passes.place(self._epoch, events)


class WholeLanes:
    """Paging of lanes that have a page for every chunk."""

    def __init__(
        self, pages: PageMap, passes: Passes, nodes: Callable[[MakeReady], NodesInParts]
    ) -> None:
        self._pages = pages
        self._passes = passes
        self._place = PageEventSender(passes)
        self._nodes = nodes(self._make_ready)

    @property
    def nodes(self) -> Nodes:
        return self._nodes

    def make_room(self, lane: int, num_tokens: int) -> None:
        if num_tokens > self._pages.num_tokens(lane):  # nearly every step has room
            self._place(self._pages.extend(lane, num_tokens))

    def have_room(self, lanes: Sequence[int], begins: Sequence[int]) -> bool:
        both = zip(lanes, begins, strict=True)
        return all(lane == NO_LANE or at < self._pages.num_tokens(lane) for lane, at in both)

    def prefilled(self, lane: int, num_tokens: int) -> None:
        """No-op."""

    def before_steps(self, lanes: Sequence[int], begins: Sequence[int], num_rows: int) -> None:
        """No-op: a lane has pages for its whole context."""

    def reset(self, lane: int) -> None:
        self._pages.release(lane)
        self._passes.reset(lane)

    def node_saved(self, lane: int, node: NodeKey, span: Span) -> None:
        """No-op: the lane keeps its pages."""

    def probe_with(self, source: ProbeSource) -> None:
        """No-op: chunks are never evicted."""

    def keep_with(self, keep: Keep) -> None:
        """No-op: chunks are never evicted."""

    @property
    def own_bytes(self) -> int:
        return 0

    def vacate(self, lane: int) -> None:
        """No-op: the content may stay until the lane is used again."""

    def exact_end(self, lane: int, end: int) -> int:
        return end

    def pin(self, lane: int, spans: Pins) -> None:
        """No-op: chunks are never evicted."""

    def expect_restore(self, lane: int, ledger: Ledger) -> None:
        """No-op: all chunks become resident."""

    def ledger(self, lane: int, end: int) -> None:
        return None

    def residence(self, lane: int) -> None:
        return None

    @property
    def status(self) -> None:
        return None

    @torch.inference_mode()
    def _make_ready(self, lane: int, num_tokens: int, nodes: Sequence[NodeKey]) -> None:
        self.reset(lane)
        self.make_room(lane, num_tokens)
