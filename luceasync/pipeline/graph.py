"""Passes of one shard as CUDA graphs, one for each shape: one launch instead of hundreds.

Owns the captured passes and their outputs, which are views of static memory and valid until the
next pass. Long prefill chunks run operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from luceasync.models.pass_rows import NO_LANE, Paths
from luceasync.models.precision import torch_dtype
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.capture import Capture, Captured
from luceasync.pipeline.captured_round import Accept, CapturedRound, compile_accept
from luceasync.pipeline.passes import Batch, DeviceRounds, PassInput, RoundWork, StepKind
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.shard import Shard
from luceasync.pipeline.static_inputs import (
    FedTokens,
    Feed,
    Feedback,
    StaticInputs,
    TreeInputs,
    VerifiedTokens,
    place_numbers,
)
from luceasync.pipeline.steps import EagerSteps
from luceasync.ranking.local import KnownBest, RankingKernels
from luceasync.ranking.logits import NO_TOKEN
from luceasync.ranking.proposals import Proposal

FEW_ROWS = 128  # of a short prefill chunk: for fewer rows the library uses other kernels
NUM_RANKED = 1024  # ranked tokens when drawing; other numbers near it use the same kernels
WARMUP_STEPS = 1  # on the capture stream, where libraries allocate their workspaces first


@dataclass(frozen=True, slots=True)
class DecodePass:
    """A decode step to capture; `feedback` if it feeds itself."""

    inputs: StaticInputs
    run: Callable[[], Tensor]
    feedback: Feedback | None


@dataclass(frozen=True, slots=True)
class TreePass:
    """A pass over trees of rows to capture; a verify pass also has what commits its rows and, if
    the shard has all layers, what finds its best tokens. Each captured function reads its own
    parameters first; those of a short prefill pass are sent to it."""

    inputs: TreeInputs
    run: Callable[[], Tensor]
    commit: Callable[[], None] | None = None
    found: VerifiedTokens | None = None


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A captured decode step. Its output is logits [size, vocab] after the last layer, otherwise
    the activation."""

    inputs: StaticInputs
    captured: Captured[Tensor]
    taps: dict[int, Tensor]
    feedback: Feedback | None

    def replay(self, shard: Shard) -> Tensor:
        """Run the step on its inputs and set the shard's taps."""
        self.captured.replay()
        shard.taps = self.taps
        return self.captured.output


@dataclass(frozen=True, slots=True)
class TreeStep:
    """A captured TreePass. Its output is logits [size, rows, vocab] or the activation."""

    inputs: TreeInputs
    captured: Captured[Tensor]
    taps: dict[int, Tensor]
    committed: Captured[None] | None
    found: VerifiedTokens | None = None

    def replay(self, shard: Shard) -> Tensor:
        """Run the pass on its inputs and set the shard's taps."""
        self.captured.replay()
        self.inputs.place.replayed()
        shard.taps = self.taps
        return self.captured.output

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the rows of `paths` of the last replay, a path for each entry."""
        assert self.committed is not None, "only verify passes commit"
        self.inputs.paths.put_numbers(self.inputs.path_numbers(paths))
        self.committed.replay()
        self.inputs.paths.replayed()


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A decode step launched before it was requested: of `batch`, with tokens `given` that the step
    before it fed. It has `found` the tokens after them."""

    batch: Batch
    given: FedTokens
    found: FedTokens

    def is_of(self, batch: Batch, given: PassInput) -> bool:
        """Whether this is the step that is requested now."""
        return (
            not isinstance(given, Tensor)
            and self.given.tokens == tuple(given)
            and self.batch == batch
        )


