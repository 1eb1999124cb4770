"""What can be run on lanes, and the same for a chain: what one link gives, the next one is given.

A link is a shard of a stage, or a stage of a model; a chain of links is one again. Knows no device
and no node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from luceasync.kv.pages import PageEvent
from luceasync.models.pass_rows import NO_LANE
from luceasync.ranking.logits import Logits
from luceasync.ranking.proposals import Proposal

StepKind = Literal["decode", "verify"]
PassInput = Tensor | Sequence[int]  # an activation; or tokens, one for each entry


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one forward pass: entry i runs positions `[begins[i], begins[i] + num_rows)` of
    lane `lanes[i]`. NO_LANE entries fill the batch up. `mark`, of a chunk of a prompt: after how
    many of its rows the lane's recurrent state is set aside, for a save before the next pass.
    `scores`, of a chunk: the logits of all its rows are there after it, until the next pass.
    """

    lanes: tuple[int, ...]
    begins: tuple[int, ...]
    num_rows: int
    mark: int | None = None
    scores: bool = False


def following(lanes: Sequence[int], begins: Sequence[int]) -> tuple[int, ...]:
    """Where entries of a row each begin after it; those of no lane stay where they are."""
    both = zip(lanes, begins, strict=True)
    return tuple(begin + (lane != NO_LANE) for lane, begin in both)


@dataclass(frozen=True, slots=True)
class AttentionMass:
    """What a look has found: `of_chunks` float32 [chunks] on the host, of each the largest share of
    a query that falls on it, all heads and layers summed; and what it took.
    """

    of_chunks: Tensor
    seconds: float


class Passes(Protocol):
    """Layers `[begin, end)` of the model, wherever they are. Synchronous, engine thread only."""

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        """Run many rows of one lane. `given`: tokens int64 [1, rows] if the first layer is here,
        else the activation [1, rows, hidden]. Returns the activation; from the last layer the
        logits float32 [1, 1, vocab] of the last row if `project`, else None.
        """
        ...

    def decode(self, batch: Batch, given: PassInput) -> Tensor | None:
        """Run one row for each entry. `given`: tokens if the first layer is here, as numbers, since
        they may be there already; else the activation [entries, 1, hidden]. Returns the activation;
        from the last layer None, since the logits stay where they are: see `logits`.
        """
        ...

    def run_ahead(self, batch: Batch) -> None:
        """The next pass is most likely the decode of this batch, each lane with the best token of
        the last pass, a decode of the same lanes: begin it where that needs nothing of the host.
        Of the last pass only its best tokens are there afterwards, if they were being ranked. Its
        pages must be placed. Whatever comes next, the lanes stand where they stood.
        """
        ...

    def verify(self, batch: Batch, given: Tensor, parents: Tensor | None) -> Tensor | None:
        """Run trees of rows, each hung on its lane's end, and write nothing permanent; as above.
        `parents`: int32 [entries, rows], see models.trees.TorchTrees; on any device. None: every
        row follows the one before it.
        """
        ...

    def logits(self, num_entries: int) -> Logits:
        """Of the last decode or verify where the last layer is, of its first entries: float32
        [entries, vocab] after a decode, [entries, rows, vocab] after a verify; after a chunk that
        scores, of its first rows, [rows, vocab]. Valid until the next pass.
        """
        ...

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Of each entry of the last `verify` keep the rows of its path, or nothing if it is empty;
        their pages must be placed.
        """
        ...

    def taps(self, paths: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """The rows after each tapped layer in the last pass: [entries, rows, hidden], where the
        layer is. Of entry i only the rows `paths[i]` mean something; so nothing else need cross.
        After a chunk of a prompt, more rows may follow.
        """
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding, where the first layer is: int64 [...] -> [..., hidden]."""
        ...

    def propose_from(self, rows: Tensor, anchors: Tensor, budget: int | None) -> Proposal:
        """What the head says of a draft's rows [entries, slots, hidden], which have been normed, as
        a proposal, where the last layer is: a tree of `budget` rows behind each of `anchors`, int64
        [entries]; None: a chain.
        """
        ...

    def place(self, epoch: int, events: Sequence[PageEvent]) -> None:
        """Follow the page map, whose changes are numbered from 1 on. Raises EventsOutOfTurn for
        any but the next; nothing has changed then.
        """
        ...

    def recall(self, lane: int, places: Sequence[tuple[int, int]]) -> None:
        """Fill pages that no event has given to a chunk yet with what host memory holds of the
        lane: (chunk, page) each. Passes go on meanwhile; once events give the pages to their
        chunks, passes over the lane come after it.
        """
        ...

    def start_probe(self, lane: int, num_tokens: int) -> None:
        """Find out, beside the passes, how much of the attention of the lane's last queries falls
        on each chunk of its first `num_tokens` tokens, wherever it lies; see `masses`.
        """
        ...

    def attention_mass(self, lane: int) -> AttentionMass:
        """What the lane's last look has found, waited for."""
        ...

    def reset(self, lane: int) -> None:
        """Make the lane as if no token had ever run on it."""
        ...


