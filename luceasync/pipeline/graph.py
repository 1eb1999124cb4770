"""Passes of one shard as CUDA graphs, one for each shape: one launch instead of hundreds.

Owns the captured passes and their outputs. Results are views of static memory: they hold until the
next pass. Long chunks of a prompt are run operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from luceasync.models.pass_rows import NO_LANE, Paths
from luceasync.models.precision import torch_dtype
from luceasync.models.spec import ModelSpec
from luceasync.models.trees import chain
from luceasync.pipeline.capture import Capture, Captured
from luceasync.pipeline.eager import EagerSteps
from luceasync.pipeline.passes import Batch, Given, StepKind
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.shard import Shard
from luceasync.pipeline.static_inputs import Fed, Feed, Feedback, StaticInputs
from luceasync.pipeline.transfer import on_host
from luceasync.ranking.local import BestTokens
from luceasync.ranking.logits import NO_TOKEN

FEW_ROWS = 128  # of a turn: before long blocks they have other kernels of the library
WARMUP_STEPS = 1  # on the stream of captures, whose libraries want their workspaces first


@dataclass(frozen=True, slots=True)
class _Pass:
    """What is to be captured: of a verify pass also what commits its rows. `feedback` of a decode
    step that feeds itself.
    """

    inputs: StaticInputs
    run: Callable[[], Tensor]
    commit: Callable[[], None] | None = None
    feedback: Feedback | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """A captured pass: logits [size, rows, vocab] of the last shard or the activation, and taps.

    `commit` is captured for verify passes; `feedback`: see _Pass.
    """

    inputs: StaticInputs
    captured: Captured[Tensor]
    taps: dict[int, Tensor]
    commit: Captured[None] | None
    feedback: Feedback | None


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A decode step that was launched before it was asked for: of `batch`, with the tokens `given`,
    which the step before it has fed. It has `found` the next ones.
    """

    step: _Step
    batch: Batch
    given: Fed
    found: Fed

    def is_of(self, batch: Batch, given: Given) -> bool:
        """Whether this is the step that is asked for."""
        return (
            not isinstance(given, Tensor)
            and self.given.tokens == tuple(given)
            and self.batch == batch
        )


