"""An engine that plays a script, so that the server is tested without a model.

Owns what a script may hold, and remembers what was asked and closed. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from luceasync.errors import Unavailable
from luceasync.request import (
    Delta,
    Finish,
    ModelCard,
    Request,
    Restore,
    Speculation,
    Timings,
    Usage,
)
from luceasync.status import (
    NO_PROCESSES,
    CacheStatus,
    EngineDetails,
    EngineStatus,
    ExpertsStatus,
    LaneStatus,
    NodeStatus,
    ResidenceStatus,
    SpeculationStatus,
    WaitingStatus,
)
from tests.deltas import text_delta

Step = Delta | Exception | asyncio.Event

TIMINGS = Timings(queued_s=0.001, prefill_s=0.1, decode_s=0.5, num_prefilled=6, num_decoded=10)


def finish(
    reason: str = "stop",
    num_tokens: int = 3,
    error: str | None = None,
    restore: Restore = Restore(),  # noqa: B008 - frozen
    speculation: Speculation | None = None,
    stop: str | None = None,
) -> Finish:
    usage = Usage(10, num_tokens, cached_tokens=4)
    return Finish(reason, usage, TIMINGS, error, restore, speculation, stop=stop)


def answer(*texts: str, index: int = 0, reason: str = "stop") -> list[Step]:
    """One token per text, and the finish in a delta of its own."""
    deltas: list[Step] = [text_delta(index, text, token_ids=(i,)) for i, text in enumerate(texts)]
    return [*deltas, Delta(index, finish=finish(reason, len(texts)))]


class ScriptedStream:
    """Plays a script: gives a Delta, raises an Exception, waits for an Event."""

    num_prompt_tokens = 10

    def __init__(self, script: Sequence[Step]) -> None:
        self._steps = iter(script)
        self.closed = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        for step in self._steps:
            if isinstance(step, Delta):
                return step
            if isinstance(step, Exception):
                raise step
            await step.wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed.set()


class ScriptedEngine:
    """Answers every request with `script`; `opening`, an Event or Exception, delays or fails it."""

    def __init__(self, script: Sequence[Step] = (), opening: Step | None = None) -> None:
        self.card = ModelCard("tiny", 1_700_000_000, 4096, 1_000_000, "qwen3")
        self.script = script or answer("Hel", "lo", "!")
        self.opening = opening
        self.loading = False
        self.failure = ""
        self.cache: CacheStatus | None = None
        self.speculation: SpeculationStatus | None = None
        self.residence: ResidenceStatus | None = None
        self.experts: ExpertsStatus | None = None
        self.processes = NO_PROCESSES
        self.requests: list[Request] = []
        self.streams: list[ScriptedStream] = []
        self.kept = ["ab" * 32, "cd" * 32]
        self.opened = asyncio.Event()
        self.open_cancelled = asyncio.Event()
        self.num_sent = 0

    def status(self) -> EngineStatus:
        detail = "loading the model" if self.loading else "ready"
        counts = (4, len(self.streams), 0, 6, 3, 3)
        ready = not self.loading and not self.failure
        return EngineStatus(
            ready,
            self.failure or detail,
            *counts,
            self.cache,
            self.speculation,
            has_failed=bool(self.failure),
            restarts_total=2,
            retry_after_s=7 if self.failure else 1,
            processes=self.processes,
            residence=self.residence,
            experts=self.experts,
        )

    def check_ready(self) -> None:
        status = self.status()
        if not status.ready:
            raise Unavailable(status.detail, status.retry_after_s)

    async def open(self, request: Request) -> ScriptedStream:
        self.requests.append(request)
        self.opened.set()
        if isinstance(self.opening, Exception):
            raise self.opening
        if self.opening is not None:
            await self._wait_in_queue(self.opening)
        self.streams.append(ScriptedStream(self.script))
        return self.streams[-1]

    def sent(self) -> None:
        self.num_sent += 1

    async def tokens(self, request: Request) -> tuple[int, ...]:
        self.requests.append(request)
        return tuple(range(10))

    async def details(self) -> EngineDetails:
        lanes = (LaneStatus(0, "decoding", 10, 10, 4, 3, 100, 0.5, 3.5, 2),)
        nodes = [NodeStatus(key, None, 0, 64, {"memory": 4096}, True, 2, 1.5) for key in self.kept]
        return EngineDetails(
            lanes, (WaitingStatus(7, 0.1),), tuple(nodes), len(nodes), {"cpu": 1 << 20}
        )

    async def drop_nodes(self, keys: Sequence[str] | None) -> int:
        gone = [key for key in self.kept if keys is None or key in keys]
        self.kept = [key for key in self.kept if key not in gone]
        return len(gone)

    def token_bytes(self, ids: Sequence[int], param: str) -> bytes:
        return b"".join(b"<%d>" % each for each in ids)

    async def _wait_in_queue(self, gate: asyncio.Event) -> None:
        try:
            await gate.wait()
        except asyncio.CancelledError:
            self.open_cancelled.set()
            raise