class DecodeSteps:
    """Decode steps of all sizes, and the one that runs ahead.

        run(a)        the host asks for step a; it feeds itself the best tokens
        run_ahead(b)  b is launched with those tokens, while the host still reads them
        run(b)        with the very tokens: b has run, nothing is launched
        run(c)        with others, or after any other pass: b's rows are overwritten

    `best`: the best tokens that the last step found.
    """

    def __init__(self, shard: Shard, *, changes_state: bool) -> None:
        """`changes_state`: a step cannot be undone because it changes recurrent state; no step runs
        ahead then."""
        self._shard = shard
        self._changes_state = changes_state
        self.best: FedTokens | None = None
        self._last: DecodeStep | None = None  # valid unless another pass has run since
        self._ahead: _Ahead | None = None

    def run(self, step: DecodeStep, batch: Batch, given: PassInput) -> None:
        """Run the step on this batch, unless it has run ahead."""
        ahead = self._ahead
        if ahead is not None and ahead.is_of(batch, given):
            self.best = ahead.found
        else:
            step.inputs.set(batch, given)
            self.best = self._launch(step)
        self._last, self._ahead = step, None

    def run_ahead(self, batch: Batch) -> None:
        """Launch the next step if the last one fed it all of its inputs; see Passes.

        The step writes one row after each lane's end, in a page that the lane has. If another pass
        comes instead, that row is never read: passes read below a lane's end, saves end there, and
        whatever moves the end (a step, a chunk, a commit) first writes the row again, after this
        step on the same stream. Copies of a restore also run after all queued work. Pages never
        pass from one lane to another. A window's new row replaces the row that left the window.
        """
        step, given, self._last = self._last, self.best, None
        if self._changes_state or step is None or given is None or not step.inputs.is_at(batch):
            return
        found = self._launch(step)
        assert found is not None, "the step before it fed itself"
        self._ahead = _Ahead(batch, given, found)

    def forget(self) -> None:
        """Another operation was queued in between: a step that has run ahead is not the next
        one."""
        self._last = self._ahead = None

    def close(self) -> None:
        """Free everything."""
        self.forget()
        self.best = None

    def _launch(self, step: DecodeStep) -> FedTokens | None:
        """Queue the step. Returns the best tokens that it feeds itself, if it does so."""
        step.replay(self._shard)
        if step.feedback is None:
            return None
        fed = step.feedback.send()
        step.inputs.fed(fed)
        return fed