class TapRing(Protocol):
    """Who takes up rows of tapped layers, wherever its ring is; see
    luceasync.speculation.dflash.passes.LocalDraft.
    """

    @property
    def capacity_tokens(self) -> int:
        """Of a lane; of more rows the last ones are kept."""
        ...

    def absorb(
        self,
        taps: Sequence[Tensor],
        lanes: Sequence[int],
        begins: Sequence[int],
        paths: Sequence[Sequence[int]],
        num_rows: int,
    ) -> None:
        """Take up the rows of `paths`, at most `num_rows` each, of `taps` [entries, rows, hidden]:
        they stand at positions from `begins` on. A lane that does not go on where it ended begins
        anew there. Raises ValueError for rows that cannot be; nothing is written then.
        """
        ...

    def absorb_chunk(self, taps: Sequence[Tensor], lane: int, begin: int, num_tokens: int) -> None:
        """As `absorb`, for the first `num_tokens` rows: a chunk of a prompt, of any size. Only the
        last `capacity_tokens` of them mean something.
        """
        ...


class Chain:
    """Passes of all links, one after the other. See Passes."""

    def __init__(self, links: Sequence[Passes]) -> None:
        self._links = tuple(links)

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        x: Tensor | None = given
        for link in self._links:
            assert x is not None, "only the last link gives nothing"
            x = link.prefill(batch, x, project=project)
        return x

    def decode(self, batch: Batch, given: PassInput) -> Tensor | None:
        x = given
        for link in self._links[:-1]:
            output = link.decode(batch, x)
            assert output is not None, "only the last link gives nothing"
            x = output
        return self._links[-1].decode(batch, x)

    def run_ahead(self, batch: Batch) -> None:
        for link in self._links:
            link.run_ahead(batch)

    def verify(self, batch: Batch, given: Tensor, parents: Tensor | None) -> Tensor | None:
        x: Tensor | None = given
        for link in self._links:
            assert x is not None, "only the last link gives nothing"
            x = link.verify(batch, x, parents)
        return x

    def logits(self, num_entries: int) -> Logits:
        return self._links[-1].logits(num_entries)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        for link in self._links:
            link.commit(paths)

    def taps(self, paths: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        return {layer: rows for link in self._links for layer, rows in link.taps(paths).items()}

    def embed(self, tokens: Tensor) -> Tensor:
        return self._links[0].embed(tokens)

    def propose_from(self, rows: Tensor, anchors: Tensor, budget: int | None) -> Proposal:
        return self._links[-1].propose_from(rows, anchors, budget)

    def place(self, epoch: int, events: Sequence[PageEvent]) -> None:
        for link in self._links:
            link.place(epoch, events)

    def recall(self, lane: int, places: Sequence[tuple[int, int]]) -> None:
        for link in self._links:
            link.recall(lane, places)

    def start_probe(self, lane: int, num_tokens: int) -> None:
        for link in self._links:
            link.start_probe(lane, num_tokens)

    def attention_mass(self, lane: int) -> AttentionMass:
        found = [link.attention_mass(lane) for link in self._links]
        total = torch.stack([masses.of_chunks for masses in found]).sum(0)
        return AttentionMass(total, max(masses.seconds for masses in found))

    def reset(self, lane: int) -> None:
        for link in self._links:
            link.reset(lane)
