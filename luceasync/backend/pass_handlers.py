"""Commands about passes, run on a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from luceasync.backend.dispatch import Answers, handles, result
from luceasync.errors import PageEventsOutOfOrder
from luceasync.ipc.packets import WireError
from luceasync.kv.pages import PageEvent
from luceasync.pipeline.passes import Batch, Passes, StepKind
from luceasync.pipeline.remote import answers, wire
from luceasync.pipeline.remote.tensors import StageSizes
from luceasync.ranking.logits import Edits, Masks, Ranking, RankRequest


class PassHandlers:
    """Runs the passes of one stage."""

    def __init__(
        self,
        passes: Passes,
        sizes: StageSizes,
        taps: Sequence[int],
        input_is_queued: Callable[[], None],
        prepare: Callable[[StepKind, Batch], None],
    ) -> None:
        """`taps`: those of this stage, in order; `input_is_queued` is called when a pass that reads
        its input in place has been queued; `prepare` does the work that is possible before a step.
        """
        self._passes = passes
        self._sizes = sizes
        self._taps = taps
        self._input_is_queued = input_is_queued
        self._prepare = prepare
        self._events: list[PageEvent] = []  # of an epoch that has not arrived completely
        self._parents: Tensor | None = None
        self._batch = Batch((), (), 1)
        self._rankings: list[Ranking] = []  # since the last pass

    @handles(wire.TreeParents)
    def take_parents(self, command: wire.TreeParents, tensors: list[Tensor]) -> None:
        [self._parents] = tensors

    @handles(wire.PreparePass)
    def prepare(self, command: wire.PreparePass, tensors: list[Tensor]) -> None:
        run = command.run
        if run.kind != "prefill":
            self._prepare(run.kind, run.batch)

    @handles(wire.RunPass)
    def run(self, command: wire.RunPass, tensors: list[Tensor]) -> Answers | None:
        [given] = tensors
        batch = self._batch = command.batch
        self._rankings = []
        output: Tensor | None
        if command.kind == "prefill":
            output = self._passes.prefill(batch, given, project=command.project)
        elif command.kind == "decode":
            output = self._passes.decode(
                batch, given[:, 0].tolist() if self._sizes.is_first else given
            )
        else:
            parents, self._parents = self._parents, None
            if (parents is not None) != command.has_parents:
                raise WireError("a verify whose parents came twice, or not at all")
            output = self._passes.verify(batch, given, parents)
        self._input_is_queued()
        if not command.answers:
            return None
        # Devices may fill a chunk up to more rows; they are not sent.
        returned = [] if output is None else command.returns(self._sizes)
        return result(*[output[:, : shape[1]] for shape, _ in returned if output is not None])

    @handles(wire.RankLogits)
    def rank(self, command: wire.RankLogits, tensors: list[Tensor]) -> Answers:
        ranking = self._passes.logits(command.num_entries).rank(self._wanted(command, tensors))
        self._rankings.append(ranking)
        found = ranking.candidates()
        if not command.num_ranked:
            return [(answers.BestTokens(tuple(found.best.tolist())), ())]
        arrays = [found.best]
        if (block := found.block) is not None:
            arrays += [block.values, block.ids, block.masses]
            if (known := block.logprobs) is not None:
                arrays += [known.known, known.top_values, known.top_ids]
        return result(*map(torch.from_numpy, arrays))

    def _wanted(self, command: wire.RankLogits, tensors: list[Tensor]) -> RankRequest:
        """The expected tensors are those of RankLogits.payload, in its order."""
        given = iter(tensors)
        mass_at = tuple(next(given).tolist()) if command.num_masses else ()
        none = torch.empty(5, 0, dtype=torch.float64)
        edits = tuple(
            Edits(rows, (next(given) if num_edits else none).numpy())
            for rows, num_edits in command.edits
        )
        masks = None
        if command.num_masked:
            rows, words = (tensor.numpy() for tensor in given)
            if not 0 <= rows.min() <= rows.max() < command.num_entries * self._batch.num_rows:
                raise WireError(f"masks of rows {rows.min()} to {rows.max()}")
            masks = Masks(rows, words)
        num_ranked, num_top = command.num_ranked, command.num_top
        return RankRequest(edits, num_ranked, mass_at, num_top, masks, command.is_of_masked)

    @handles(wire.ReadRow)
    def read_row(self, command: wire.ReadRow, tensors: list[Tensor]) -> Answers:
        if command.what == "raw":
            logits = self._passes.logits(len(self._batch.lanes)).whole()
            return result(logits.reshape(-1, logits.shape[-1])[command.index].float())
        ranking = self._ranking(command.ranking)
        read = ranking.whole_row if command.what == "edited" else ranking.whole_logprobs
        row = read(command.index)
        return result(torch.from_numpy(row.values), torch.from_numpy(row.ids))

    @handles(wire.ReadLogprob)
    def read_logprob(self, command: wire.ReadLogprob, tensors: list[Tensor]) -> Answers:
        value = self._ranking(command.ranking).logprob(command.index, command.token)
        return [(answers.Scalar(value), ())]

    def _ranking(self, index: int) -> Ranking:
        if index >= len(self._rankings):
            raise WireError("a row was asked for before any was ranked")
        return self._rankings[index]

    @handles(wire.CommitPaths)
    def commit(self, command: wire.CommitPaths, tensors: list[Tensor]) -> None:
        self._passes.commit(self._paths(command.lengths, tensors))

    @handles(wire.ReadTaps)
    def read_taps(
        self, command: wire.ReadTaps, tensors: list[Tensor]
    ) -> Iterator[tuple[answers.Result, list[Tensor]]]:
        """One answer for each layer."""
        paths: Sequence[Sequence[int]] = [range(command.num_first)]
        if not command.num_first:
            paths = self._paths(command.lengths, tensors)
        found = self._passes.taps(paths)
        for tap in self._taps:
            rows = found[tap]
            if command.num_first:
                kept = rows[0, : command.num_first]
            else:
                kept = torch.cat([rows[i, [*path]] for i, path in enumerate(paths) if path])
            yield answers.Result(), [kept]

    def _paths(self, lengths: Sequence[int], tensors: list[Tensor]) -> list[list[int]]:
        """Rows of the last pass, of each entry."""
        if not tensors:
            return [[] for _ in lengths]
        [rows] = tensors
        if not 0 <= int(rows.min()) <= int(rows.max()) < self._batch.num_rows:
            raise WireError(f"a path beyond the {self._batch.num_rows} rows of its pass")
        return [part.tolist() for part in rows.split([*lengths])]

    @handles(wire.PlacePages)
    def place(self, command: wire.PlacePages, tensors: list[Tensor]) -> None:
        self._events += [
            PageEvent(lane, chunk, None if page < 0 else page)
            for lane, chunk, page in command.events
        ]
        if command.has_more:
            return
        events, self._events = self._events, []
        try:
            self._passes.place(command.epoch, events)
        except PageEventsOutOfOrder as error:
            raise WireError(str(error)) from None

    @handles(*wire.PASS_COMMANDS)
    def run_verb(self, command: wire.PassCommand, tensors: list[Tensor]) -> Answers | None:
        returned = command.run(self._passes, tensors)
        return None if returned is None else result(*returned)
