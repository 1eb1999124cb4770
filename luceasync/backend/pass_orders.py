"""Orders about passes: what came is checked against what the stage computes itself, then run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from luceasync.errors import EventsOutOfTurn
from luceasync.ipc.channel import Received
from luceasync.ipc.packets import Message
from luceasync.kv.pages import PageEvent, num_chunks
from luceasync.models.pass_rows import NO_LANE
from luceasync.pipeline.passes import Batch, Passes, StepKind
from luceasync.pipeline.platform import Event
from luceasync.pipeline.remote import wire
from luceasync.pipeline.remote.tensors import Sizes, Spec
from luceasync.ranking.logits import Edits, Masks, Ranking, Wanted

Table = dict[type[Message], Callable[[Any, Received[Any]], None]]


class Answers(Protocol):
    """See luceasync.backend.serving.Wire."""

    def answer(
        self, got: Received[Any], message: Message, tensors: Sequence[Tensor] = ()
    ) -> None: ...

    def given(self, got: Received[Any], specs: Sequence[Spec]) -> list[Tensor]: ...

    def lent(self, got: Received[Any], spec: Spec) -> Tensor: ...

    def free_after(self, event: Event, got: Received[Any]) -> None: ...

    def refuse(self, words: str) -> Any: ...


class PassOrders:
    """Runs passes of one stage. `table`: what is done with each message."""

    def __init__(
        self,
        link: Answers,
        passes: Passes,
        sizes: Sizes,
        taps: Sequence[int],
        limits: tuple[int, int, int],
        taken: Callable[[], Event],
        prepare: Callable[[StepKind, Batch], None],
    ) -> None:
        """`taps`: those of this stage, in order; `limits`: lanes, and tokens and pages of each;
        `taken`: when the last pass that was queued has read what it was given; `prepare`: see
        luceasync.pipeline.shard_passes.Steps.
        """
        self._taken = taken
        self._prepare = prepare
        self._announced: tuple[wire.Run, Batch, Spec] | None = None
        self._link = link
        self._passes = passes
        self._sizes = sizes
        self._taps = taps
        self._num_lanes, self._max_tokens, self._num_pages = limits
        self._events: list[PageEvent] = []  # of an epoch that has not come whole
        self._parents: Tensor | None = None
        self._batch = Batch((), (), 1)
        self._rankings: list[Ranking] = []  # since the last pass
        self.table: Table = {
            wire.Parents: self._take_parents,
            wire.Run: self._run,
            wire.Soon: self._announce,
            wire.Given: self._run_announced,
            wire.Rank: self._rank,
            wire.Whole: self._whole,
            wire.Logprob: self._logprob,
            wire.Commit: self._commit,
            wire.Taps: self._send_taps,
            wire.Embed: self._embed,
            wire.Propose: self._propose,
            wire.Place: self._place,
            wire.Recall: self._recall,
            wire.Look: self._look,
            wire.Masses: self._masses,
            wire.Reset: self._reset,
        }

    def _take_parents(self, order: wire.Parents, got: Received[Any]) -> None:
        spec = ((order.num_entries, order.num_rows), torch.int32)
        [self._parents] = self._link.given(got, [spec])

    def _run(self, order: wire.Run, got: Received[Any]) -> None:
        batch = order.batch
        self._check(batch, order.kind)
        self._pass(order, batch, self._sizes.given(batch), got)

    def _announce(self, order: wire.Soon, got: Received[Any]) -> None:
        run = order.run
        batch = run.batch
        self._check(batch, run.kind)
        if run.kind == "prefill":
            self._link.refuse("a chunk of a prompt was announced")
        else:
            self._prepare(run.kind, batch)
        self._announced = run, batch, self._sizes.given(batch)

    def _run_announced(self, order: wire.Given, got: Received[Any]) -> None:
        announced, self._announced = self._announced, None
        if announced is None:
            self._link.refuse("what a pass is given came before the pass")
        assert announced is not None
        self._pass(*announced, got)

    def _pass(self, order: wire.Run, batch: Batch, spec: Spec, got: Received[Any]) -> None:
        given = self._link.lent(got, spec)
        self._batch, self._rankings = batch, []
        output: Tensor | None
        if order.kind == "prefill":
            output = self._passes.prefill(batch, given, project=order.project)
        elif order.kind == "decode":
            rows = given[:, 0].tolist() if self._sizes.is_first else given
            output = self._passes.decode(batch, rows)
        else:
            parents, self._parents = self._parents, None
            if (parents is not None) != order.has_parents:
                self._link.refuse("a verify whose parents came twice, or not at all")
            output = self._passes.verify(batch, given, parents)
        self._link.free_after(self._taken(), got)
        if order.answers:
            gives = self._sizes.gives(batch, order.project)
            tensors = [] if gives is None or output is None else [output[:, : gives[0][1]]]
            self._link.answer(got, wire.Done(), tensors)

    def _check(self, batch: Batch, kind: str) -> None:
        num_written = 0 if kind == "verify" else batch.num_rows
        if len(batch.lanes) != len(batch.begins) or not batch.lanes:
            self._link.refuse(f"{len(batch.lanes)} lanes and {len(batch.begins)} begins")
        if batch.mark is not None and not (kind == "prefill" and batch.mark < batch.num_rows):
            self._link.refuse(f"a mark after {batch.mark} of the {batch.num_rows} rows of a {kind}")
        for lane, begin in zip(batch.lanes, batch.begins, strict=True):
            if lane != NO_LANE:
                self._check_lane(lane, begin + num_written)

    def _check_lane(self, lane: int, num_tokens: int) -> None:
        if not 0 <= lane < self._num_lanes:
            self._link.refuse(f"lane {lane} of {self._num_lanes}")
        if num_tokens > self._max_tokens:
            self._link.refuse(f"{num_tokens} tokens in a lane of {self._max_tokens}")

    def _check_page(self, chunk: int, page: int) -> None:
        num_held = num_chunks(self._max_tokens)
        if not (chunk < num_held and page < min(num_held, self._num_pages)):
            told = f"chunk {chunk}, page {page}"
            self._link.refuse(f"{told} of a lane of {num_held} chunks, {self._num_pages} pages")

    def _rank(self, order: wire.Rank, got: Received[Any]) -> None:
        real = torch.float64
        specs: list[Spec] = [((order.num_masses,), real)] if order.num_masses else []
        specs += [((5, num_edits), real) for _, num_edits in order.edits if num_edits]
        specs += self._sizes.masks(order.num_masked)
        given = iter(self._link.given(got, specs))
        mass_at = tuple(next(given).tolist()) if order.num_masses else ()
        edits = [
            Edits(rows, (next(given) if num_edits else torch.empty(5, 0, dtype=real)).numpy())
            for rows, num_edits in order.edits
        ]
        masks = None
        if order.num_masked:
            rows, words = (tensor.numpy() for tensor in given)
            if not 0 <= rows.min() <= rows.max() < order.num_entries * self._batch.num_rows:
                self._link.refuse(f"masks of rows {rows.min()} to {rows.max()}")
            masks = Masks(rows, words)
        if order.is_of_masked and (masks is None or edits):
            self._link.refuse("rows with masks alone, without masks or with edits")
        wanted = Wanted(
            tuple(edits), order.num_ranked, mass_at, order.num_top, masks, order.is_of_masked
        )
        ranking = self._passes.logits(order.num_entries).rank(wanted)
        self._rankings.append(ranking)
        found = ranking.candidates()
        if not order.num_ranked:
            self._link.answer(got, wire.Best(tuple(found.best.tolist())))
            return
        arrays = [found.best]
        if (block := found.block) is not None:
            arrays += [block.values, block.ids, block.masses]
            if (known := block.logprobs) is not None:
                arrays += [known.known, known.top_values, known.top_ids]
        self._link.answer(got, wire.Done(), [torch.from_numpy(array) for array in arrays])

    def _whole(self, order: wire.Whole, got: Received[Any]) -> None:
        if order.what == "raw":
            logits = self._passes.logits(len(self._batch.lanes)).whole()
            row = logits.reshape(-1, logits.shape[-1])[order.index].float()
            self._link.answer(got, wire.Done(), [row])
            return
        ranking = self._ranked(order.ranking)
        find = ranking.whole_row if order.what == "edited" else ranking.whole_logprobs
        row_found = find(order.index)
        tensors = [torch.from_numpy(numbers) for numbers in (row_found.values, row_found.ids)]
        self._link.answer(got, wire.Done(), tensors)

    def _logprob(self, order: wire.Logprob, got: Received[Any]) -> None:
        value = self._ranked(order.ranking).logprob(order.index, order.token)
        self._link.answer(got, wire.Told(value))

    def _ranked(self, place: int) -> Ranking:
        if place >= len(self._rankings):
            self._link.refuse("a row was asked for before any was ranked")
        return self._rankings[place]

    def _commit(self, order: wire.Commit, got: Received[Any]) -> None:
        self._passes.commit(self._paths(order.lengths, got))

    def _send_taps(self, order: wire.Taps, got: Received[Any]) -> None:
        if order.num_first:
            paths: list[Sequence[int]] = [range(order.num_first)]
        else:
            paths = [*self._paths(order.lengths, got)]
        found = self._passes.taps(paths)
        for tap in self._taps:
            rows = found[tap]
            if order.num_first:
                kept = rows[0, : order.num_first]
            else:
                kept = torch.cat([rows[i, [*path]] for i, path in enumerate(paths) if path])
            self._link.answer(got, wire.Done(), [kept])

    def _paths(self, lengths: Sequence[int], got: Received[Any]) -> list[list[int]]:
        """Rows of the last pass, of each entry."""
        if not sum(lengths):
            self._link.given(got, [])
            return [[] for _ in lengths]
        [rows] = self._link.given(got, [((sum(lengths),), torch.int32)])
        if not 0 <= int(rows.min()) <= int(rows.max()) < self._batch.num_rows:
            self._link.refuse(f"a path beyond the {self._batch.num_rows} rows of its pass")
        return [part.tolist() for part in rows.split([*lengths])]

    def _embed(self, order: wire.Embed, got: Received[Any]) -> None:
        [tokens] = self._link.given(got, [((order.num_tokens,), torch.int64)])
        self._link.answer(got, wire.Done(), [self._passes.embed(tokens)])

    def _propose(self, order: wire.Propose, got: Received[Any]) -> None:
        specs = [
            self._sizes.rows(order.num_entries, order.num_slots),
            ((order.num_entries,), torch.int64),
        ]
        rows, anchors = self._link.given(got, specs)
        proposal = self._passes.propose_from(rows, anchors, order.budget)
        parents = [] if proposal.parents is None else [proposal.parents]
        self._link.answer(got, wire.Done(), [proposal.tokens, *parents])

    def _place(self, order: wire.Place, got: Received[Any]) -> None:
        for lane, chunk, page in order.events:
            self._check_lane(lane, 0)
            self._check_page(chunk, page)
        self._events += [
            PageEvent(lane, chunk, None if page < 0 else page) for lane, chunk, page in order.events
        ]
        if order.has_more:
            return
        events, self._events = self._events, []
        try:
            self._passes.place(order.epoch, events)
        except EventsOutOfTurn as error:
            self._link.refuse(str(error))

    def _recall(self, order: wire.Recall, got: Received[Any]) -> None:
        self._check_lane(order.lane, 0)
        for chunk, page in order.places:
            self._check_page(chunk, page)
        self._passes.recall(order.lane, order.places)

    def _look(self, order: wire.Look, got: Received[Any]) -> None:
        self._check_lane(order.lane, order.num_tokens)
        self._passes.start_probe(order.lane, order.num_tokens)

    def _masses(self, order: wire.Masses, got: Received[Any]) -> None:
        self._check_lane(order.lane, 0)
        found = self._passes.attention_mass(order.lane)
        seconds = torch.tensor([found.seconds], dtype=torch.float64)
        self._link.answer(got, wire.Done(), [found.of_chunks, seconds])

    def _reset(self, order: wire.Reset, got: Received[Any]) -> None:
        self._check_lane(order.lane, 0)
        self._passes.reset(order.lane)
