"""The answer to one request, on the event loop's side: deltas in, an async iterator out.

Memory is bounded by the answer itself: an unread stream holds at most max_tokens deltas.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from luceasync.request import Delta


class LocalStream:
    """See luceasync.request.Stream. Used from the event loop only."""

    def __init__(
        self, num_prompt_tokens: int, num_choices: int, cancel: Callable[[], None]
    ) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_open = num_choices
        self._cancel = cancel
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

    def __aiter__(self) -> LocalStream:
        return self

    async def __anext__(self) -> Delta:
        while not self._pending:
            if self._is_closed or self._num_open == 0:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._pending.popleft()

    async def aclose(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._pending.clear()
        self._wake.set()
        if self._num_open:
            self._cancel()
