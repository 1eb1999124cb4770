"""The answer to one request, on the event loop's side: deltas in, an async iterator out.

Memory is bounded: whoever makes the deltas is told when too many of them are unread, and when not
any more.
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

MAX_UNREAD_TOKENS = 1024  # seconds of an answer: who reads at all is never that far behind


class LocalStream:
    """See luceasync.request.Stream. Used from the event loop only."""

    def __init__(
        self,
        num_prompt_tokens: int,
        num_choices: int,
        cancel: Callable[[], None],
        read: Callable[[bool], None] = lambda is_behind: None,
    ) -> None:
        """`cancel`: it is closed before its end. `read`: whether the reader is behind by more than
        MAX_UNREAD_TOKENS, at each change; he is not any more when he has read half of them.
        """
        self._num_prompt_tokens = num_prompt_tokens
        self._num_open = num_choices
        self._cancel = cancel
        self._read = read
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
        """Take a delta from the engine."""
        self._num_open -= delta.finish is not None
        if not self._is_closed:
            self._pending.append(delta)
            self._wake.set()
            self._count(_size(delta))

    def __aiter__(self) -> LocalStream:
        return self

    async def __anext__(self) -> Delta:
        while not self._pending:
            if self._is_closed or self._num_open == 0:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        delta = self._pending.popleft()
        self._count(-_size(delta))
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
        most = MAX_UNREAD_TOKENS // 2 if self._is_behind else MAX_UNREAD_TOKENS
        is_behind = self._num_unread > most
        if is_behind != self._is_behind:
            self._is_behind = is_behind
            self._read(is_behind)


def _size(delta: Delta) -> int:
    return max(1, len(delta.token_ids))


# The answers under way: each delta goes to its stream, each answer into its tenant's history.
# Owns the streams by id and what their choices have said. Used from the event loop only; knows
# neither lanes nor how many answers there may be.


@dataclass(frozen=True, slots=True)
class _Answer:
    """A stream, and what its choices have said so far, by index."""

    stream: LocalStream
    prompt: RenderedPrompt
    client: str
    said: dict[int, array[int]] = field(default_factory=dict)


class Answers:
    """All answers that have not ended."""

    def __init__(self, beside: Callable[[Callable[[], object]], object]) -> None:
        """`beside` has something done in another thread, and does not wait for it."""
        self._beside = beside
        self._answers: dict[int, _Answer] = {}
        self._ended: list[tuple[RenderedPrompt, array[int]]] = []  # with the generated ids

    def __repr__(self) -> str:
        return f"Answers({len(self._answers)} open)"

    def open(
        self,
        stream_id: int,
        prompt: RenderedPrompt,
        num_choices: int,
        cancel: Callable[[], None],
        read: Callable[[bool], None] = lambda is_behind: None,
        client: str = "",
    ) -> LocalStream:
        """The stream of a new answer to `client`; `cancel`, `read`: see LocalStream."""
        stream = LocalStream(len(prompt.ids), num_choices, cancel, read)
        self._answers[stream_id] = _Answer(stream, prompt, client)
        return stream

    def deliver(self, deltas: Iterable[tuple[int, Delta]]) -> list[tuple[str, Finish]]:
        """Hand (stream id, delta) pairs to their streams; how the choices ended that did, and
        whose they were. These are to be remembered, once the streams' readers had their turn.
        """
        ended = []
        for stream_id, delta in deltas:
            answer = self._answers[stream_id]
            answer.stream.push(delta)
            if delta.index not in answer.said:  # to be known at its end: now nobody waits for it
                self._beside(partial(answer.prompt.answer_returns, delta.token_ids))
            said = answer.said.setdefault(delta.index, array("i"))
            said.extend(delta.token_ids)
            if delta.finish is None:
                continue
            self._ended.append((answer.prompt, said))
            ended.append((answer.client, delta.finish))
            if answer.stream.num_open == 0:
                del self._answers[stream_id]
        return ended

    def remember(self) -> None:
        """Later prompts may begin with the answers that have ended: takes milliseconds where they
        are long.
        """
        ended, self._ended = self._ended, []
        for prompt, said in ended:
            if prompt.text is not None:
                prompt.tenant.history.remember(prompt.text, prompt.ids, said)


def in_other_thread(call: Callable[[], object]) -> None:
    """Have it done there, once what the event loop has to do now is done."""
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.run_in_executor, None, call)


# What is to be told of generations: deltas that are made, and tokens whose text is not made
# out. Owns both, whatever fails meanwhile. Text is made out when it is told, since that may be
# while a device computes. Knows no lanes and nobody who listens.


Emitted = tuple[int, Delta]  # stream id, delta


class Outbox:
    """Everything that goes in comes out once, in order."""

    def __init__(self) -> None:
        self._deltas: list[Emitted] = []
        self._advanced: list[Generation] = []  # they have more to show

    def __bool__(self) -> bool:
        """Whether there may be something to tell."""
        return bool(self._deltas or self._advanced)

    @property
    def has_end(self) -> bool:
        """Whether somebody's last delta is among it."""
        return any(delta.finish for _, delta in self._deltas)

    def advanced(self, generation: Generation) -> None:
        """It has been given tokens, or has ended without a lane: what it shows is told next."""
        self._advanced.append(generation)

    def ended(
        self,
        generation: Generation,
        speculation: Speculation | None,
        residence: Residence | None = None,
    ) -> None:
        """Its last delta says all that it has not shown, what speculation did for it, and what of
        its context was on the devices.
        """
        last = generation.shown(speculation, residence)
        assert last is not None and last.finish is not None
        self._deltas.append((generation.prepared.stream_id, last))
        self._advanced = [g for g in self._advanced if g is not generation]

    def make_out(self) -> None:
        """Make out the text of what has come. Raises what a tokenizer raises; everything but that
        one's text is still told then.
        """
        while self._advanced:
            generation = self._advanced[0]
            delta = generation.shown()
            if delta is not None:
                self._deltas.append((generation.prepared.stream_id, delta))
            del self._advanced[0]

    def leave_unread(self) -> None:
        """Whose text is not made out by now shows it no more: it may be what has failed. Ends are
        told all the same.
        """
        self._advanced = [g for g in self._advanced if g.has_ended]

    def take(self) -> list[Emitted]:
        """All of it, once; see `make_out`."""
        self.make_out()
        taken, self._deltas = self._deltas, []
        return taken
