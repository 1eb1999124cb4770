"""Passes of a stage in another process: each verb is a command.

Owns the order in which payloads are given back. Knows neither what starts the process nor where it
runs.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from luceasync.ipc.channel import Payload
from luceasync.ipc.supervised import CallKind
from luceasync.kv.pages import PageEvent
from luceasync.pipeline.passes import AttentionMass, Batch, PassInput, RoundWork
from luceasync.pipeline.remote import answers, wire
from luceasync.pipeline.remote.connection import BackendConnection
from luceasync.pipeline.remote.tensors import HOST, StageSizes, views
from luceasync.pipeline.transfer import as_rows, on_host
from luceasync.ranking.logits import (
    Candidates,
    Logits,
    Logprobs,
    Ranking,
    RankRequest,
    TopLogits,
    WholeRow,
)
from luceasync.ranking.proposals import DraftCandidates, Proposal

EVENTS_A_PACKET = 4096  # of pages
NO_BATCH = Batch((), (), 1)


class RemotePasses:
    """See Passes. The output for a stage that is remote too stays where it lies: the tensor that is
    handed from `before` to this one is a view of it.
    """

    def __init__(
        self,
        connection: BackendConnection,
        sizes: StageSizes,
        taps: Sequence[int],
        *,
        before: RemotePasses | None,
        hands_on: bool,
        runs_ahead: bool,
        num_ahead: int = 0,
    ) -> None:
        """`taps`: all tapped layers of the model; `before`: the stage before this one, if it is
        remote; `hands_on`: the one after this one is; `runs_ahead`: a prefill chunk without output
        is not waited for. Where devices queue no work, waiting is how long a chunk took.
        `num_ahead`: so many chunks without output may be under way, and the oldest is waited for.
        """
        self._connection = connection
        self._sizes = sizes
        self._taps = [tap for tap in taps if tap in sizes.layers]
        self._before = before
        self._hands_on = hands_on
        self._runs_ahead = runs_ahead
        self._num_ahead = num_ahead
        self._ahead: deque[tuple[int, CallKind]] = deque()  # chunks that were not waited for
        self._handed_on: tuple[Tensor, Payload] | None = None
        self._batch = NO_BATCH  # of the last pass
        self._is_awaited = True
        self._is_tree = False
        self._probed_tokens: dict[int, int] = {}  # by lane

    @property
    def are_under_way(self) -> bool:
        """Whether the last pass was not waited for: what is asked now is answered after it."""
        return not self._is_awaited

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        return self._run("prefill", batch, given, project)

    def decode(self, batch: Batch, given: PassInput) -> Tensor | None:
        return self._run("decode", batch, as_rows(given))

    def run_ahead(self, batch: Batch) -> None:
        """Do nothing: the other process begins a step when it hears of it."""

    def captured_round(self, work: RoundWork, taps: Sequence[int], num_entries: int) -> None:
        return None  # the drafter is in another process

    def verify(self, batch: Batch, given: Tensor, parents: Tensor | None) -> Tensor | None:
        if parents is not None:
            command = wire.TreeParents(len(batch.lanes), batch.num_rows)
            self._connection.send(command, [parents.to(torch.int32)])
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
        self._is_awaited = False
        output = self._sizes.output(batch, project)
        lent = None if self._before is None else self._before.payload_of(given)
        # A failure of a pass that is not answered shows at the next call. A payload in another
        # process's ring can be freed only when it has been read, so that is always answered.
        answers = bool(output) or lent is not None or not self._is_ahead(kind)
        command = wire.RunPass(
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
            number = self._connection.forward(command, lent)
        elif kind == "prefill" and not answers:
            self._connection.send_soon(command, given)
            return None
        elif kind == "prefill" or given.device == HOST:
            number = self._connection.send(command, [given])
        else:  # a device still computes it
            self._connection.send(wire.PreparePass(command))
            number = self._connection.send(command, [given])
        if not answers:
            return None
        if kind == "prefill" and not output and lent is None and self._num_ahead:
            self._ahead.append((number, command.call_kind))
            self._collect(self._num_ahead)
            return None
        if not (output and self._hands_on):
            found = self._connection.result(number, output, command.call_kind)
            self._collect(0)  # they were answered before
            self._is_awaited = True
            return found[0] if output else None
        payload, memory = self._connection.payload(number, output[0], command.call_kind)
        [view] = views(memory, output)
        self._handed_on = view, payload
        self._is_awaited = True
        return view

    def _collect(self, num_left: int) -> None:
        """Wait for the oldest chunks that are under way, until so many are left."""
        while len(self._ahead) > num_left:
            number, call = self._ahead.popleft()
            self._connection.result(number, [], call)

    def _is_ahead(self, kind: str) -> bool:
        """Whether the end of a pass is not waited for; a step is followed by other calls."""
        return kind != "prefill" or (self._runs_ahead and not self._num_ahead)

    def payload_of(self, given: Tensor) -> Payload | None:
        """The payload that this tensor is a view of, if it is the last output."""
        if self._handed_on is None or self._handed_on[0] is not given:
            return None
        return self._handed_on[1]

    def restarted(self) -> None:
        """Forget what the process before was told: this one knows nothing of it."""
        self._free()
        self._ahead.clear()
        self._batch = NO_BATCH
        self._is_awaited = True

    def _free(self) -> None:
        if self._handed_on is not None:
            self._handed_on[1].free()
            self._handed_on = None

    def logits(self, num_entries: int) -> Logits:
        shape = (num_entries, self._batch.num_rows) if self._is_tree else (num_entries,)
        return RemoteLogits(self._connection, self._sizes, shape)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self._connection.send(wire.CommitPaths(tuple(map(len, paths))), _flat(paths))

    def taps(self, paths: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        num_kept = sum(len(path) for path in paths)
        if not self._taps or not num_kept:
            return {tap: self._blank(len(paths)) for tap in self._taps}
        if is_chunk := len(paths) == 1 and paths[0] == range(num_kept):
            command = wire.ReadTaps(num_first=num_kept)
        else:
            command = wire.ReadTaps(tuple(map(len, paths)))
        number = self._connection.send(command, [] if is_chunk else _flat(paths))
        specs, kind = command.returns(self._sizes), command.call_kind
        kept = {tap: self._connection.result(number, specs, kind)[0] for tap in self._taps}
        if is_chunk:
            return {tap: rows[None] for tap, rows in kept.items()}
        return {tap: self._spread(rows, paths) for tap, rows in kept.items()}

    def _blank(self, num_entries: int) -> Tensor:
        (hidden, dtype), num_rows = self._sizes.rows(), self._batch.num_rows
        return torch.zeros(num_entries, num_rows, *hidden, dtype=dtype)

    def _spread(self, kept: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Put rows at the places that they have in the pass: [entries, rows, hidden]."""
        spread, begin = self._blank(len(paths)), 0
        for entry, path in zip(spread, paths, strict=True):
            entry[list(path)] = kept[begin : begin + len(path)]
            begin += len(path)
        return spread

    def embed(self, tokens: Tensor) -> Tensor:
        [rows] = self._connection.call(wire.EmbedTokens(tokens.numel()), [tokens])
        return rows.view(*tokens.shape, -1)

    def propose_from(self, rows: Tensor, anchors: Tensor, budget: int | None) -> Proposal:
        command = wire.ProposeTokens(rows.shape[0], rows.shape[1], budget)
        tokens, *parents = self._connection.call(command, [rows, anchors])
        return Proposal(tokens, parents[0] if parents else None)

    def candidates_from(self, rows: Tensor, num_candidates: int) -> DraftCandidates:
        command = wire.RankCandidates(rows.shape[0], rows.shape[1], num_candidates)
        ids, logits = self._connection.call(command, [rows])
        return DraftCandidates(ids, logits)

    def place(self, epoch: int, events: Sequence[PageEvent]) -> None:
        triples = [(e.lane, e.chunk, -1 if e.page is None else e.page) for e in events]
        for begin in range(0, len(triples), EVENTS_A_PACKET):
            part, has_more = (
                triples[begin:][:EVENTS_A_PACKET],
                begin + EVENTS_A_PACKET < len(triples),
            )
            self._connection.send_soon(wire.PlacePages(epoch, tuple(part), has_more))

    def recall(self, lane: int, places: Sequence[tuple[int, int]]) -> None:
        for begin in range(0, len(places), EVENTS_A_PACKET):
            part = places[begin : begin + EVENTS_A_PACKET]
            self._connection.send(wire.RecallPages(lane, tuple(part)))

    def start_probe(self, lane: int, num_tokens: int) -> None:
        self._probed_tokens[lane] = num_tokens
        self._connection.send(wire.StartProbe(lane, num_tokens))

    def attention_mass(self, lane: int) -> AttentionMass:
        command = wire.ReadAttentionMass(lane, self._probed_tokens[lane])
        of_chunks, seconds = self._connection.call(command)
        return AttentionMass(of_chunks, float(seconds))

    def reset(self, lane: int) -> None:
        self._connection.send_soon(wire.ResetLane(lane))