class GraphedSteps:
    """All passes of `shard`: decode steps, verify passes and short prefill chunks captured in every
    shape of the plan, long prefill chunks operation by operation.

    The shard's weights and state must be at their final addresses.
    """

    def __init__(
        self,
        shard: Shard,
        capture: Capture,
        plan: Plan,
        spec: ModelSpec,
        bodies: RankingKernels,
        feed: Feed,
        accept: Accept,
    ) -> None:
        """`bodies`, `feed`, `accept`: those of the shard's device."""
        self._shard = shard
        self._bodies, self._feed, self._accept = bodies, feed, accept
        self._has_all = shard.plan.is_first and shard.plan.is_last
        self._decodes = DecodeSteps(shard, changes_state=not spec.can_rerun)
        self._capture = capture
        self._spec = spec
        self._dtype = torch_dtype(plan.precision.compute)
        self._long = EagerSteps(shard)
        self._verified: TreeStep | None = None
        self._rounds: dict[tuple[int, RoundWork], CapturedRound] = {}  # by number of entries
        self._best: KnownBest | None = None
        # The largest first, so that smaller ones fit into its memory.
        sizes = sorted(plan.decode_sizes, reverse=True)
        with shard.on_device():
            rows = plan.parallel * max(plan.verify_rows, default=0) if shard.plan.is_last else 0
            self._logits = torch.empty(rows, spec.vocab_size, device=shard.device)
            short = {n: self._short_pass(n) for n in sorted(shard.plan.short_rows, reverse=True)}
            verify = {
                (size, num_rows): self._verify_pass(size, num_rows)
                for num_rows in sorted(plan.verify_rows, reverse=True)
                for size in reversed(plan.verify_sizes(num_rows))
            }
            decode = {size: self._decode_pass(size) for size in sizes}
            of_trees = [*short.values(), *verify.values()]
            self._compile_ahead(of_trees, [*decode.values()], plan.prefill_chunk_tokens)
            # Short chunks by rows, verify passes by entries and rows, decode steps by entries.
            self._short = {num_rows: self._tree_step_of(each) for num_rows, each in short.items()}
            self._verify = {shape: self._tree_step_of(each) for shape, each in verify.items()}
            self._steps = {size: self._step_of(each) for size, each in decode.items()}

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        """Run a chunk, as a graph if it is short."""
        self.forget()
        num_rows = batch.num_rows
        step = next((self._short[size] for size in sorted(self._short) if size >= num_rows), None)
        # A graph attends to pages only, and returns the logits of one row.
        if (
            step is None
            or batch.scores
            or any(map(self._shard.cache.num_absent_tokens, batch.lanes))
        ):
            return self._long.prefill(batch, given, project=project)
        if batch.mark is not None:
            return self._in_two(batch, batch.mark, given, project=project)
        step.inputs.given[:, :num_rows].copy_(given, non_blocking=True)
        step.inputs.paths.send(step.inputs.path_numbers([range(num_rows)]))
        step.inputs.place.send(place_numbers(batch))
        output = step.replay(self._shard)
        if not self._shard.plan.is_last:
            return output[:, :num_rows]
        return output if project else None

    def _in_two(self, batch: Batch, mark: int, given: Tensor, *, project: bool) -> Tensor | None:
        """Run a short chunk with a mark as two chunks: a graph leaves state at its end only."""
        (lane,), (begin,), shard = batch.lanes, batch.begins, self._shard
        first = Batch(batch.lanes, batch.begins, mark)
        last = Batch(batch.lanes, (begin + mark,), batch.num_rows - mark)
        before = self.prefill(first, given[:, :mark], project=False)
        kept = None if before is None else before.clone()  # the next pass may overwrite it
        taps = {layer: rows[:, :mark].clone() for layer, rows in shard.taps.items()}
        shard.cache.copy_end_aside(lane)
        output = self.prefill(last, given[:, mark:], project=project)
        shard.taps = {
            layer: torch.cat([taps[layer], rows[:, : last.num_rows]], 1)
            for layer, rows in shard.taps.items()
        }
        shard.note_mark(batch)
        return output if kept is None or output is None else torch.cat([kept, output], 1)

    def decode(self, batch: Batch, given: PassInput) -> Tensor:
        """Run one row for each entry. `given`: tokens for the first shard, otherwise the
        activation.

        Returns the activation, or logits float32 [size, vocab] from the last shard. If the shard
        has all layers, the step also writes its best tokens to the next step's inputs: a greedy
        step then waits for no copy, and one that has run ahead is not run again.
        """
        step = self._steps[len(batch.lanes)]
        self._decodes.run(step, batch, given)
        self._best = self._decodes.best
        return step.captured.output

    @property
    def best(self) -> KnownBest | None:
        return self._best

    def run_ahead(self, batch: Batch) -> None:
        self._decodes.run_ahead(batch)

    def forget(self) -> None:
        self._decodes.forget()

    def verify(self, batch: Batch, given: Tensor, parents: Tensor | None) -> Tensor:
        """Run trees of rows: `given` int64 [size, rows]; logits [size, rows, vocab]."""
        self.forget()
        step = self._verified = self._verify[len(batch.lanes), batch.num_rows]
        step.inputs.set_parents(parents)
        step.inputs.given.copy_(given, non_blocking=True)
        step.inputs.place.put_numbers(place_numbers(batch))
        self._best = step.found
        return step.replay(self._shard)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the rows of `paths` of the last `verify`."""
        step, self._verified = self._verified, None
        assert step is not None, "commit follows verify, once"
        step.commit(paths)

    def captured_round(
        self, work: RoundWork, taps: Sequence[int], num_entries: int
    ) -> DeviceRounds | None:
        """A round for this many entries, captured at the first call; None: some layers are in other
        shards."""
        if not self._has_all:
            return None
        self.forget()
        key = num_entries, work
        if key not in self._rounds:
            logits = self._logits[: num_entries * work.num_rows].view(
                num_entries, work.num_rows, -1
            )
            parts = self._shard, self._capture, self._accept
            with self._shard.on_device():
                self._rounds[key] = CapturedRound(*parts, work, taps, logits)
        return self._rounds[key]

    def close(self) -> None:
        """Free graphs and static tensors once the device no longer reads parameters."""
        self._shard.platform.synchronize()
        self._decodes.close()
        self._steps.clear()
        self._verify.clear()
        self._short.clear()
        self._rounds.clear()
        self._verified = self._best = None
        self._logits = torch.empty(0)

    def prepare(self, kind: StepKind, batch: Batch) -> None:
        """Copy the place of the next step, which runs this batch, before its input is known."""
        self.forget()
        size = len(batch.lanes)
        if kind == "verify":
            self._verify[size, batch.num_rows].inputs.place.put_numbers(place_numbers(batch))
        else:
            self._steps[size].inputs.set_place(batch)

    @property
    def _activation(self) -> tuple[int, torch.dtype] | None:
        return None if self._shard.plan.is_first else (self._spec.hidden_size, self._dtype)

    def _compile_ahead(
        self, of_trees: Sequence[TreePass], decode: Sequence[DecodePass], chunk_tokens: int
    ) -> None:
        """Compile the kernels of all passes in parallel. Long chunks come first: one of their
        kernels takes the longest by far.
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
        if self._has_all:
            verified = {
                each.inputs.parents.shape[1] for each in of_trees if each.commit is not None
            }
            runs += [partial(compile_accept, self._accept, self._logits, rows) for rows in verified]
        runs += [each.run for each in of_trees]
        runs += [each.run for each in decode]
        runs += [each.commit for each in of_trees if each.commit is not None]
        with self._shard.few_layers():
            self._capture.compile_ahead(runs)
        read = [each.inputs.given for each in of_trees] + [each.inputs.given for each in decode]
        for given in read:
            given.zero_()  # the compiling runs left arbitrary values there, even NaN

    def _of_logits(self) -> list[Callable[[], object]]:
        """Functions that launch the kernels that run after the logits: best tokens, and ranked
        tokens with equal or different temperatures, with or without a proposal's tokens in front.
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
        return TreeStep(each.inputs, captured, taps, commit, each.found)

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
        num_all = size * num_rows
        logits = self._logits[:num_all].view(size, num_rows, -1)
        found = VerifiedTokens(num_all, inputs.place, shard.device) if self._has_all else None

        def run() -> Tensor:
            inputs.place.take()
            x = self._verified_rows(inputs)
            if not shard.plan.is_last:
                return x
            projected = shard.ends.project(x, logits)
            # Launching these kernels one by one would keep the host busy for long.
            if found is not None:
                columns = Proposal(inputs.given, inputs.parents).columns()
                found.take(self._bodies.best(projected.flatten(0, 1), columns, NO_TOKEN))
            return projected

        def commit() -> None:
            inputs.paths.take()
            shard.commit(self._paths(inputs))

        return TreePass(inputs, run, commit, found)

    def _short_pass(self, num_rows: int) -> TreePass:
        """A short chunk as a verify pass over a chain, whose first rows are committed at once.
        Returns the logits [1, 1, vocab] of the last committed row.
        """
        shard, inputs = self._shard, self._tree_inputs(1, num_rows)
        inputs.paths.send(inputs.path_numbers([range(1)]))  # no path would select row -1

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
        """The rows after the last layer, [size, rows, hidden]."""
        shard = self._shard
        trees = shard.trees(inputs.parents)
        positions = inputs.begins[:, None] + trees.depths
        x = shard.ends.embed(inputs.given) if shard.plan.is_first else inputs.given
        return shard.verify(x, shard.rows_from((), inputs.lanes, positions), trees)

    def _paths(self, inputs: TreeInputs) -> Paths:
        """The paths to commit, from the parameters on the device."""
        numbers = (inputs.lanes, inputs.begins, inputs.rows, inputs.counts)
        return self._shard.paths_from((), *numbers)
