"""One choice of one request, from the queue to its last token. Lives in the engine thread.

Owns the choice's tokens, text and clock. Knows neither the other lanes nor how logits are made.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from luceasync.engine.sampler import RowLogprobs, RowSampling, TokenCounts
from luceasync.request import (
    Delta,
    Finish,
    FinishReason,
    Sampling,
    Timings,
    TokenLogprob,
    Usage,
)
from luceasync.text.detokenizer import Detokenizer
from luceasync.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a choice needs to run: tokens, limits, sampling and the way back to text.

    `seed` is already drawn; `counts` is None when no penalty needs them.
    """

    stream_id: int
    index: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int]
    sampling: Sampling
    seed: int
    counts: TokenCounts | None
    top_logprobs: int | None
    tokenizer: Tokenizer
    detokenizer: Detokenizer


@dataclass(slots=True)
class Generation:
    """A prepared choice and how far it has come. `lane` is None while it waits."""

    prepared: Prepared
    lane: int | None = None
    num_prefilled: int = 0
    last_token: int | None = None
    num_generated: int = 0
    prefill_s: float = 0.0
    submitted_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    first_token_at: float | None = None
    _held_ids: list[int] = field(default_factory=list)
    _held_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def is_decoding(self) -> bool:
        return self.last_token is not None

    @property
    def position(self) -> int:
        """Position of the last token, which has not been run yet."""
        return len(self.prepared.prompt_ids) + self.num_generated - 1

    @property
    def next_row(self) -> RowSampling:
        """How the next token is to be chosen."""
        prepared = self.prepared
        return RowSampling(
            sampling=prepared.sampling,
            seed=prepared.seed,
            position=self.position + 1,
            counts=prepared.counts,
            top_logprobs=prepared.top_logprobs,
        )

    def start(self, lane: int) -> None:
        """Take a lane."""
        self.lane = lane
        self.started_at = time.monotonic()

    def accept(self, token: int, logprobs: RowLogprobs | None) -> Delta | None:
        """Append a token. Returns what can be shown now: None while all of it is held back."""
        prepared = self.prepared
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        self.last_token = token
        self.num_generated += 1
        self._held_ids.append(token)
        if prepared.counts is not None:
            prepared.counts.add(token)
        if logprobs is not None:
            self._held_logprobs.append(_named(prepared.tokenizer, token, logprobs))
        if token in prepared.stop_ids:
            return self.finish("stop")
        piece = prepared.detokenizer.push(token)
        if piece.stopped:
            return self._delta(piece.text, "stop")
        if self.num_generated >= prepared.max_tokens:
            rest = prepared.detokenizer.flush()  # may complete a stop string
            reason = "stop" if prepared.detokenizer.stopped else "length"
            return self._delta(piece.text + rest, reason)
        return self._delta(piece.text) if piece.text or self._held_logprobs else None

    def finish(self, reason: FinishReason, error: str | None = None) -> Delta:
        """End here; what was held back is shown."""
        return self._delta(self.prepared.detokenizer.flush(), reason, error)

    def _delta(
        self, text: str, reason: FinishReason | None = None, error: str | None = None
    ) -> Delta:
        finish = None
        if reason is not None:
            usage = Usage(len(self.prepared.prompt_ids), self.num_generated)
            finish = Finish(reason, usage, self._timings(), error)
        ids, logprobs = tuple(self._held_ids), tuple(self._held_logprobs)
        self._held_ids.clear()
        self._held_logprobs.clear()
        return Delta(self.prepared.index, text, ids, logprobs, finish)

    def _timings(self) -> Timings:
        now = time.monotonic()
        started = now if self.started_at is None else self.started_at
        first = now if self.first_token_at is None else self.first_token_at
        return Timings(
            queued_s=started - self.submitted_at,
            prefill_s=self.prefill_s,
            decode_s=now - first,
            num_prefilled=self.num_prefilled,
            num_decoded=max(0, self.num_generated - 1),
        )


def _named(tokenizer: Tokenizer, token: int, logprobs: RowLogprobs) -> TokenLogprob:
    """Log-probabilities with the tokens' texts."""

    def name(token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        return TokenLogprob(tokenizer.token_text(token), tokenizer.token_bytes(token), logprob, top)

    return name(token, logprobs.chosen, tuple(name(*entry) for entry in logprobs.top))
