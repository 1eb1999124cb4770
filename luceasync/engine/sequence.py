"""One choice of one request, from the queue to its last token. Lives in the engine thread.

Owns the choice's tokens, its output until that is delivered, and its clock. Does not know other
lanes, or how logits are computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from luceasync.engine.prepare import PreparedChoice
from luceasync.engine.sampling.row import RowLogprobs, RowSampling
from luceasync.grammar.guide import Guide
from luceasync.prefix_cache.lease import Lease
from luceasync.request import (
    Delta,
    ErrorKind,
    Finish,
    FinishReason,
    Residence,
    Restore,
    Speculation,
    Timings,
    TokenLogprob,
    Usage,
)
from luceasync.text.answer.pieces import PlainText
from luceasync.text.detokenizer import Detokenizer


@dataclass(slots=True, eq=False)
class Generation:
    """A prepared choice and its progress. `lane` is None while it waits; then the choice is
    restored (`is_restoring`), prefilled and decoded. Of the `num_prefilled` tokens that the lane
    holds, `num_cached` were not run. `num_skipped`: prefill chunks that later prompts of its client
    have had since its own last one. `is_unread`: its client does not read. `is_ahead`: its lane is
    ahead of its tokens, which will be read with the next step.

    A choice that decodes may leave its lane (`leave_lane`). It then waits for another one as if its
    prompt were its whole sequence: prompt and position alone decide what follows.
    """

    prepared: PreparedChoice
    lease: Lease = field(init=False)
    is_unread: bool = False
    lane: int | None = None
    is_restoring: bool = False
    is_ahead: bool = False
    num_cached: int = 0
    num_prefilled: int = 0
    num_skipped: int = 0
    last_token: int | None = None
    num_generated: int = 0
    prefill_s: float = 0.0
    submitted_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    first_token_at: float | None = None
    left_at: float | None = None  # when it last left a lane
    turn_s: float = 0.0  # of the steps that gave it tokens on its present lane
    _num_before: int = 0  # tokens that were generated when it got its lane
    _earlier: LaneWork | None = None  # on the lanes that it has left
    _reason: FinishReason | None = None
    _error: str | None = None
    _error_kind: ErrorKind = "failed"
    _retry_after_s: int = 1
    _pending: PendingOutput = field(init=False)

    def __post_init__(self) -> None:
        self._pending = PendingOutput(self.prepared.detokenizer)
        self.lease = Lease(self.prepared.request, self.prepared.prompt)

    # --- where it stands -----------------------------------------------------------------------

    @property
    def client(self) -> str:
        return self.prepared.request.client

    @property
    def on_lane(self) -> int:
        """Its lane; it must have one."""
        assert self.lane is not None, "it waits"
        return self.lane

    @property
    def is_decoding(self) -> bool:
        return self.last_token is not None

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of what it prefills are wanted."""
        return self.prepared.request.prompt_top_logprobs is not None and self._earlier is None

    @property
    def to_prefill(self) -> Sequence[int]:
        """What the lane must hold before it decodes: the prompt, and the tokens generated
        before."""
        return self.prepared.prompt.ids if self._earlier is None else self.lease.prompt

    @property
    def has_spoken(self) -> bool:
        """Whether it has generated a token, on this lane or before."""
        return self.num_generated > 0

    @property
    def num_in_turn(self) -> int:
        """How many tokens it has generated on its lane."""
        return self.num_generated - self._num_before

    @property
    def num_committed(self) -> int:
        """How many tokens of its sequence the lane holds."""
        return self.position if self.is_decoding else self.num_prefilled

    @property
    def position(self) -> int:
        """Position of the last token, which has not been run yet."""
        return len(self.prepared.prompt.ids) + self.num_generated - 1

    @property
    def guide(self) -> Guide | None:
        """Which tokens are allowed; None: any."""
        return self.prepared.guide

    @property
    def next_row(self) -> RowSampling:
        """How the next token is to be chosen, apart from the guide's mask."""
        prepared = self.prepared
        return RowSampling(
            sampling=prepared.request.sampling,
            seed=prepared.seed,
            position=self.position + 1,
            counts=prepared.counts,
            top_logprobs=prepared.request.top_logprobs,
        )

    # --- lanes ---------------------------------------------------------------------------------

    def start(self, lane: int, num_cached: int = 0) -> None:
        """Take a lane, to which the first `num_cached` tokens are being restored."""
        self.lane = lane
        self.is_restoring = True
        self.num_cached = self.num_prefilled = num_cached
        self._num_before = self.num_generated
        self.turn_s = 0.0
        self.started_at = time.monotonic() if self.started_at is None else self.started_at

    def leave_lane(self, speculation: Speculation | None) -> None:
        """Wait again, under a new lease for the remaining tokens. The contents of the lane may be
        saved under the old one."""
        self._earlier = self._work(speculation)
        self.left_at = time.monotonic()
        self.lane = self.last_token = None
        self.is_ahead = False
        self.num_cached = self.num_prefilled = 0
        self.prefill_s = 0.0
        begun = self.lease.sequence[len(self.prepared.prompt.ids) :]
        self.lease = Lease(self.prepared.request, self.prepared.prompt, begun)

    # --- tokens --------------------------------------------------------------------------------

    def append(self, token: int, logprobs: RowLogprobs | None) -> bool:
        """Append a token; returns whether the answer goes on after it. Its text is decoded when it
        is shown, or at once if it may contain a stop string."""
        prepared = self.prepared
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        self.last_token = token
        self.num_generated += 1
        self._pending.ids.append(token)
        self.lease.sequence.append(token)
        if prepared.counts is not None:
            prepared.counts.add(token)
        if logprobs is not None:
            self._pending.logprobs.append(self.named(token, logprobs))
        if prepared.guide is not None:
            prepared.guide.consume(token)
        if token in prepared.stop_ids:
            self.end("stop")
            return False
        self._pending.encoded.append(token)
        if prepared.detokenizer.has_stops and self._pending.detokenize():
            self._reason = "stop"
        elif self.num_generated >= prepared.max_tokens:
            self.end("length")
            if prepared.detokenizer.stopped:  # the flushed text completed a stop string
                self._reason = "stop"
        elif not prepared.stop_ids and prepared.guide is not None and prepared.guide.is_over:
            self.end("stop")  # nothing may follow, and no token ended the answer
        return self._reason is None

    def extend(self, tokens: list[int]) -> int:
        """Append tokens without log-probabilities until the answer ends; returns how many were
        appended."""
        prepared, num_generated = self.prepared, self.num_generated + len(tokens)
        may_end = num_generated >= prepared.max_tokens or not prepared.stop_ids.isdisjoint(tokens)
        may_end |= not prepared.stop_ids or prepared.detokenizer.has_stops
        if may_end or self.last_token is None or prepared.counts is not None:
            each = enumerate(tokens, 1)
            return next((n for n, token in each if not self.append(token, None)), len(tokens))
        self.last_token, self.num_generated = tokens[-1], num_generated
        self._pending.add(tokens)
        self.lease.sequence.extend(tokens)
        if prepared.guide is not None:
            prepared.guide.consume_all(tokens)
        return len(tokens)

    def scored(self, logprob: TokenLogprob) -> None:
        """Append the log-probability of the prompt's next token; all of these precede the
        answer."""
        self._pending.scores.append(logprob)

    def named(self, token: int, logprobs: RowLogprobs) -> TokenLogprob:
        """Log-probabilities with the tokens' texts."""
        tokenizer = self.prepared.tokenizer

        def name(token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
            text, spelled = tokenizer.token_text(token), tokenizer.token_bytes(token)
            return TokenLogprob(text, spelled, logprob, top)

        return name(token, logprobs.chosen, tuple(name(*entry) for entry in logprobs.top))

    # --- output --------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether no token follows; `shown` then returns the reason."""
        return self._reason is not None

    @property
    def is_sound(self) -> bool:
        """Whether its computed results can be trusted."""
        return self._reason != "error"

    def shown(
        self, speculation: Speculation | None = None, residence: Residence | None = None
    ) -> Delta | None:
        """Take the output since the last call; None while all of it is held back. The last delta
        includes `speculation` and `residence`."""
        is_last = self.has_ended
        # The detokenizer may have failed.
        maker = self.prepared.piece_maker if self.is_sound else PlainText()
        pieces = maker.make(self._pending.take_text(), is_last=is_last)
        if not (pieces or self._pending.has_logprobs or is_last):
            return None
        ids, logprobs, scores = self._pending.take()
        finish = self._finish(speculation, residence)
        return Delta(self.prepared.index, pieces, ids, logprobs, finish, scores)

    def end(
        self,
        reason: FinishReason,
        error: str | None = None,
        error_kind: ErrorKind = "failed",
        retry_after_s: int = 1,
    ) -> None:
        """End the answer: no token follows, and no text is held back any more. After an error
        nothing is detokenized, since the detokenizer may have failed."""
        self._pending.end(is_sound=reason != "error")
        self._reason, self._error, self._error_kind = reason, error, error_kind
        self._retry_after_s = retry_after_s

    def _finish(
        self, speculation: Speculation | None, residence: Residence | None
    ) -> Finish | None:
        """How it has ended; None while it goes on."""
        if self._reason is None:
            return None
        work = self._work(speculation)
        return Finish(
            reason=self._reason,
            usage=Usage(len(self.prepared.prompt.ids), self.num_generated, work.num_cached),
            timings=self._timings(work),
            error=self._error,
            restore=work.restore,
            speculation=work.speculation,
            error_kind=self._error_kind,
            retry_after_s=self._retry_after_s,
            residence=residence,
            stop=self.prepared.detokenizer.stopped_by,
            num_left_out=self.prepared.prompt.num_left_out,
        )

    def _work(self, speculation: Speculation | None) -> LaneWork:
        """What was done for it on all its lanes; `speculation`: on the last one."""
        num_run = self.num_prefilled - self.num_cached
        work = LaneWork(self.num_cached, num_run, self.prefill_s, self.lease.restore, speculation)
        return work.after(self._earlier)

    def _timings(self, work: LaneWork) -> Timings:
        now = time.monotonic()
        return Timings(
            queued_s=(self.started_at or now) - self.submitted_at,
            prefill_s=work.prefill_s,
            decode_s=now - (self.first_token_at or now),
            num_prefilled=work.num_run,
            num_decoded=max(0, self.num_generated - 1),
        )


@dataclass(slots=True)
class PendingOutput:
    """Generated output of a choice that is not delivered yet. `encoded`: those of `ids` that are
    not detokenized yet; `scores`: log-probabilities of the prompt's tokens."""

    detokenizer: Detokenizer
    ids: list[int] = field(default_factory=list)
    encoded: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    _text: str = ""

    @property
    def has_logprobs(self) -> bool:
        return bool(self.logprobs or self.scores)

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens, to be detokenized later."""
        self.ids += tokens
        self.encoded += tokens

    def detokenize(self) -> bool:
        """Detokenize the new tokens; returns whether a stop string has ended the answer."""
        for token in self.encoded:
            self._text += self.detokenizer.push(token).text
        self.encoded.clear()
        return self.detokenizer.stopped

    def end(self, *, is_sound: bool) -> None:
        """Flush what the detokenizer holds back. Tokens that are not detokenized yet are dropped
        unless `is_sound`: the detokenizer may have failed."""
        if not is_sound:
            self.encoded.clear()
        self.detokenize()
        self._text += self.detokenizer.flush()

    def take_text(self) -> str:
        """Take the text that is known."""
        self.detokenize()
        text, self._text = self._text, ""
        return text

    def take(
        self,
    ) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...], tuple[TokenLogprob, ...]]:
        """Take the ids, their log-probabilities, and those of the prompt."""
        taken = tuple(self.ids), tuple(self.logprobs), tuple(self.scores)
        for each in (self.ids, self.logprobs, self.scores):
            each.clear()
        return taken


@dataclass(frozen=True, slots=True)
class LaneWork:
    """What was done for a choice on one lane, or on several in turn: `num_run` tokens were
    prefilled in `prefill_s` seconds; `num_cached` of the prompt were restored on the first lane, as
    `restore` describes. `speculation` None: there is no draft."""

    num_cached: int
    num_run: int
    prefill_s: float
    restore: Restore
    speculation: Speculation | None

    def after(self, before: LaneWork | None) -> LaneWork:
        """The work of both together."""
        if before is None:
            return self
        return LaneWork(
            before.num_cached,
            before.num_run + self.num_run,
            before.prefill_s + self.prefill_s,
            before.restore,
            _sum(before.speculation, self.speculation),
        )


def _sum(one: Speculation | None, other: Speculation | None) -> Speculation | None:
    if one is None or other is None:
        return one or other
    return Speculation(
        one.rounds + other.rounds,
        one.proposed + other.proposed,
        one.accepted + other.accepted,
        other.off_reason,
    )
