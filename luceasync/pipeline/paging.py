"""What becomes of lanes' pages around passes: two bodies, for lanes that hold all of their context
and for those that hold a part of it.

Does what the map says: tells stages, has rows saved, recalled and looked at. Chooses nothing.
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
# Makes room for so many bytes of host memory and does it; whether there was room.
Keep = Callable[[Callable[[], object], int], bool]
MakeReady = Callable[[int, int, Sequence[NodeKey]], None]  # of NodesInParts
Ledger = Sequence[tuple[bool, float]]  # of each chunk whether it was here, and what it was worth


def keep_if_room(save: Callable[[], object], num_bytes: int) -> bool:
    """A Keep that makes no room."""
    try:
        save()
    except MemoryError:
        return False
    return True


class ProbeSource(Protocol):
    """Who says what chunks are worth; luceasync.pipeline.passes.Passes says what each means."""

    def start_probe(self, lane: int, num_tokens: int) -> None: ...

    def attention_mass(self, lane: int) -> AttentionMass: ...


class Paging(Protocol):
    """Lanes' pages. Synchronous; engine thread only."""

    @property
    def nodes(self) -> Nodes:
        """What lanes have left behind, under names; lanes' pages follow what is restored."""
        ...

    def make_room(self, lane: int, num_tokens: int) -> None:
        """Pages for the lane's first `num_tokens` tokens. Raises HostMemorySpent."""
        ...

    def have_room(self, lanes: Sequence[int], begins: Sequence[int]) -> bool:
        """Whether nothing has to be done before a step of a row there: no page is to be placed, and
        nothing saved, recalled or looked at. Entries of no lane need nothing.
        """
        ...

    def prefilled(self, lane: int, num_tokens: int) -> None:
        """A prompt's last pass is queued; the lane then stands after so many tokens."""
        ...

    def before_steps(self, lanes: Sequence[int], begins: Sequence[int], num_rows: int) -> None:
        """A step of so many rows on each lane is to be queued, which stand after `begins` tokens.
        Raises HostMemorySpent, of a lane.
        """
        ...

    def reset(self, lane: int) -> None:
        """The lane is empty, and nothing of it stays."""
        ...

    def kept(self, lane: int, node: NodeKey, span: Span) -> None:
        """The node holds what the span has left in the lane."""
        ...

    def probe_with(self, source: ProbeSource) -> None:
        """Have this say what chunks are worth: until then the oldest leave, and none comes back."""
        ...

    def keep_with(self, keep: Keep) -> None:
        """Have this make room in host memory for what no node holds."""
        ...

    @property
    def own_bytes(self) -> int:
        """Host memory that lanes take for what no node holds."""
        ...

    def vacate(self, lane: int) -> None:
        """Nobody needs what is in the lane any more."""
        ...

    def exact_end(self, lane: int, end: int) -> int:
        """How many of the lane's first `end` tokens are what full attention makes of them."""
        ...

    def pin(self, lane: int, spans: Pins) -> None:
        """Have tokens of an empty lane stay on the devices. Raises NoVictim."""
        ...

    def expect(self, lane: int, ledger: Ledger) -> None:
        """What chunks were worth where the lane is to be restored to next."""
        ...

    def ledger(self, lane: int, end: int) -> Ledger | None:
        """That of the lane's first `end` tokens; None where all of them are here."""
        ...

    def told(self, lane: int) -> Residence | None:
        """What there is to be told of a lane; None where all of it is here for good."""
        ...

    @property
    def status(self) -> ResidenceStatus | None:
        """The same of all lanes, since the start; may be read from any thread."""
        ...


class Placer:
    """Tells the stages of changes of pages, in turn."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._epoch = 0

    def __call__(self, events: Sequence[PageEvent]) -> None:
        """Nothing, where there are none."""
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
        self._place = Placer(passes)
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
        """Nothing is to be done."""

    def before_steps(self, lanes: Sequence[int], begins: Sequence[int], num_rows: int) -> None:
        """Nothing is to be done: a lane has pages for what it will hold."""

    def reset(self, lane: int) -> None:
        self._pages.release(lane)
        self._passes.reset(lane)

    def kept(self, lane: int, node: NodeKey, span: Span) -> None:
        """The lane holds it too."""

    def probe_with(self, source: ProbeSource) -> None:
        """Everything stays."""

    def keep_with(self, keep: Keep) -> None:
        """Nothing is kept."""

    @property
    def own_bytes(self) -> int:
        return 0

    def vacate(self, lane: int) -> None:
        """It stays until somebody comes."""

    def exact_end(self, lane: int, end: int) -> int:
        return end

    def pin(self, lane: int, spans: Pins) -> None:
        """Everything stays."""

    def expect(self, lane: int, ledger: Ledger) -> None:
        """Everything is to be here."""

    def ledger(self, lane: int, end: int) -> None:
        return None

    def told(self, lane: int) -> None:
        return None

    @property
    def status(self) -> None:
        return None

    @torch.inference_mode()
    def _make_ready(self, lane: int, num_tokens: int, nodes: Sequence[NodeKey]) -> None:
        self.reset(lane)
        self.make_room(lane, num_tokens)
