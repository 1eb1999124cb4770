"""Passes of one shard as CUDA graphs, one for each shape: one launch instead of hundreds.

Owns the captured passes and their outputs. Results are views of static memory: they hold until the
next pass. Long chunks of a prompt are run operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from luceasync.models.pass_rows import NO_LANE, Paths
from luceasync.models.precision import torch_dtype
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.capture import Capture, Captured
from luceasync.pipeline.passes import Batch, PassInput, StepKind
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.shard import Shard
from luceasync.pipeline.static_inputs import (
    FedTokens,
    Feed,
    Feedback,
    StaticInputs,
    TreeInputs,
    of_place,
)
from luceasync.pipeline.steps import EagerSteps
from luceasync.ranking.local import Bodies, FoundBest
from luceasync.ranking.logits import NO_TOKEN

FEW_ROWS = 128  # of a turn: before long blocks they have other kernels of the library
NUM_RANKED = 1024  # of most rows that are drawn from; few more or fewer have the same kernels
WARMUP_STEPS = 1  # on the stream of captures, whose libraries want their workspaces first


@dataclass(frozen=True, slots=True)
class DecodePass:
    """A decode step that is to be captured; `feedback` of one that feeds itself."""

    inputs: StaticInputs
    run: Callable[[], Tensor]
    feedback: Feedback | None


@dataclass(frozen=True, slots=True)
class TreePass:
    """A pass over trees of rows that is to be captured: of a verify pass also what commits its
    rows. Both take what they are told; a pass that commits at once is sent it.
    """

    inputs: TreeInputs
    run: Callable[[], Tensor]
    commit: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A captured decode step: logits [size, vocab] of the last shard or the activation, and taps.

    `feedback`: see Pass.
    """

    inputs: StaticInputs
    captured: Captured[Tensor]
    taps: dict[int, Tensor]
    feedback: Feedback | None

    def replay(self, shard: Shard) -> Tensor:
        """What the inputs have been told is run on their shard."""
        self.captured.replay()
        shard.taps = self.taps
        return self.captured.output


@dataclass(frozen=True, slots=True)
class TreeStep:
    """As above, of a TreePass: logits [size, rows, vocab]."""

    inputs: TreeInputs
    captured: Captured[Tensor]
    taps: dict[int, Tensor]
    committed: Captured[None] | None

    def replay(self, shard: Shard) -> Tensor:
        """As above."""
        self.captured.replay()
        self.inputs.place.replayed()
        shard.taps = self.taps
        return self.captured.output

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the rows of `paths`, one for each entry, of the last replay."""
        assert self.committed is not None, "of a verify pass"
        self.inputs.paths.put(self.inputs.of_paths(paths))
        self.committed.replay()
        self.inputs.paths.replayed()


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A decode step that was launched before it was asked for: of `batch`, with the tokens `given`,
    which the step before it has fed. It has `found` the next ones.
    """

    batch: Batch
    given: FedTokens
    found: FedTokens

    def is_of(self, batch: Batch, given: PassInput) -> bool:
        """Whether this is the step that is asked for."""
        return (
            not isinstance(given, Tensor)
            and self.given.tokens == tuple(given)
            and self.batch == batch
        )


