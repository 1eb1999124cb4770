"""Captured passes of a shard, and its decode steps, which may begin before they are asked for.

Owns which step has run ahead. Knows neither what a pass computes nor how it was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from luceasync.pipeline.capture import Captured
from luceasync.pipeline.passes import Batch, Given
from luceasync.pipeline.shard import Shard
from luceasync.pipeline.static_inputs import Fed, Feedback, StaticInputs, TreeInputs


@dataclass(frozen=True, slots=True)
class Pass:
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
class Step:
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
    given: Fed
    found: Fed

    def is_of(self, batch: Batch, given: Given) -> bool:
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
        self.best: Fed | None = None
        self._last: Step | None = None  # if no other pass has been since
        self._ahead: _Ahead | None = None

    def run(self, step: Step, batch: Batch, given: Given) -> None:
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

    def _launch(self, step: Step) -> Fed | None:
        """What its inputs hold is run; what it has fed itself."""
        step.replay(self._shard)
        if step.feedback is None:
            return None
        fed = step.feedback.send()
        step.inputs.fed(fed)
        return fed
