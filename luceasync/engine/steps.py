"""The two kinds of step: a chunk of a prompt, or a decode step, and the tokens that come of it.

Owns the totals of both. Knows which generations a step is for, but neither who comes next nor what
is told.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from luceasync.engine.decoding import Decoding, choose_next
from luceasync.engine.sampling.choose import TIE_MARGIN, Ranked
from luceasync.engine.scheduler import Roster
from luceasync.engine.sequence import Generation
from luceasync.errors import HostMemorySpent
from luceasync.pipeline.paging import Paging
from luceasync.prefix_cache.cache import Prefixes
from luceasync.prefix_cache.lease import chunk_end
from luceasync.ranking.local import LocalLogits
from luceasync.ranking.logits import Logits, Wanted
from luceasync.request import Speculation, TokenLogprob

# What a step has left in lanes until its tokens are told: prefixes to keep, then lanes to free.
# Owns what is still to be done there. What is worth keeping is for `prefixes` to say.


class Leftovers:
    """Nothing may change a lane before `clear` was called."""

    def __init__(self, prefixes: Prefixes, roster: Roster, lanes: Paging) -> None:
        self._lanes = lanes
        self._prefixes = prefixes
        self._roster = roster
        self._prefilled: deque[Callable[[], None]] = deque()
        self._ended: deque[tuple[Generation, bool]] = deque()  # and whether to keep it
        self.are_told = False  # nobody waits for the tokens of what is left

    def __bool__(self) -> bool:
        return bool(self._prefilled or self._ended)

    def prefilled(self, generation: Generation, end: int, logits: Tensor | None) -> None:
        """The lane stands after the prompt's first `end` tokens; `logits` after its last one."""
        lane, lease = generation.lane, generation.lease
        assert lane is not None
        self._prefilled.append(partial(self._prefixes.prefilled, lease, lane, end, logits))

    def ended(self, generation: Generation) -> None:
        """It runs no more; its lane is free once what is in it has been kept."""
        self._ended.append((generation, generation.is_sound))

    def gave_way(self, generation: Generation, speculation: Speculation | None) -> None:
        """It leaves its lane to somebody else, and waits for another one: what the lane holds is
        kept, and taken up again then.
        """
        lane, lease = generation.lane, generation.lease
        assert lane is not None
        try:
            self._prefixes.finished(lease, lane, generation.num_committed)
        finally:
            try:
                self._lanes.vacate(lane)
            finally:
                generation.leave_lane(speculation)
                self._roster.wait_again(generation)
                self._roster.free(lane)
                self._prefixes.release(lease)
                self._prefixes.admit(generation.lease)

    def distrust(self) -> None:
        """A step has failed: nothing of what it left is kept."""
        self._prefilled.clear()
        self._ended = deque((generation, False) for generation, _ in self._ended)

    def told(self) -> None:
        """The ends have gone out; nothing, where they have left nothing."""
        self.are_told = bool(self)

    def clear(self) -> None:
        """Keep what is to be kept, and free the lanes of those that have ended."""
        self.are_told = False
        while self._prefilled:
            self._prefilled.popleft()()
        while self._ended:
            self._leave(*self._ended.popleft())

    def _leave(self, generation: Generation, is_kept: bool) -> None:
        lane = generation.lane
        assert lane is not None
        try:
            if not is_kept:
                self._prefixes.disown(generation.lease)
            elif not generation.is_restoring:
                is_cut = generation.prepared.detokenizer.stopped
                end = generation.num_committed
                self._prefixes.finished(generation.lease, lane, end, is_cut=is_cut)
        finally:  # a lane that could not be kept, or told of it, is free all the same
            try:
                self._lanes.vacate(lane)
            finally:
                generation.lane = None
                self._roster.free(lane)
                self._prefixes.release(generation.lease)


# How probable a prompt's own tokens were, told of each part of it as it is run. Owns how many
# tokens are scored at a time: their logits are all there at once. Knows no lanes.


SCORED_TOKENS = 128  # in one pass: 77 MB of logits with a vocabulary of 150,000
NUM_KNOWN = 64  # best tokens of a row whose log-probabilities come with it; others are asked for


def scored_end(begin: int, end: int) -> int:
    """Where a part of the chunk `[begin, end)` ends that is scored."""
    return min(end, begin + SCORED_TOKENS)


def score(generation: Generation, begin: int, end: int, logits: Logits) -> None:
    """Give the generation what follows from `logits` [end - begin], those after the prompt's tokens
    `[begin, end)`: of each token behind one of them its log-probability. The first has none, NaN.
    """
    prompt = generation.prepared.prompt.ids
    top = generation.prepared.request.prompt_top_logprobs
    assert top is not None, "its prompt is to be scored"
    if begin == 0:
        tokenizer = generation.prepared.tokenizer
        text, spelled = tokenizer.token_text(prompt[0]), tokenizer.token_bytes(prompt[0])
        generation.scored(TokenLogprob(text, spelled, math.nan))
    wanted = Wanted(num_ranked=NUM_KNOWN, num_top=top + TIE_MARGIN)
    ranking = logits.rank(wanted)
    ranked = Ranked((), logits.num_vocab, ranking, ranking.candidates())
    for row, token in enumerate(prompt[begin + 1 : end + 1]):
        generation.scored(generation.named(token, ranked.logprobs(row, token, top)))


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