@dataclass
class RemoteLogits:
    """See Logits: of the last pass of a stage that has the last layer. Rows are ranked there; what
    is wanted goes there, what is found comes back.
    """

    _connection: BackendConnection
    _sizes: StageSizes
    _shape: tuple[int, ...]  # [entries], or [entries, rows]
    _num_rankings: int = 0

    @property
    def num_vocab(self) -> int:
        return self._sizes.num_vocab

    def rank(self, wanted: RankRequest, proposal: Proposal | None = None) -> Ranking:
        """Send the command, and do not wait."""
        command = wire.RankLogits(
            num_entries=self._shape[0],
            num_ranked=wanted.num_ranked,
            num_top=wanted.num_top,
            num_masses=len(wanted.mass_at),
            edits=tuple((edits.num_rows, edits.table.shape[1]) for edits in wanted.edits),
            num_masked=0 if wanted.masks is None else len(wanted.masks.rows),
            is_of_masked=wanted.is_of_masked,
        )
        numbers = [np.array(wanted.mass_at, np.float64), *(edits.table for edits in wanted.edits)]
        tensors = [torch.from_numpy(n.astype(np.float64, copy=False)) for n in numbers if n.size]
        if (masks := wanted.masks) is not None:
            tensors += [torch.from_numpy(masks.rows), torch.from_numpy(masks.words)]
        number = self._connection.send(command, tensors)
        num_rows = command.num_masked if wanted.is_of_masked else prod(self._shape)
        index = self._num_rankings
        self._num_rankings += 1
        return _RemoteRanking(
            self._connection, self._sizes, num_rows, wanted, proposal, number, index
        )

    def whole(self) -> Tensor:
        """All logits, row by row; for measurements."""
        rows = [
            self._connection.call(wire.ReadRow("raw", index))[0]
            for index in range(prod(self._shape))
        ]
        return torch.stack(rows).view(*self._shape, self.num_vocab)


