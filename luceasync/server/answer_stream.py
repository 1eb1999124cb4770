"""The deltas of one request on their way from the engine to a family.

Owns that they are timed and noted, and that a choice which failed is an exception. Knows no API.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from luceasync.errors import GaveWay, GenerationFailed, NoHostMemory, RequestError, Unavailable
from luceasync.request import Delta, Finish, Stream
from luceasync.server.metrics import AnswerClock
from luceasync.server.request_log import RequestNote


class AnswerStream:
    """A Stream of `num_choices` that all end well, or `__anext__` raises GenerationFailed,
    RequestError, GaveWay, NoHostMemory or Unavailable.
    """

    def __init__(
        self, stream: Stream, num_choices: int, clock: AnswerClock, note: RequestNote
    ) -> None:
        self._stream = stream
        self._num_open = num_choices
        self._clock = clock
        self._note = note

    @property
    def num_prompt_tokens(self) -> int:
        return self._stream.num_prompt_tokens

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        try:
            delta = await self._stream.__anext__()
        except StopAsyncIteration:
            if self._num_open > 0:
                raise GenerationFailed(
                    "The generation ended before every choice was finished."
                ) from None
            raise
        self._clock.tick(delta)
        self._note.take(delta)
        if delta.finish is not None:
            _raise_failure(delta.finish)
            self._num_open -= 1
        return delta

    async def aclose(self) -> None:
        await self._stream.aclose()


def _raise_failure(finish: Finish) -> None:
    if finish.reason == "error":
        words = finish.error or "The generation failed."
        match finish.error_kind:
            case "request":
                raise RequestError(words, code="cannot_be_followed")
            case "gave_way":
                raise GaveWay(finish.retry_after_s)
            case "unavailable":
                raise Unavailable(words, finish.retry_after_s)
            case "kv_host_memory":
                raise NoHostMemory(words, finish.retry_after_s)
            case "failed":
                raise GenerationFailed(words)
    if finish.reason == "cancelled":
        raise Unavailable(finish.error or "The generation was cancelled.")
