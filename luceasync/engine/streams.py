"""Carries deltas from the engine thread to the readers of answers.

`DeltaOutbox` collects them in the engine thread. On the event loop `OpenAnswers` hands each to its
stream, an async iterator that bounds memory: the engine is notified when too much of it is unread.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from luceasync.engine.sequence import Generation
from luceasync.request import Delta, Finish, Residence, Speculation
from luceasync.text.prompt import RenderedPrompt

# Seconds of an answer: a client that reads at all never falls so far behind.
MAX_UNREAD_TOKENS = 1024

Emitted = tuple[int, Delta]  # stream id, delta


class DeltaOutbox:
    """Output of generations that is not delivered yet, in order. Engine thread only.

    Text is detokenized when it is taken, since a device may compute meanwhile. Finished deltas are
    kept if that raises.
    """

    def __init__(self) -> None:
        self._deltas: list[Emitted] = []
        self._advanced: list[Generation] = []  # generations with more to show

    def __bool__(self) -> bool:
        """Whether there may be something to deliver."""
        return bool(self._deltas or self._advanced)

    @property
    def has_end(self) -> bool:
        """Whether a last delta is among them."""
        return any(delta.finish for _, delta in self._deltas)

    def advanced(self, generation: Generation) -> None:
        """The generation has received tokens, or has ended without a lane."""
        self._advanced.append(generation)

    def ended(
        self,
        generation: Generation,
        speculation: Speculation | None,
        residence: Residence | None = None,
    ) -> None:
        """Add the generation's last delta, with all output not shown yet and the figures of its
        lane."""
        last = generation.shown(speculation, residence)
        assert last is not None and last.finish is not None
        self._deltas.append((generation.prepared.stream_id, last))
        self._advanced = [g for g in self._advanced if g is not generation]

    def detokenize(self) -> None:
        """Make the deltas of the new tokens. Raises what a tokenizer raises; all other deltas are
        kept then."""
        while self._advanced:
            generation = self._advanced[0]
            delta = generation.shown()
            if delta is not None:
                self._deltas.append((generation.prepared.stream_id, delta))
            del self._advanced[0]

    def drop_undetokenized(self) -> None:
        """Drop text that has not been detokenized; detokenizing may have failed. Ends are kept."""
        self._advanced = [g for g in self._advanced if g.has_ended]

    def take(self) -> list[Emitted]:
        """Take all deltas. Raises as `detokenize` does."""
        self.detokenize()
        taken, self._deltas = self._deltas, []
        return taken


class LocalStream:
    """The luceasync.request.Stream of a local engine. Event loop only."""

    def __init__(
        self,
        num_prompt_tokens: int,
        num_choices: int,
        cancel: Callable[[], None],
        set_unread: Callable[[bool], None] = lambda is_unread: None,
    ) -> None:
        """`cancel` is called if it is closed before its end. `set_unread` is called with True when
        the reader is more than MAX_UNREAD_TOKENS behind, and with False when it has read half.
        """
        self._num_prompt_tokens = num_prompt_tokens
        self._num_open = num_choices
        self._cancel = cancel
        self._set_unread = set_unread
        self._num_unread = 0  # tokens
        self._is_behind = False
        self._pending: deque[Delta] = deque()
        self._wake = asyncio.Event()
        self._is_closed = False

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt_tokens

    @property
    def num_open(self) -> int:
        """Choices that have not finished yet."""
        return self._num_open

    def push(self, delta: Delta) -> None:
        """Append a delta from the engine."""
        self._num_open -= delta.finish is not None
        if not self._is_closed:
            self._pending.append(delta)
            self._wake.set()
            self._count(_num_tokens(delta))

    def __aiter__(self) -> LocalStream:
        return self

    async def __anext__(self) -> Delta:
        while not self._pending:
            if self._is_closed or self._num_open == 0:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        delta = self._pending.popleft()
        self._count(-_num_tokens(delta))
        return delta

    async def aclose(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._pending.clear()
        self._wake.set()
        if self._num_open:
            self._cancel()

    def _count(self, num_tokens: int) -> None:
        self._num_unread += num_tokens
        limit = MAX_UNREAD_TOKENS // 2 if self._is_behind else MAX_UNREAD_TOKENS
        is_behind = self._num_unread > limit
        if is_behind != self._is_behind:
            self._is_behind = is_behind
            self._set_unread(is_behind)


def _num_tokens(delta: Delta) -> int:
    return max(1, len(delta.token_ids))


@dataclass(frozen=True, slots=True)
class _OpenAnswer:
    """A stream, and the tokens of its choices so far, by index."""

    stream: LocalStream
    prompt: RenderedPrompt
    client: str
    generated: dict[int, array[int]] = field(default_factory=dict)


class OpenAnswers:
    """The answers that have not ended, by stream id. Each delta goes to its stream, and each
    complete answer into its tenant's history. Event loop only."""

    def __init__(self, later: Callable[[Callable[[], object]], object]) -> None:
        """`later` runs a function on the event loop, after the work that is already scheduled."""
        self._later = later
        self._answers: dict[int, _OpenAnswer] = {}
        self._ended: list[tuple[RenderedPrompt, array[int]]] = []  # with the generated ids

    def __repr__(self) -> str:
        return f"OpenAnswers({len(self._answers)})"

    def open(
        self,
        stream_id: int,
        prompt: RenderedPrompt,
        num_choices: int,
        cancel: Callable[[], None],
        set_unread: Callable[[bool], None] = lambda is_unread: None,
        client: str = "",
    ) -> LocalStream:
        """The stream of a new answer to `client`; `cancel`, `set_unread`: see LocalStream."""
        stream = LocalStream(len(prompt.ids), num_choices, cancel, set_unread)
        self._answers[stream_id] = _OpenAnswer(stream, prompt, client)
        return stream

    def deliver(self, deltas: Iterable[tuple[int, Delta]]) -> list[tuple[str, Finish]]:
        """Hand (stream id, delta) pairs to their streams. Returns the clients of the choices that
        have ended, and how they ended. Call `remember` once they have been sent."""
        ended = []
        for stream_id, delta in deltas:
            answer = self._answers[stream_id]
            answer.stream.push(delta)
            if delta.index not in answer.generated:
                # Rendered now, while the answer is generated: the result is ready at its end.
                self._later(partial(answer.prompt.answer_returns.begin, delta.token_ids))
            generated = answer.generated.setdefault(delta.index, array("i"))
            generated.extend(delta.token_ids)
            if delta.finish is None:
                continue
            self._ended.append((answer.prompt, generated))
            ended.append((answer.client, delta.finish))
            if answer.stream.num_open == 0:
                del self._answers[stream_id]
        return ended

    @property
    def has_ended(self) -> bool:
        """Whether `remember` has something to add."""
        return bool(self._ended)

    def remember(self) -> None:
        """Add the ended answers to the histories with which later prompts are encoded. Takes
        milliseconds for long answers."""
        ended, self._ended = self._ended, []
        for prompt, generated in ended:
            if prompt.text is not None:
                prompt.tenant.history.remember(prompt.text, prompt.ids, generated)


def soon(call: Callable[[], object]) -> None:
    """Run `call` on the event loop, after the work that is already scheduled."""
    asyncio.get_running_loop().call_soon(call)