class DecodeSteps:
    """Steps of a row for each entry, of all sizes. `best`: what the last one has found itself."""

    def __init__(self, shard: Shard, *, changes_state: bool) -> None:
        """`changes_state`: a step that was not wanted cannot be taken back, so none runs ahead."""
        self._shard = shard
        self._changes_state = changes_state
        self.best: FedTokens | None = None
        self._last: DecodeStep | None = None  # if no other pass has been since
        self._ahead: _Ahead | None = None

    def run(self, step: DecodeStep, batch: Batch, given: PassInput) -> None:
        """Have its output be that of this batch: it has run ahead, or is run."""
        ahead = self._ahead
        if ahead is not None and ahead.is_of(batch, given):
            self.best = ahead.found
        else:
            step.inputs.tell(batch, given)
            self.best = self._launch(step)
        self._last, self._ahead = step, None

    def run_ahead(self, batch: Batch) -> None:
        """See Passes. What it writes is the row behind the last one of each lane, in a page that
        the lane has. If another pass comes instead, nobody ever reads that row: rows are read below
        a lane's end, saves end there too, and who moves the end writes the row again behind this,
        on the same stream: a step, a chunk, a commit. So does a restore, whose copies come after
        all that is queued. No page of a lane is given to another one.
        """
        step, given, self._last = self._last, self.best, None
        if self._changes_state or step is None or given is None or not step.inputs.is_at(batch):
            return
        found = self._launch(step)
        assert found is not None, "it has fed itself before"
        self._ahead = _Ahead(batch, given, found)

    def forget(self) -> None:
        """Something else comes: what has run ahead is not what follows."""
        self._last = self._ahead = None

    def close(self) -> None:
        """Let go of everything."""
        self.forget()
        self.best = None

    def _launch(self, step: DecodeStep) -> FedTokens | None:
        """What its inputs hold is run; what it has fed itself."""
        step.replay(self._shard)
        if step.feedback is None:
            return None
        fed = step.feedback.send()
        step.inputs.fed(fed)
        return fed


