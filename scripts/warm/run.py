"""Every entry is asked for, a few at a time, and what became of each is told.

Owns the order of things and the verdicts. Knows no terminal and no files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from warm.door import Door, Refused, Told
from warm.entries import Entry

Verify = Literal["first", "all", "none"]
CHEAPER = "prefill_is_faster"  # the server has it, and rather computes so few tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an entry: `num_cached` of its `num_tokens` were there before; of a request
    that goes on from it `num_found` were found (None: nobody asked). `error` is empty if all is
    well.
    """

    entry: Entry
    elapsed_s: float
    num_tokens: int = 0
    num_cached: int = 0
    num_found: int | None = None
    error: str = ""

    @property
    def was_there(self) -> bool:
        """Whether nothing had to be computed."""
        return not self.error and self.num_cached == self.num_tokens

    @property
    def num_prefilled(self) -> int:
        return self.num_tokens - self.num_cached


async def warm(
    entries: Sequence[Entry],
    door: Door,
    tell: Callable[[Outcome], None],
    *,
    parallel: int,
    verify: Verify = "first",
    min_tokens: int = 0,
) -> None:
    """Have all entries kept, `parallel` at a time; `tell` hears of each when it is done. One of
    fewer than `min_tokens` tokens is not written, which is an error.
    """
    waiting = iter(enumerate(entries))

    async def work(waiting: Iterator[tuple[int, Entry]]) -> None:
        for index, entry in waiting:
            is_verified = verify == "all" or (verify == "first" and index == 0)
            tell(await keep(entry, door, is_verified=is_verified, min_tokens=min_tokens))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(parallel, len(entries))):
            tasks.create_task(work(waiting))


async def keep(entry: Entry, door: Door, *, is_verified: bool, min_tokens: int = 0) -> Outcome:
    """Have one entry kept, and see whether the next request finds it."""
    started_s = time.perf_counter()
    try:
        told = await door.keep(entry)
        elapsed_s = time.perf_counter() - started_s
        next_told = await door.follow(entry) if is_verified else None
    except Refused as error:
        return Outcome(entry, time.perf_counter() - started_s, error=str(error))
    # It may find more: an earlier run has asked the same.
    num_found = None if next_told is None else min(next_told.num_cached, told.num_tokens)
    error = _fault(told, next_told, min_tokens)
    return Outcome(entry, elapsed_s, told.num_tokens, told.num_cached, num_found, error)


def _fault(told: Told, next_told: Told | None, min_tokens: int) -> str:
    if told.num_tokens < min_tokens:
        return (
            f"{told.num_tokens} tokens are not written: --kv-cache-min-tokens is {min_tokens}; "
            "a shorter prompt needs a lower one"
        )
    if next_told is None or next_told.num_cached >= told.num_tokens:
        return ""
    if next_told.miss_reason == CHEAPER:
        return ""
    return (
        f"the next request found {next_told.num_cached} of {told.num_tokens} tokens "
        f"({next_told.miss_reason or 'no reason told'})"
    )
