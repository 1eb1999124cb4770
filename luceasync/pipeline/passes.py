"""Forward passes over layers, and chains of them, in which each part's output is the next one's
input.

The parts of a chain are the shards of a stage or the stages of a model; a chain is itself Passes.
Does not know devices or nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from luceasync.kv.pages import PageEvent
from luceasync.models.pass_rows import NO_LANE
from luceasync.ranking.logits import Logits
from luceasync.ranking.proposals import DraftCandidates, Proposal

StepKind = Literal["decode", "verify"]
MAX_STOPS = 8  # tokens that end a text
PassInput = Tensor | Sequence[int]  # an activation, or one token for each entry


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one forward pass: entry i runs positions `[begins[i], begins[i] + num_rows)` of
    lane `lanes[i]`; NO_LANE entries are padding.

    `mark`, of a prefill chunk: set the lane's recurrent state aside after this many rows, for a
    save before the next pass. `scores`, of a prefill chunk: keep the logits of all rows until the
    next pass.
    """

    lanes: tuple[int, ...]
    begins: tuple[int, ...]
    num_rows: int
    mark: int | None = None
    scores: bool = False


def positions_after_step(lanes: Sequence[int], begins: Sequence[int]) -> tuple[int, ...]:
    """`begins` after a step of one row each; padding entries do not move."""
    both = zip(lanes, begins, strict=True)
    return tuple(begin + (lane != NO_LANE) for lane, begin in both)


@dataclass(frozen=True, slots=True)
class AttentionMass:
    """The result of a probe. `of_chunks`: float32 [chunks] on the host, each chunk's largest share
    of a query's attention, summed over heads and layers. `seconds`: device time it took.
    """

    of_chunks: Tensor
    seconds: float


@dataclass(frozen=True, slots=True)
class RoundWork:
    """A drafter's part of a DeviceRounds, on the one device of the target: functions of tensors
    that never wait. `num_rows`: of each entry.

    `propose(anchors, lanes, begins)` returns chains, int64 [entries, num_rows], the anchor first.
    `absorb(taps, proposed, lanes, begins, counts, rows)` takes the first `counts` of `rows`, int32
    [entries, num_rows], of each tap [entries, num_rows, hidden] and of the chains. All others are
    [entries]: anchors int64, the rest int32; a lane below 0 is padding.
    """

    num_rows: int
    propose: Callable[[Tensor, Tensor, Tensor], Tensor]
    absorb: Callable[[Sequence[Tensor], Tensor, Tensor, Tensor, Tensor, Tensor], None]


class LaneText(NamedTuple):
    """The text on a lane that has `begin` tokens. Its newest token, `anchor`, has not been run; it
    ends after `num_left` more tokens, or with one of at most MAX_STOPS `stops`.
    """

    lane: int
    begin: int
    anchor: int
    num_left: int
    stops: tuple[int, ...]


class ComingTokens(Protocol):
    """The tokens of a queued round, on their way to the host."""

    def fetch(self) -> list[list[int]]:
        """The tokens that each entry gets, none for padding; NO_TOKEN, as the last one, if a row
        has none. Waits for the round, but for nothing queued after it. Call it before the round
        after the next one is queued."""
        ...


class DeviceRounds(Protocol):
    """Rounds of speculation in which the device accepts the best tokens, so that one can be queued
    before the host has read the last one. For a number of entries, padding included.
    """

    def start(self, texts: Sequence[LaneText]) -> None:
        """Begin at the ends of these texts. Nothing else may change their lanes until the last
        round is queued."""
        ...

    def queue(self) -> ComingTokens:
        """Queue a round from where the last one ends. Pages must be placed for all of its rows. A
        lane whose text has ended is padding from then on."""
        ...


class Passes(Protocol):
    """Passes over layers `[begin, end)`, in whichever process these are. Synchronous; engine thread
    only."""

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        """Run many rows of one lane. `given`: tokens int64 [1, rows] for the first layer, otherwise
        the activation [1, rows, hidden]. Returns the activation; after the last layer, the last
        row's logits float32 [1, 1, vocab] if `project`, otherwise None."""
        ...

    def decode(self, batch: Batch, given: PassInput) -> Tensor | None:
        """Run one row of each entry. `given`: tokens for the first layer, as numbers because the
        device may hold them already; otherwise the activation [entries, 1, hidden]. Returns the
        activation; None after the last layer, whose logits stay on its device: see `logits`."""
        ...

    def run_ahead(self, batch: Batch) -> None:
        """Start the decode of `batch` before it is requested, if that needs nothing from the host.

        Its lanes are those of the last pass, which was a decode; its tokens are the best tokens of
        that pass. Of the last pass, only best tokens whose ranking was requested remain valid. The
        pages must be placed. If another pass comes instead, the lanes are unchanged.
        """
        ...

    def verify(self, batch: Batch, given: Tensor, parents: Tensor | None) -> Tensor | None:
        """Run a tree of rows after the end of each lane, without writing anything permanent. Input
        and output as for `decode`.

        `parents`: int32 [entries, rows] as in models.trees, on any device; None: every row follows
        the one before it.
        """
        ...

    def logits(self, num_entries: int) -> Logits:
        """Logits of the last pass's first entries, from the last layer: float32 [entries, vocab]
        after a decode, [entries, rows, vocab] after a verify, [rows, vocab] after a prefill chunk
        that scores. Valid until the next pass.
        """
        ...

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the rows of each entry's path of the last `verify`, none if the path is empty. Their
        pages must be placed.
        """
        ...

    def taps(self, paths: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """Rows after each tapped layer in the last pass, on the layer's device: [entries, rows,
        hidden]. Only rows in `paths[i]` of entry i are defined, so others need not be copied. After
        a prefill chunk more rows may follow.
        """
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up tokens in the first layer's embedding: int64 [...] -> [..., hidden]."""
        ...

    def propose_from(self, rows: Tensor, anchors: Tensor, budget: int | None) -> Proposal:
        """Project a drafter's normed rows [entries, slots, hidden] with the last layer's head and
        propose a tree of `budget` rows after each of `anchors`, int64 [entries]; None: a chain."""
        ...

    def candidates_from(self, rows: Tensor, num_candidates: int) -> DraftCandidates:
        """The `num_candidates` best tokens of the last layer's head for each of these rows."""
        ...

    def captured_round(
        self, work: RoundWork, taps: Sequence[int], num_entries: int
    ) -> DeviceRounds | None:
        """Whole rounds on the device, for this many entries, padding included, with rows of the
        layers `taps` for the drafter; None: the host takes part in each round. Created at the first
        call."""
        ...

    def place(self, epoch: int, events: Sequence[PageEvent]) -> None:
        """Apply events of the page map; `epoch` counts up from 1. Raises PageEventsOutOfOrder if it
        is not the next one; nothing has changed then.
        """
        ...

    def recall(self, lane: int, places: Sequence[tuple[int, int]]) -> None:
        """Copy chunks of the lane from host memory to free pages, as (chunk, page). Passes go on
        meanwhile; passes that see the chunks are queued behind the copies once events place them.
        """
        ...

    def start_probe(self, lane: int, num_tokens: int) -> None:
        """Start to measure, while passes run, how much attention the lane's last queries pay to
        each chunk of its first `num_tokens` tokens, resident or not. See `attention_mass`."""
        ...

    def attention_mass(self, lane: int) -> AttentionMass:
        """The result of the lane's last probe; waits for it."""
        ...

    def reset(self, lane: int) -> None:
        """Empty the lane."""
        ...