class GraphedSteps:
    """Decode steps and verify passes of `shard` in every shape of the plan: see Stage.

    The shard must have come to rest: its weights and state are at their final places.
    """

    def __init__(
        self,
        shard: Shard,
        capture: Capture,
        plan: Plan,
        spec: ModelSpec,
        bodies: Bodies,
        feed: Feed,
    ) -> None:
        """`bodies`, `feed`: for the shard's device."""
        self._shard = shard
        self._bodies, self._feed = bodies, feed
        self._has_all = shard.plan.is_first and shard.plan.is_last
        self._decodes = DecodeSteps(shard, changes_state=spec.has_end_state)
        self._capture = capture
        self._spec = spec
        self._dtype = torch_dtype(plan.precision.compute)
        self._long = EagerSteps(shard)
        self._verified: TreeStep | None = None
        # The largest first: the smaller ones then fit into its memory.
        sizes = sorted(plan.decode_sizes, reverse=True)
        with shard.on_device():
            rows = plan.parallel * max(plan.verify_rows, default=0) if shard.plan.is_last else 0
            self._logits = torch.empty(rows, spec.vocab_size, device=shard.device)
            short = {n: self._short_pass(n) for n in sorted(shard.plan.short_rows, reverse=True)}
            verify = {
                (size, num_rows): self._verify_pass(size, num_rows)
                for num_rows in sorted(plan.verify_rows, reverse=True)
                for size in sizes
            }
            decode = {size: self._decode_pass(size) for size in sizes}
            of_trees = [*short.values(), *verify.values()]
            self._compile_ahead(of_trees, [*decode.values()], plan.prefill_chunk_tokens)
            # Chunks of a prompt, by rows; proposals, by entries and rows; decode steps, by entries.
            self._short = {num_rows: self._tree_step_of(each) for num_rows, each in short.items()}
            self._verify = {shape: self._tree_step_of(each) for shape, each in verify.items()}
            self._steps = {size: self._step_of(each) for size, each in decode.items()}

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        """Rows of one lane; see Stage. How they are run follows from their number."""
        self.forget()
        num_rows = batch.num_rows
        step = next((self._short[size] for size in sorted(self._short) if size >= num_rows), None)
        # A graph reads pages alone, and gives the logits of one row.
        if (
            step is None
            or batch.scores
            or any(map(self._shard.cache.num_absent_tokens, batch.lanes))
        ):
            return self._long.prefill(batch, given, project=project)
        if batch.mark is not None:
            return self._in_two(batch, batch.mark, given, project=project)
        step.inputs.given[:, :num_rows].copy_(given, non_blocking=True)
        step.inputs.paths.send(step.inputs.of_paths([range(num_rows)]))
        step.inputs.place.send(of_place(batch))
        output = step.replay(self._shard)
        if not self._shard.plan.is_last:
            return output[:, :num_rows]
        return output if project else None

    def _in_two(self, batch: Batch, mark: int, given: Tensor, *, project: bool) -> Tensor | None:
        """A short chunk with a mark, as two: a captured pass gives the state at its end alone."""
        (lane,), (begin,), shard = batch.lanes, batch.begins, self._shard
        first = Batch(batch.lanes, batch.begins, mark)
        last = Batch(batch.lanes, (begin + mark,), batch.num_rows - mark)
        before = self.prefill(first, given[:, :mark], project=False)
        kept = None if before is None else before.clone()  # the next pass may write there
        taps = {layer: rows[:, :mark].clone() for layer, rows in shard.taps.items()}
        shard.cache.leave_aside(lane)
        output = self.prefill(last, given[:, mark:], project=project)
        shard.taps = {
            layer: torch.cat([taps[layer], rows[:, : last.num_rows]], 1)
            for layer, rows in shard.taps.items()
        }
        shard.passed(batch)
        return output if kept is None or output is None else torch.cat([kept, output], 1)

    def decode(self, batch: Batch, given: PassInput) -> Tensor:
        """One row for each entry. `given`: tokens for the first shard, else the activation.

        Returns the activation, or logits float32 [size, vocab] from the last shard. Where that is
        the first one too, the step leaves the best tokens where the next one reads them: a greedy
        step then waits for no copy, and one that has run ahead need not be run at all.
        """
        step = self._steps[len(batch.lanes)]
        self._decodes.run(step, batch, given)
        return step.captured.output

    @property
    def best(self) -> FoundBest | None:
        return self._decodes.best

    def run_ahead(self, batch: Batch) -> None:
        self._decodes.run_ahead(batch)

    def forget(self) -> None:
        self._decodes.forget()

    def verify(self, batch: Batch, given: Tensor, parents: Tensor | None) -> Tensor:
        """As above, of trees of rows: `given` int64 [size, rows], logits [size, rows, vocab]."""
        self.forget()
        step = self._verified = self._verify[len(batch.lanes), batch.num_rows]
        step.inputs.hang(parents)
        step.inputs.given.copy_(given, non_blocking=True)
        step.inputs.place.put(of_place(batch))
        return step.replay(self._shard)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep what `paths` say of the last `verify`."""
        step, self._verified = self._verified, None
        assert step is not None, "commit follows verify, once"
        step.commit(paths)

    def close(self) -> None:
        """Let graphs and static tensors go, once nothing takes what it is told any more."""
        self._shard.platform.synchronize()
        self._decodes.close()
        self._steps.clear()
        self._verify.clear()
        self._short.clear()
        self._verified = None
        self._logits = torch.empty(0)

    def prepare(self, kind: StepKind, batch: Batch) -> None:
        """A step of this very batch comes next: its place is told now."""
        self.forget()
        size = len(batch.lanes)
        if kind == "verify":
            self._verify[size, batch.num_rows].inputs.place.put(of_place(batch))
        else:
            self._steps[size].inputs.tell_place(batch)

    @property
    def _activation(self) -> tuple[int, torch.dtype] | None:
        return None if self._shard.plan.is_first else (self._spec.hidden_size, self._dtype)

    def _compile_ahead(
        self, of_trees: Sequence[TreePass], decode: Sequence[DecodePass], chunk_tokens: int
    ) -> None:
        """What all passes launch, beside each other; those of long chunks are the first to begin,
        since one of their kernels takes the longest by far.
        """
        width = () if self._shard.plan.is_first else (self._spec.hidden_size,)
        dtype = torch.int64 if self._shard.plan.is_first else self._dtype
        chunk = Batch((NO_LANE,), (0,), chunk_tokens)
        rows = torch.zeros((1, chunk_tokens, *width), dtype=dtype, device=self._shard.device)
        runs: list[Callable[[], object]] = [lambda: self._long.prefill(chunk, rows, project=True)]
        if self._shard.plan.is_last:
            runs += self._of_logits()
        if self._shard.past is not None:
            few = replace(chunk, num_rows=min(FEW_ROWS, chunk_tokens))
            runs.append(lambda: self._long.rehearse_past(chunk, rows))
            runs.append(lambda: self._long.rehearse_past(few, rows[:, : few.num_rows]))
        runs += [each.run for each in of_trees]
        runs += [each.run for each in decode]
        runs += [each.commit for each in of_trees if each.commit is not None]
        self._capture.compile_ahead(runs)
        read = [each.inputs.given for each in of_trees] + [each.inputs.given for each in decode]
        for given in read:
            given.zero_()  # products in place left anything there, also NaN

    def _of_logits(self) -> list[Callable[[], object]]:
        """What no step itself looks at: edited and masked logits, and those that are drawn from, of
        lanes that agree on a temperature, or not; and behind a proposal.
        """
        shape, device = (2, self._spec.vocab_size), self._shard.device
        logits = torch.empty(shape, device=device)
        carry = torch.zeros(2, 1, dtype=torch.int64, device=device)
        bodies = self._bodies
        return [
            lambda: bodies.best(logits[:1], None, NO_TOKEN),
            lambda: bodies.highest(logits[:1], None, NUM_RANKED, (1.0,), NO_TOKEN),
            lambda: bodies.highest(logits, carry, NUM_RANKED, (1.0, 0.5), NO_TOKEN),
        ]

    def _step_of(self, each: DecodePass) -> DecodeStep:
        captured = self._capture(each.run, num_warmups=WARMUP_STEPS)
        return DecodeStep(each.inputs, captured, self._shard.taps, each.feedback)

    def _tree_step_of(self, each: TreePass) -> TreeStep:
        captured = self._capture(each.run, num_warmups=WARMUP_STEPS)
        taps, commit = self._shard.taps, None
        if each.commit is not None:
            commit = self._capture(each.commit, num_warmups=WARMUP_STEPS)
        return TreeStep(each.inputs, captured, taps, commit)

    def _decode_pass(self, size: int) -> DecodePass:
        shard, inputs = self._shard, StaticInputs(size, self._shard.device, self._activation)
        lanes, positions = inputs.place
        feedback = Feedback(size, shard.device) if self._has_all else None

        def run() -> Tensor:
            x = shard.ends.embed(inputs.given) if shard.plan.is_first else inputs.given
            x = shard.forward(x, shard.rows_from((), lanes, positions[:, None]))
            if not shard.plan.is_last:
                return x
            logits = shard.ends.project(x)[:, 0]
            if feedback is not None:
                self._feed(logits, inputs.given, inputs.place, feedback.found, NO_TOKEN)
            return logits

        return DecodePass(inputs, run, feedback)

    def _verify_pass(self, size: int, num_rows: int) -> TreePass:
        shard, inputs = self._shard, self._tree_inputs(size, num_rows)
        logits = self._logits[: size * num_rows].view(size, num_rows, -1)

        def run() -> Tensor:
            inputs.place.take()
            x = self._verified_rows(inputs)
            return shard.ends.project(x, logits) if shard.plan.is_last else x

        def commit() -> None:
            inputs.paths.take()
            shard.commit(self._paths(inputs))

        return TreePass(inputs, run, commit)

    def _short_pass(self, num_rows: int) -> TreePass:
        """A chunk as a verify pass of a chain of which the first rows, as many as there are, are
        committed at once. Gives the logits [1, 1, vocab] of the last of them.
        """
        shard, inputs = self._shard, self._tree_inputs(1, num_rows)
        inputs.paths.send(inputs.of_paths([range(1)]))  # row -1 is none

        def run() -> Tensor:
            x = self._verified_rows(inputs)
            shard.commit(self._paths(inputs))
            if not shard.plan.is_last:
                return x
            return shard.ends.project(x.index_select(1, inputs.counts - 1))

        return TreePass(inputs, run)

    def _tree_inputs(self, size: int, num_rows: int) -> TreeInputs:
        return TreeInputs(size, num_rows, self._shard.device, self._activation)

    def _verified_rows(self, inputs: TreeInputs) -> Tensor:
        """The rows behind the last layer, [size, rows, hidden]."""
        shard = self._shard
        trees = shard.trees(inputs.parents)
        positions = inputs.begins[:, None] + trees.depths
        x = shard.ends.embed(inputs.given) if shard.plan.is_first else inputs.given
        return shard.verify(x, shard.rows_from((), inputs.lanes, positions), trees)

    def _paths(self, inputs: TreeInputs) -> Paths:
        """What is to be committed, as far as the device is told."""
        told = (inputs.lanes, inputs.begins, inputs.rows, inputs.counts)
        return self._shard.paths_from((), *told)