@dataclass(frozen=True)
class _RemoteRanking:
    """See Ranking. The proposal does not cross: it comes to the host beside the candidates."""

    _connection: BackendConnection
    _sizes: StageSizes
    _num_rows: int
    _wanted: RankRequest
    _proposal: Proposal | None
    _number: int  # of the command
    _index: int  # among the rankings of the pass

    def candidates(self) -> Candidates:
        wanted = self._wanted
        call = CallKind("rank", self._num_rows)  # it ends with the pass
        if not wanted.num_ranked:
            return Candidates(self._columns(), self._best(call), None)
        specs = self._sizes.ranked(self._num_rows, wanted.num_ranked, wanted.num_top)
        tensors = self._connection.result(self._number, specs, call)
        best, values, ids, masses, *logprobs = (tensor.numpy() for tensor in tensors)
        known = Logprobs(*logprobs) if logprobs else None
        return Candidates(self._columns(), best, TopLogits(values, ids, masses, known))

    def _best(self, call: CallKind) -> np.ndarray[Any, np.dtype[np.int64]]:
        answer, _ = self._connection.answer_with(self._number, answers.BestTokens, [], call)
        tokens = answer.tokens
        if len(tokens) != self._num_rows or max(tokens) >= self._sizes.num_vocab:
            words = f"it said that the best tokens of {self._num_rows} rows are {tokens}"
            self._connection.fail(words)
        return np.array(tokens, np.int64)

    def _columns(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        if self._proposal is None:
            return np.empty((self._num_rows, 0), np.int64)
        return self._proposal.columns().cpu().numpy()

    def whole_row(self, index: int) -> WholeRow:
        return self._read("edited", index)

    def whole_logprobs(self, index: int) -> WholeRow:
        return self._read("logprobs", index)

    def logprob(self, index: int, token_id: int) -> float:
        command = wire.ReadLogprob(index, token_id, self._index)
        return self._connection.ask(command, answers.Scalar).value

    def _read(self, what: Literal["edited", "logprobs"], index: int) -> WholeRow:
        values, ids = self._connection.call(wire.ReadRow(what, index, self._index))
        return WholeRow(values.numpy(), ids.numpy())


def _flat(paths: Sequence[Sequence[int]]) -> list[Tensor]:
    """The rows of all paths, one after the other; nothing if there are none."""
    rows = [*itertools.chain(*paths)]
    return [on_host(rows, np.int32)] if rows else []
