"""A stage in a process of its own, as luceasync.pipeline.stage.Stage has it: each verb a message.

Owns the order in which what crosses is given back. Knows neither what starts the process nor where
it runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from luceasync.errors import ModelError
from luceasync.host_cache.nodes import Nodes, NodeStore
from luceasync.ipc.channel import Payload, Traffic
from luceasync.ipc.packets import Message
from luceasync.ipc.supervised import Call, Life
from luceasync.kv.pages import PageEvent, num_chunks
from luceasync.nodes import NodeKey
from luceasync.pipeline.passes import Batch, Given, Masses, Passes
from luceasync.pipeline.remote import wire
from luceasync.pipeline.remote.link import Link
from luceasync.pipeline.remote.logits import RemoteLogits
from luceasync.pipeline.remote.nodes import RemoteContents
from luceasync.pipeline.remote.tensors import HOST, Sizes, Spec, views
from luceasync.pipeline.transfer import as_rows, on_host
from luceasync.ranking.logits import Logits
from luceasync.ranking.proposals import Proposal

SILENCE_S, EVENTS_A_PACKET = 300.0, 4096  # of a process that reads weights; of pages


class RemoteStage:
    """See Stage. All that is done with it raises StageFailed once the process is gone."""

    def __init__(
        self,
        link: Link,
        passes: RemotePasses,
        contents: RemoteContents,
        num_shards: int,
        start_again: Callable[[str], Life],
    ) -> None:
        """`link` is owned from now on. `start_again` is told why, and gives another process that
        has loaded the same layers; see Stage.mend.
        """
        self._link = link
        self._passes = passes
        self._contents = contents
        self._nodes = NodeStore(contents)
        self._num_shards = num_shards
        self._start_again = start_again

    @property
    def num_shards(self) -> tuple[int, int]:
        return 0, self._num_shards

    @property
    def passes(self) -> Passes:
        return self._passes

    @property
    def traffic(self) -> Traffic:
        """What has crossed so far."""
        return self._link.traffic

    def synchronize(self) -> None:
        self._link.ask(wire.Synchronize(), wire.Done)

    @property
    def nodes(self) -> Sequence[Nodes]:
        return [self._nodes]

    def notice(self) -> None:
        """See Stage."""
        self._link.notice()

    def probe(self) -> None:
        """See Stage."""
        self._link.probe()

    def mend(self, lost: Callable[[Sequence[NodeKey]], None]) -> bool:
        """See Stage. Nodes in shared memory stay where they are, and are told to the process."""
        if self._link.is_open:
            return False
        self._link.go_on_with(self._start_again(self._link.last_words()))
        self._passes.begin_again()
        lost(self._nodes.sift(self._contents.renew))
        return True

    def close(self) -> None:
        self._link.close()


def load(
    link: Link, order: Message, advance: Callable[[int], None], tensors: Sequence[Tensor] = ()
) -> None:
    """Have a stage or a drafter loaded; `advance` hears what is read. Raises ModelError in the
    words of the process, and what `advance` raises.
    """
    link.tell(order, tensors)
    while True:
        match link.receive(SILENCE_S):
            case wire.Read(num_bytes):
                advance(num_bytes)
            case wire.Failed(words):
                raise ModelError(words)
            case wire.Done():
                return
            case other:
                link.fail(f"it said {type(other).__name__} while it loaded")


class RemotePasses:
    """See Passes. What this stage gives to one that is remote too stays where it lies: the tensor
    that `before` and this one hand on is a view of it.
    """

    def __init__(
        self,
        link: Link,
        sizes: Sizes,
        taps: Sequence[int],
        *,
        before: RemotePasses | None,
        hands_on: bool,
        runs_ahead: bool,
    ) -> None:
        """`taps`: all that are tapped; `before`: the stage before this one, where that is remote;
        `hands_on`: the one after this one is; `runs_ahead`: a chunk that gives nothing is not
        waited for. Where work is not queued its time is taken for what it costs.
        """
        self._link = link
        self._sizes = sizes
        self._taps = [tap for tap in taps if tap in sizes.layers]
        self._before = before
        self._hands_on = hands_on
        self._runs_ahead = runs_ahead
        self._given: tuple[Tensor, Payload] | None = None  # what was handed on
        self._batch = Batch((), (), 1)  # of the last pass
        self._is_tree = False
        self._num_looked_at: dict[int, int] = {}  # chunks, by lane

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        return self._run("prefill", batch, given, project)

    def decode(self, batch: Batch, given: Given) -> Tensor | None:
        return self._run("decode", batch, as_rows(given))

    def run_ahead(self, batch: Batch) -> None:
        """Nothing: the other process begins a step when it hears of it."""

    def verify(self, batch: Batch, given: Tensor, parents: Tensor | None) -> Tensor | None:
        if parents is not None:
            order = wire.Parents(len(batch.lanes), batch.num_rows)
            self._link.tell(order, [parents.to(torch.int32)])
        return self._run("verify", batch, given, has_parents=parents is not None)

    def _run(
        self,
        kind: Literal["prefill", "decode", "verify"],
        batch: Batch,
        given: Tensor,
        project: bool = False,
        has_parents: bool = False,
    ) -> Tensor | None:
        self._free()
        self._batch, self._is_tree = batch, kind == "verify"
        gives = self._sizes.gives(batch, project)
        lent = None if self._before is None else self._before.handed_on(given)
        # Of what is not waited for a failure shows at the next call. A payload that lies in another
        # process's ring is given back when it has been read.
        answers = gives is not None or lent is not None or not self._is_ahead(kind)
        order = wire.Run(
            kind,
            batch.lanes,
            batch.begins,
            batch.num_rows,
            batch.mark,
            project,
            has_parents,
            answers,
            batch.scores,
        )
        if lent is not None:
            number = self._link.forward(order, lent)
        elif kind == "prefill" and not answers:
            self._link.tell_soon(order, given)
            return None
        elif kind == "prefill" or given.device == HOST:
            number = self._link.tell(order, [given])
        else:  # a device still computes it
            self._link.tell(wire.Soon(order))
            number = self._link.tell(wire.Given(), [given])
        call = Call(kind, len(batch.lanes) * batch.num_rows)
        if gives is None:
            if answers:
                self._link.answer(number, wire.Done, call)
            return None
        if not self._hands_on:
            return self._link.tensors(number, [gives], call)[0]
        payload = self._link.payload(number, call)
        [view] = views(self._link.view(payload, gives), [gives])
        self._given = view, payload
        return view

    def _is_ahead(self, kind: str) -> bool:
        """Whether nobody waits for the end of a pass; a step is followed by what is asked of it."""
        return self._runs_ahead or kind != "prefill"

    def handed_on(self, given: Tensor) -> Payload | None:
        """The payload of which this tensor is the view, if it is the last one."""
        return self._given[1] if self._given is not None and self._given[0] is given else None

    def begin_again(self) -> None:
        """The process is another one: nothing of what this one has been told is known to it."""
        self._free()
        self._batch = Batch((), (), 1)

    def _free(self) -> None:
        if self._given is not None:
            self._given[1].free()
            self._given = None

    def logits(self, num_entries: int) -> Logits:
        shape = (num_entries, self._batch.num_rows) if self._is_tree else (num_entries,)
        return RemoteLogits(self._link, self._sizes, shape)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self._link.tell(wire.Commit(tuple(len(path) for path in paths)), _flat(paths))

    def taps(self, paths: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        num_kept = sum(len(path) for path in paths)
        if not self._taps or not num_kept:
            return {tap: self._blank(len(paths)) for tap in self._taps}
        if is_chunk := len(paths) == 1 and paths[0] == range(num_kept):
            number = self._link.tell(wire.Taps(num_first=num_kept))
        else:
            number = self._link.tell(wire.Taps(tuple(map(len, paths))), _flat(paths))
        spec, call = self._sizes.rows(num_kept), Call("taps", num_kept)
        kept = {tap: self._link.tensors(number, [spec], call)[0] for tap in self._taps}
        if is_chunk:
            return {tap: rows[None] for tap, rows in kept.items()}
        return {tap: self._spread(rows, paths) for tap, rows in kept.items()}

    def _blank(self, num_entries: int) -> Tensor:
        (hidden, dtype), num_rows = self._sizes.rows(), self._batch.num_rows
        return torch.zeros(num_entries, num_rows, *hidden, dtype=dtype)

    def _spread(self, kept: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Rows at their places: [entries, rows, hidden]."""
        spread, begin = self._blank(len(paths)), 0
        for entry, path in zip(spread, paths, strict=True):
            entry[list(path)] = kept[begin : begin + len(path)]
            begin += len(path)
        return spread

    def embed(self, tokens: Tensor) -> Tensor:
        spec = self._sizes.rows(*tokens.shape)
        return self._link.fetch(wire.Embed(tokens.numel()), [spec], [tokens])[0]

    def propose_from(self, rows: Tensor, anchors: Tensor, budget: int | None) -> Proposal:
        order = wire.Propose(rows.shape[0], rows.shape[1], budget)
        tokens, *parents = self._link.fetch(order, self._sizes.proposal(order), [rows, anchors])
        return Proposal(tokens, parents[0] if parents else None)

    def place(self, epoch: int, events: Sequence[PageEvent]) -> None:
        told = [(e.lane, e.chunk, -1 if e.page is None else e.page) for e in events]
        for begin in range(0, len(told), EVENTS_A_PACKET):
            part, has_more = told[begin:][:EVENTS_A_PACKET], begin + EVENTS_A_PACKET < len(told)
            self._link.tell_soon(wire.Place(epoch, tuple(part), has_more))

    def recall(self, lane: int, places: Sequence[tuple[int, int]]) -> None:
        for begin in range(0, len(places), EVENTS_A_PACKET):
            self._link.tell(wire.Recall(lane, tuple(places[begin : begin + EVENTS_A_PACKET])))

    def look(self, lane: int, num_tokens: int) -> None:
        self._num_looked_at[lane] = num_chunks(num_tokens)
        self._link.tell(wire.Look(lane, num_tokens))

    def masses(self, lane: int) -> Masses:
        specs: list[Spec] = [((self._num_looked_at[lane],), torch.float32), ((1,), torch.float64)]
        of_chunks, seconds = self._link.fetch(wire.Masses(lane), specs)
        return Masses(of_chunks, float(seconds))

    def reset(self, lane: int) -> None:
        self._link.tell_soon(wire.Reset(lane))


def _flat(paths: Sequence[Sequence[int]]) -> list[Tensor]:
    """All rows of all paths, one after the other; nothing where there are none."""
    rows = [*itertools.chain(*paths)]
    return [on_host(rows, np.int32)] if rows else []
