"""The two kinds of step: a chunk of a prompt, or a decode step, and the tokens that come of it.

Owns the totals of both. Knows which generations a step is for, but neither who comes next nor what
is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from luceasync.engine.decoding import Decoding, choose_next
from luceasync.engine.generation import Generation
from luceasync.engine.leftovers import Leftovers
from luceasync.engine.scoring import score, scored_end
from luceasync.errors import HostMemorySpent
from luceasync.keeping.chunks import chunk_end
from luceasync.keeping.prefixes import Prefixes
from luceasync.ranking.local import LocalLogits
from luceasync.ranking.logits import Logits


class Prefiller(Protocol):
    """What prefill asks of the target; luceasync.pipeline.backend.LayerSplitBackend is one."""

    def prefill(
        self,
        lane: int,
        begin: int,
        tokens: Sequence[int],
        *,
        project: bool,
        mark: int | None = None,
        scores: bool = False,
    ) -> Tensor | None: ...

    def logits_after(self, num_tokens: int) -> Logits: ...

    def reset(self, lane: int) -> None: ...


class Steps:
    """Each gives generations tokens, or ends them; what they leave in their lanes to keep goes to
    `leftovers`.
    """

    def __init__(
        self,
        target: Prefiller,
        decoding: Decoding,
        prefixes: Prefixes,
        leftovers: Leftovers,
        *,
        chunk_tokens: int,
        computes_beside: bool,
        synchronize: Callable[[], None],
    ) -> None:
        """See luceasync.engine.pump.Pump."""
        self._target = target
        self._decoding = decoding
        self._prefixes = prefixes
        self._leftovers = leftovers
        self._chunk_tokens = chunk_tokens
        self._computes_beside = computes_beside
        self._synchronize = synchronize
        self.num_prefilled_total = 0
        self.num_decoded_total = 0
        self.num_steps_total = 0

    def prefill(self, generation: Generation) -> bool:
        """One chunk of one prompt; whether it has something to tell now: its first token, which the
        last one gives, its end, or log-probabilities of the chunk.
        """
        prompt = generation.to_prefill
        begin = generation.num_prefilled
        end = chunk_end(begin, len(prompt), self._chunk_tokens, generation.lease.splits)
        scores = generation.is_scored
        end = scored_end(begin, end) if scores else end
        started = time.perf_counter()
        lane, mark = generation.lane, generation.lease.mark_within(begin, end)
        assert lane is not None
        is_last = end == len(prompt)
        try:
            logits = self._target.prefill(
                lane, begin, prompt[begin:end], project=is_last, mark=mark, scores=scores
            )
        except HostMemorySpent as error:
            generation.end("error", str(error), "kv_host_memory")
            return True
        self._decoding.prefilled(lane, begin, end - begin)
        generation.num_prefilled = end
        self.num_prefilled_total += end - begin
        self._leftovers.prefilled(generation, end, logits)
        if scores:
            score(generation, begin, end, self._target.logits_after(end - begin))
        if logits is not None:
            if self._computes_beside:  # what is kept costs nothing while the device is not done
                self._leftovers.clear()
            self._synchronize()  # the host needs them next, and the time is theirs
        generation.prefill_s += time.perf_counter() - started
        if logits is not None:
            num_run = end - generation.num_cached
            self._prefixes.observed("prefill_tokens_per_s", num_run, generation.prefill_s)
            begin_answer(generation, logits)
        return is_last or scores

    def decode(
        self, generations: Sequence[Generation], *, alone: bool, meanwhile: Callable[[], None]
    ) -> None:
        """One step for every decoding lane; `alone`: no prefill waits for its turn."""
        before, started = sum(g.num_generated for g in generations), time.perf_counter()
        try:
            self._decoding.step(generations, alone=alone, meanwhile=meanwhile)
        except HostMemorySpent as error:  # of one lane: the others take their step without it
            [spent] = [g for g in generations if g.lane == error.lane]
            spent.end("error", str(error), "kv_host_memory")
        for generation in generations:
            generation.turn_s += time.perf_counter() - started
        self.num_steps_total += 1
        self.num_decoded_total += sum(g.num_generated for g in generations) - before


def begin_answer(generation: Generation, logits: Tensor) -> None:
    """The first token, from the logits after the prompt, float32 [vocab]; the end where none is
    wanted.
    """
    if generation.prepared.max_tokens == 0:
        generation.end("length")
    else:
        choose_next([generation], LocalLogits(logits[None]))
