"""The deltas of several streams as one, each as soon as it comes.

Owns the waiting. Knows nothing of what deltas say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from luceasync.request import Delta, Stream


async def merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """The number of a stream and its next delta, until all have ended. Raises what one raises."""
    waiting = {_next(stream): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                delta = task.result()
                if delta is not None:
                    waiting[_next(streams[number])] = number
                    yield number, delta
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _next(stream: Stream) -> asyncio.Task[Delta | None]:
    return asyncio.ensure_future(_next_or_none(stream))


async def _next_or_none(stream: Stream) -> Delta | None:
    return await anext(aiter(stream), None)