class TapRing(Protocol):
    """A ring of rows of tapped layers, in this process or another; see
    luceasync.speculation.dflash.passes.LocalDraft."""

    @property
    def capacity_tokens(self) -> int:
        """Rows that the ring keeps of each lane, the newest ones."""
        ...

    def absorb(
        self,
        taps: Sequence[Tensor],
        lanes: Sequence[int],
        begins: Sequence[int],
        paths: Sequence[Sequence[int]],
        num_rows: int,
        tokens: Tensor,
    ) -> None:
        """Write the rows of `paths`, at most `num_rows` each, of `taps` [entries, rows, hidden] at
        positions from `begins` on. A lane whose rows do not follow its last ones restarts there.
        Raises ValueError for impossible rows; nothing is written then. `tokens`: the tokens of the
        rows, int64 [entries, rows], on any device."""
        ...

    def absorb_chunk(
        self, taps: Sequence[Tensor], lane: int, begin: int, num_tokens: int, tokens: Tensor
    ) -> None:
        """`absorb` for the first `num_tokens` rows of a prefill chunk, of which only the last
        `capacity_tokens` are defined. `tokens`: int64 [1, num_tokens], on the host.
        """
        ...


class Chain:
    """Passes of several parts, run one after the other."""

    def __init__(self, parts: Sequence[Passes]) -> None:
        self._parts = tuple(parts)

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        x: Tensor | None = given
        for part in self._parts:
            assert x is not None, "only the last part returns None"
            x = part.prefill(batch, x, project=project)
        return x

    def decode(self, batch: Batch, given: PassInput) -> Tensor | None:
        x = given
        for part in self._parts[:-1]:
            output = part.decode(batch, x)
            assert output is not None, "only the last part returns None"
            x = output
        return self._parts[-1].decode(batch, x)

    def run_ahead(self, batch: Batch) -> None:
        for part in self._parts:
            part.run_ahead(batch)

    def verify(self, batch: Batch, given: Tensor, parents: Tensor | None) -> Tensor | None:
        x: Tensor | None = given
        for part in self._parts:
            assert x is not None, "only the last part returns None"
            x = part.verify(batch, x, parents)
        return x

    def logits(self, num_entries: int) -> Logits:
        return self._parts[-1].logits(num_entries)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        for part in self._parts:
            part.commit(paths)

    def taps(self, paths: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        return {layer: rows for part in self._parts for layer, rows in part.taps(paths).items()}

    def embed(self, tokens: Tensor) -> Tensor:
        return self._parts[0].embed(tokens)

    def propose_from(self, rows: Tensor, anchors: Tensor, budget: int | None) -> Proposal:
        return self._parts[-1].propose_from(rows, anchors, budget)

    def candidates_from(self, rows: Tensor, num_candidates: int) -> DraftCandidates:
        return self._parts[-1].candidates_from(rows, num_candidates)

    def captured_round(
        self, work: RoundWork, taps: Sequence[int], num_entries: int
    ) -> DeviceRounds | None:
        if len(self._parts) > 1:
            return None
        return self._parts[0].captured_round(work, taps, num_entries)

    def place(self, epoch: int, events: Sequence[PageEvent]) -> None:
        for part in self._parts:
            part.place(epoch, events)

    def recall(self, lane: int, places: Sequence[tuple[int, int]]) -> None:
        for part in self._parts:
            part.recall(lane, places)

    def start_probe(self, lane: int, num_tokens: int) -> None:
        for part in self._parts:
            part.start_probe(lane, num_tokens)

    def attention_mass(self, lane: int) -> AttentionMass:
        found = [part.attention_mass(lane) for part in self._parts]
        total = torch.stack([mass.of_chunks for mass in found]).sum(0)
        return AttentionMass(total, max(mass.seconds for mass in found))

    def reset(self, lane: int) -> None:
        for part in self._parts:
            part.reset(lane)