class GraphedShard:
    """Decode steps and verify passes of `shard` in every shape of the plan: see Group.

    The shard must have come to rest: its weights and state are at their final places.
    """

    def __init__(
        self,
        shard: Shard,
        capture: Capture,
        plan: Plan,
        spec: ModelSpec,
        best_tokens: BestTokens,
        feed: Feed,
    ) -> None:
        """`best_tokens`, `feed`: bodies for the shard's device."""
        self._shard = shard
        self._best_tokens, self._feed = best_tokens, feed
        self._has_all = shard.plan.is_first and shard.plan.is_last
        # A state that changes with every token cannot be taken back where a step was not wanted.
        self._runs_ahead = self._has_all and not spec.has_end_state
        self.best: Fed | None = None  # of the last decode
        self._next: _Step | None = None  # the last pass, if it has fed itself what comes next
        self._ahead: _Ahead | None = None
        self._capture = capture
        self._spec = spec
        self._dtype = torch_dtype(plan.precision.compute)
        self._long = EagerSteps(shard)
        self._verified: _Step | None = None
        self._with_trees: set[tuple[int, int]] = set()  # steps whose parents are no chain now
        # The largest first: the smaller ones then fit into its memory.
        sizes = sorted(plan.decode_sizes, reverse=True)
        with shard.on_device():
            rows = plan.parallel * max(plan.verify_rows, default=0) if shard.plan.is_last else 0
            self._logits = torch.empty(rows, spec.vocab_size, device=shard.device)
            short = {n: self._short_pass(n) for n in sorted(shard.plan.short_rows, reverse=True)}
            passes = {
                (size, num_rows): self._verify_pass(size, num_rows)
                for num_rows in sorted(plan.verify_rows, reverse=True)
                for size in sizes
            }
            passes |= {(size, 0): self._decode_pass(size) for size in sizes}
            self._compile_ahead([*short.values(), *passes.values()], plan.prefill_chunk_tokens)
            # Chunks of a prompt, by rows; then by entries and rows, decode steps as of none.
            self._short = {num_rows: self._step_of(each) for num_rows, each in short.items()}
            self._steps = {shape: self._step_of(each) for shape, each in passes.items()}

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        """Rows of one lane; see Group. How they are run follows from their number."""
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
        step.inputs.rows[-1:].copy_(on_host([num_rows], np.int32), non_blocking=True)
        step.inputs.tell_place(batch)
        output = self._replay(step)
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

    def decode(self, batch: Batch, given: Given) -> Tensor:
        """One row for each entry. `given`: tokens for the first shard, else the activation.

        Returns the activation, or logits float32 [size, vocab] from the last shard. Where that is
        the first one too, the step leaves the best tokens where the next one reads them: a greedy
        step then waits for no copy, and one that has run ahead need not be run at all.
        """
        ahead = self._ahead
        self.forget()
        if ahead is not None and ahead.is_of(batch, given):
            step, self.best = ahead.step, ahead.found
        else:
            step = self._steps[len(batch.lanes), 0]
            step.inputs.tell(batch, given)
            self.best = self._decode(step)
        self._next = step if self._runs_ahead else None
        return step.captured.output

    def run_ahead(self, batch: Batch) -> None:
        """See Passes. What it writes is the row behind the last one of each lane, in a page that
        the lane has. If another step comes instead, nobody ever reads it: rows are read below a
        lane's end only, saves end there too, and who makes the end grow writes that row again,
        in the order of the stream: a step, a chunk, a commit. So does a restore: its copies come
        after all that is queued. A page is given to no other lane.
        """
        step, given, self._next = self._next, self.best, None
        if step is None or given is None or not step.inputs.is_at(batch):
            return
        found = self._decode(step)
        assert found is not None, "it feeds itself"
        self._ahead = _Ahead(step, batch, given, found)

    def forget(self) -> None:
        """What has run ahead, or could, is not what comes next."""
        self._next = self._ahead = None

    def _decode(self, step: _Step) -> Fed | None:
        """What its inputs hold is run; what it has fed itself."""
        self._replay(step)
        if step.feedback is None:
            return None
        fed = step.feedback.send()
        step.inputs.fed(fed)
        return fed

    def verify(self, batch: Batch, given: Tensor, parents: Tensor | None) -> Tensor:
        """As above, of trees of rows: `given` int64 [size, rows], logits [size, rows, vocab]."""
        self.forget()
        shape = len(batch.lanes), batch.num_rows
        step = self._verified = self._steps[shape]
        if parents is not None:
            step.inputs.parents.copy_(parents, non_blocking=True)
            self._with_trees.add(shape)
        elif shape in self._with_trees:
            step.inputs.parents.copy_(chain(*shape, self._shard.device))
            self._with_trees.remove(shape)
        step.inputs.tell(batch, given)
        return self._replay(step)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep what `paths` say of the last `verify`."""
        step, self._verified = self._verified, None
        assert step is not None and step.commit is not None, "commit follows verify, once"
        num_rows = step.inputs.parents.shape[1]
        filled = [row for path in paths for row in [*path, *[0] * (num_rows - len(path))]]
        step.inputs.rows.copy_(on_host([*filled, *map(len, paths)], np.int32), non_blocking=True)
        step.commit.replay()

    def close(self) -> None:
        """Let graphs and static tensors go."""
        self.forget()
        self._steps.clear()
        self._short.clear()
        self._verified = self.best = None
        self._logits = torch.empty(0)

    def prepare(self, kind: StepKind, batch: Batch) -> None:
        """A step of this very batch comes next: its place goes to the device now."""
        self.forget()
        num_rows = batch.num_rows if kind == "verify" else 0
        self._steps[len(batch.lanes), num_rows].inputs.tell_place(batch)

    def _replay(self, step: _Step) -> Tensor:
        """What the inputs have been told is run."""
        step.captured.replay()
        self._shard.taps = step.taps
        return step.captured.output

    def _inputs(self, size: int, num_rows: int) -> StaticInputs:
        activation = None if self._shard.plan.is_first else (self._spec.hidden_size, self._dtype)
        return StaticInputs(size, num_rows, self._shard.device, activation)

    def _compile_ahead(self, passes: Sequence[_Pass], chunk_tokens: int) -> None:
        """What all passes launch, beside each other; those of long chunks are the first to begin,
        since one of their kernels takes the longest by far.
        """
        width = () if self._shard.plan.is_first else (self._spec.hidden_size,)
        dtype = torch.int64 if self._shard.plan.is_first else self._dtype
        chunk = Batch((NO_LANE,), (0,), chunk_tokens)
        rows = torch.zeros((1, chunk_tokens, *width), dtype=dtype, device=self._shard.device)
        runs: list[Callable[[], object]] = [lambda: self._long.prefill(chunk, rows, project=True)]
        if self._has_all:  # edited and masked logits are not for a step itself to look at
            logits = torch.empty(1, self._spec.vocab_size, device=self._shard.device)
            runs.append(lambda: self._best_tokens(logits, None, NO_TOKEN))
        if self._shard.past is not None:
            few = replace(chunk, num_rows=min(FEW_ROWS, chunk_tokens))
            runs.append(lambda: self._long.rehearse_past(chunk, rows))
            runs.append(lambda: self._long.rehearse_past(few, rows[:, : few.num_rows]))
        runs += [each.run for each in passes]
        runs += [each.commit for each in passes if each.commit is not None]
        self._capture.compile_ahead(runs)
        for each in passes:
            each.inputs.given.zero_()  # products in place left anything there, also NaN

    def _step_of(self, each: _Pass) -> _Step:
        captured = self._capture(each.run, num_warmups=WARMUP_STEPS)
        taps, commit = self._shard.taps, None
        if each.commit is not None:
            commit = self._capture(each.commit, num_warmups=WARMUP_STEPS)
        return _Step(each.inputs, captured, taps, commit, each.feedback)

    def _decode_pass(self, size: int) -> _Pass:
        shard, inputs = self._shard, self._inputs(size, 1)
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

        return _Pass(inputs, run, feedback=feedback)

    def _verify_pass(self, size: int, num_rows: int) -> _Pass:
        shard, inputs = self._shard, self._inputs(size, num_rows)
        lanes, begins = inputs.place
        logits = self._logits[: size * num_rows].view(size, num_rows, -1)

        def run() -> Tensor:
            trees = shard.trees(inputs.parents)
            positions = begins[:, None] + trees.depths
            x = shard.ends.embed(inputs.given) if shard.plan.is_first else inputs.given
            x = shard.verify(x, shard.rows_from((), lanes, positions), trees)
            return shard.ends.project(x, logits) if shard.plan.is_last else x

        return _Pass(inputs, run, lambda: shard.commit(self._paths(inputs)))

    def _short_pass(self, num_rows: int) -> _Pass:
        """A chunk as a verify pass of a chain of which the first rows, as many as there are, are
        committed at once. Gives the logits [1, 1, vocab] of the last of them.
        """
        shard, inputs = self._shard, self._inputs(1, num_rows)
        lanes, begins = inputs.place
        inputs.rows[:num_rows] = torch.arange(num_rows)
        inputs.rows[-1] = 1  # row -1 is none

        def run() -> Tensor:
            trees = shard.trees(inputs.parents)
            positions = begins[:, None] + trees.depths
            x = shard.ends.embed(inputs.given) if shard.plan.is_first else inputs.given
            x = shard.verify(x, shard.rows_from((), lanes, positions), trees)
            paths = self._paths(inputs)
            shard.commit(paths)
            return (
                shard.ends.project(x.index_select(1, paths.counts - 1)) if shard.plan.is_last else x
            )

        return _Pass(inputs, run)

    def _paths(self, inputs: StaticInputs) -> Paths:
        """What is to be committed, as far as the device is told."""
        (size, num_rows), (lanes, begins) = inputs.parents.shape, inputs.place
        rows, counts = inputs.rows.split([size * num_rows, size])
        return self._shard.paths_from((), lanes, begins, rows.view(size, -1), counts)
