"""The two kinds of step: a prefill chunk of one prompt, or a decode step for all decoding lanes.

Owns their totals. Knows which generations a step is for, but not which is next or how tokens are
delivered.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from luceasync.engine.decoding import LaneDecoding, choose_next, takes_best
from luceasync.engine.sampling.choose import TIE_MARGIN, RankedRows
from luceasync.engine.sequence import Generation
from luceasync.errors import LaneMemoryExhausted
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.transfer import HostCopy
from luceasync.prefix_cache.lease import chunk_end
from luceasync.ranking.local import LocalLogits
from luceasync.ranking.logits import Logits, RankRequest
from luceasync.request import TokenLogprob
from luceasync.status import ExpertsStatus

SCORED_TOKENS = 128  # in one pass: 77 MB of logits with a vocabulary of 150,000
# Best tokens of a row that are fetched with its log-probabilities; more are requested.
NUM_KNOWN = 64


class Steps:
    """Passes over the target. Each gives generations tokens, or ends them."""

    def __init__(
        self,
        target: LayerSplitBackend,
        decoding: LaneDecoding,
        *,
        chunk_tokens: int,
        synchronize: Callable[[], None],
    ) -> None:
        """`chunk_tokens`: of a prefill chunk. `synchronize` waits until the device that computes
        the logits is done."""
        self._target = target
        self.decoding = decoding
        self._chunk_tokens = chunk_tokens
        self._synchronize = synchronize
        self.num_prefilled_total = 0
        self.num_decoded_total = 0
        self.num_steps_total = 0

    @property
    def experts(self) -> ExpertsStatus | None:
        """Figures of experts that wait in host memory; None: there are none. May be called from any
        thread."""
        counts = self._target.expert_counts()
        if not counts:
            return None
        hits, misses, read_through = (counts[name] for name in ("hits", "misses", "read through"))
        return ExpertsStatus(hits, misses, read_through, counts["bytes"])

    def empty(self, lane: int) -> None:
        """Reset the lane to its initial state."""
        self._target.reset(lane)
        self.decoding.start(lane)

    def prefill(
        self,
        generation: Generation,
        queued: Callable[[int, Tensor | None], None],
        *,
        fetches: bool = False,
        is_late: bool = False,
    ) -> bool:
        """Run one chunk of a prompt. Returns whether there is something to deliver: the first
        token, which the last chunk yields, an end, or log-probabilities of the chunk.

        `queued(end, logits)` is called when the pass is queued, before the host waits for
        `logits`: the lane then holds the prompt's first `end` tokens. `logits` float32 [vocab], of
        the last chunk alone. `fetches`: they are copied to the host, where the best token is found
        while a drafter may still take up the prompt. `is_late`: `queued` is called with this copy.
        """
        prompt = generation.to_prefill
        begin = generation.num_prefilled
        end = chunk_end(begin, len(prompt), self._chunk_tokens, generation.lease.splits)
        scores = generation.is_scored
        end = min(end, begin + SCORED_TOKENS) if scores else end
        started = time.perf_counter()
        lane, mark = generation.on_lane, generation.lease.mark_within(begin, end)
        if mark is not None and not self._target.sets_ends_aside:
            end, mark = mark, None
        is_last = end == len(prompt)
        try:
            logits = self._target.prefill(
                lane, begin, prompt[begin:end], project=is_last, mark=mark, scores=scores
            )
        except LaneMemoryExhausted as error:
            generation.end("error", str(error), "kv_host_memory")
            return True
        coming = HostCopy(logits) if fetches and logits is not None else None
        self.decoding.prefilled(lane, begin, end - begin)
        generation.num_prefilled = end
        self.num_prefilled_total += end - begin
        if scores:
            score(generation, begin, end, self._target.logits_after(end - begin))
        if coming is None or not is_late:
            queued(end, logits)
        # The host needs the logits next, and the device's time counts as prefill.
        if coming is not None:
            here = torch.from_numpy(coming.fetch())
            logits = here if takes_best(generation) else logits
            if is_late:
                queued(end, here)
        elif logits is not None:
            self._synchronize()
        generation.prefill_s += time.perf_counter() - started
        if logits is not None:
            begin_answer(generation, logits)
        return is_last or scores

    def decode(
        self, generations: Sequence[Generation], *, alone: bool, meanwhile: Callable[[], None]
    ) -> None:
        """One step for every decoding lane; `alone`: no prefill waits for its turn. `meanwhile` is
        called while the device works.
        """
        before, started = sum(g.num_generated for g in generations), time.perf_counter()
        try:
            self.decoding.step(generations, alone=alone, meanwhile=meanwhile)
        except LaneMemoryExhausted as error:  # of one lane: the others take their step without it
            [spent] = [g for g in generations if g.lane == error.lane]
            spent.end("error", str(error), "kv_host_memory")
        for generation in generations:
            generation.turn_s += time.perf_counter() - started
        self.num_steps_total += 1
        self.num_decoded_total += sum(g.num_generated for g in generations) - before


def begin_answer(generation: Generation, logits: Tensor) -> None:
    """Choose the first token from the logits after the prompt, float32 [vocab]; end the generation
    if none is wanted.
    """
    if generation.prepared.max_tokens == 0:
        generation.end("length")
    else:
        choose_next([generation], LocalLogits(logits[None]))


def score(generation: Generation, begin: int, end: int, logits: Logits) -> None:
    """Give the generation the log-probabilities of the prompt's tokens `[begin + 1, end + 1)`.
    `logits` [end - begin]: those after the tokens `[begin, end)`. The very first token has none:
    NaN."""
    prompt = generation.prepared.prompt.ids
    top = generation.prepared.request.prompt_top_logprobs
    assert top is not None, "its prompt is to be scored"
    if begin == 0:
        tokenizer = generation.prepared.tokenizer
        text, spelled = tokenizer.token_text(prompt[0]), tokenizer.token_bytes(prompt[0])
        generation.scored(TokenLogprob(text, spelled, math.nan))
    request = RankRequest(num_ranked=NUM_KNOWN, num_top=top + TIE_MARGIN)
    ranking = logits.rank(request)
    ranked = RankedRows((), logits.num_vocab, ranking, ranking.candidates())
    for row, token in enumerate(prompt[begin + 1 : end + 1]):
        generation.scored(generation.named(token, ranked.logprobs(row, token, top)))
