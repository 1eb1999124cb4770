"""The answer to one request, on the event loop's side: deltas in, an async iterator out.

Memory is bounded: whoever makes the deltas is told when too many of them are unread, and when not
any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from luceasync.request import Delta

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
