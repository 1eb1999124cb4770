"""The engine as the server sees it: requests in, streams out, all work in one thread of its own.

Puts the parts together and owns their life. Prompts are for Preparing, how many there may be for
Admission, streams for Answers, the disk for CacheDirectory, every step for the pump in the thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Self, TypeVar

from luceasync.config import EngineConfig
from luceasync.engine.admission import Admission
from luceasync.engine.cache_directory import Cabinet, CacheDirectory
from luceasync.engine.prepare import ChoicePreparation
from luceasync.engine.prompts import Language, check_ids
from luceasync.engine.pump import Pump
from luceasync.engine.sequence import Generation
from luceasync.engine.streams import Emitted, LocalStream, OpenAnswers, in_other_thread
from luceasync.engine.thread import EngineThread, LoadedEngine
from luceasync.errors import QueueFull, Unavailable
from luceasync.prefix_cache.cache import PrefixCache
from luceasync.prefix_cache.disk_orders import DiskOrders, NoDisk
from luceasync.prefix_cache.index import newest
from luceasync.prefix_cache.tenants import Tenants
from luceasync.request import ModelCard, Request
from luceasync.status import (
    NO_PROCESSES,
    BackendProcesses,
    CacheStatus,
    EngineLook,
    EngineStatus,
    LaneLook,
    WaitingLook,
)
from luceasync.text.history import History

# Whether requests can be taken, and the words where they cannot. Owns what is still awaited,
# the last fault, and what keeps requests out for now. Knows neither the model nor the cache
# directory; event loop only.


MAX_LOADING_S = 60  # that clients are told to come back in


class Availability:
    """Not ready until every part is there, nor after a fault, nor from `interrupt` to `resume`."""

    def __init__(self, parts: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_s = clock()
        self._back_s: float | None = None  # when what is interrupted may go on
        self._awaited = set(parts)
        self._arrivals: dict[str, asyncio.Future[None]] = {}
        self._fault = ""
        self._interruption = ""

    @property
    def is_ready(self) -> bool:
        return not self._awaited and not self._fault and not self._interruption

    @property
    def is_interrupted(self) -> bool:
        """Whether what was there has failed and is not back."""
        return bool(self._interruption)

    @property
    def detail(self) -> str:
        """Why not, or "ready"."""
        awaited = "loading the model" if self._awaited else "ready"
        return self._fault or self._interruption or awaited

    @property
    def retry_after_s(self) -> int:
        """In how many seconds whoever is refused may come back: what is left of what was said at an
        interruption; of a first load, whose time nobody knows, as long as it takes by now.
        """
        now_s = self._clock()
        if self._back_s is not None:
            return max(1, math.ceil(self._back_s - now_s))
        loading_s = round(now_s - self._begun_s) if self._awaited else 1
        return max(1, min(MAX_LOADING_S, loading_s))

    def begin(self) -> None:
        """The parts are on their way; called on the event loop."""
        self._begun_s = self._clock()
        loop = asyncio.get_running_loop()
        self._arrivals = {part: loop.create_future() for part in self._awaited}

    async def wait(self) -> None:
        """Until every part is there. Raises what kept one of them away, at once."""
        assert self._arrivals, "`begin` comes first"
        await asyncio.gather(*map(asyncio.shield, self._arrivals.values()))

    def has_come(self, part: str) -> bool:
        """Whether it is known what became of the part."""
        return self._arrivals[part].done()

    def arrived(self, part: str) -> None:
        """The part is there."""
        self._arrivals[part].set_result(None)
        self._awaited.discard(part)

    def lost(self, part: str, error: BaseException) -> None:
        """The part will never be there."""
        self._fault = str(error)
        self._arrivals[part].set_exception(error)

    def interrupt(self, words: str, back_in_s: int) -> None:
        """No request is taken for now; it may be otherwise in so many seconds."""
        self._interruption, self._back_s = words, self._clock() + back_in_s

    def resume(self) -> None:
        """What was interrupted goes on."""
        self._interruption, self._back_s = "", None

    def stop(self, words: str) -> None:
        """No request is taken any more."""
        self._fault = words


def unavailable(detail: str, retry_after_s: int) -> Unavailable:
    """What a request is told that cannot be taken."""
    return Unavailable(f"The model is not available: {detail}.", retry_after_s)


# What a look at a pump shows: its lanes, its queue, the prefixes that are kept. Engine thread
# only. Owns nothing and changes nothing but what it was asked to let go of.


MAX_NODES = 256
MAX_WAITING = 64


def look_at(pump: Pump, num_nodes: int = MAX_NODES) -> EngineLook:
    """How things are now; of nodes those that were used last."""
    now_s, nodes = time.monotonic(), list(pump.lanes.prefixes.index)
    return EngineLook(
        lanes=tuple(_lane(pump, generation, now_s) for generation in pump.scheduler.running),
        waiting=tuple(
            WaitingLook(len(g.prepared.prompt.ids), now_s - g.submitted_at)
            for g in pump.scheduler.waiting[:MAX_WAITING]
        ),
        nodes=newest(nodes, num_nodes),
        num_nodes=len(nodes),
    )


def _lane(pump: Pump, generation: Generation, now_s: float) -> LaneLook:
    lane = generation.lane
    assert lane is not None, "it runs"
    speculation, residence = (
        pump.steps.decoding.speculation(lane),
        pump.lanes.paging.residence(lane),
    )
    return LaneLook(
        lane=lane,
        phase=_phase(generation),
        prompt_tokens=len(generation.prepared.prompt.ids),
        done_tokens=generation.num_prefilled,
        cached_tokens=generation.num_cached,
        generated_tokens=generation.num_generated,
        max_tokens=generation.prepared.max_tokens,
        running_s=0.0 if generation.started_at is None else now_s - generation.started_at,
        tau=None if speculation is None else speculation.tau,
        rounds=0 if speculation is None else speculation.rounds,
        resident_tokens=None if residence is None else residence.resident_tokens,
        absent_tokens=None if residence is None else residence.absent_tokens,
    )


def _phase(generation: Generation) -> str:
    if generation.is_restoring:
        return "restoring"
    if generation.is_unread:
        return "unread"
    return "decoding" if generation.is_decoding else "prefilling"


def drop_nodes(pump: Pump, keys: Collection[str] | None) -> int:
    """Let go of the nodes of these keys, or of all, in every tier, and of what continues them; how
    many are gone. What a request needs stays.
    """
    before = sum(1 for _ in pump.lanes.prefixes.index)
    pump.lanes.prefixes.clear({bytes.fromhex(key) for key in keys} if keys is not None else None)
    return before - sum(1 for _ in pump.lanes.prefixes.index)


log = logging.getLogger(__name__)

Found = TypeVar("Found")

FLUSH_DEADLINE_S = 30.0
LOOK_DEADLINE_S = 10.0
SWITCH_INTERVAL_S = 5e-4  # the default of 5 ms lets the thread's Python hold up the event loop
MAX_AWAY_S = 60  # a process that is away for longer is not waited for by requests that come now
MODEL, DIRECTORY = "model", "cache directory"  # what has to be there before requests are taken


class LocalEngine:
    """An engine in this process. `async with` starts its thread and ends it.

    `load(orders)` makes the model in the engine thread; until it is done `open` raises Unavailable.
    """

    def __init__(
        self,
        language: Language,
        load: Callable[[DiskOrders], LoadedEngine],
        config: EngineConfig,
        cabinet: Cabinet | None = None,
        *,
        stopping: threading.Event | None = None,
        release: Callable[[], None] = lambda: None,
        processes: Callable[[], BackendProcesses] = lambda: NO_PROCESSES,
        device_bytes: Mapping[str, int] | None = None,
    ) -> None:
        """`stopping`, `release`: see EngineThread. `processes`: others that the model is in."""
        self._device_bytes = device_bytes
        self._language = language
        self._load = load
        self._cabinet = cabinet
        self._stopping = stopping or threading.Event()
        self._release = release
        self._processes = processes
        self._num_restarts = 0
        self._tenants = Tenants(lambda: History(language.tokenizer))
        self._preparing = ChoicePreparation(language, self._tenants)
        self._admission = Admission(language.num_lanes, config.max_queue)
        self._answers = OpenAnswers(in_other_thread)
        self._stream_ids = itertools.count()
        self._availability = Availability((MODEL, DIRECTORY))
        self._pump: Pump | None = None
        self._thread: EngineThread | None = None
        self._directory: CacheDirectory | None = None
        self._disk_task: asyncio.Task[None] | None = None

    # --- life ----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._availability.begin()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        orders: DiskOrders = NoDisk()
        if self._cabinet is not None:
            self._directory = CacheDirectory(self._cabinet, self._tenants, self._tell)
            orders = self._directory.orders
        self._thread = EngineThread(
            lambda: self._make(orders), self, stopping=self._stopping, release=self._release
        )
        self._thread.start()
        self._disk_task = asyncio.create_task(self._keep_disk())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._availability.stop("the server is shutting down")
        assert self._thread is not None and self._disk_task is not None
        self._stopping.set()
        if self._pump is not None:
            await self._end_all()
        self._disk_task.cancel()
        await asyncio.wait([self._disk_task])
        await self._thread.join()
        await self._preparing.close()

    def _make(self, orders: DiskOrders) -> LoadedEngine:
        """A life of the engine; called in its thread."""
        if self._directory is not None:
            self._directory.begin_life()
        return self._load(orders)

    async def load(self) -> None:
        """Wait until the model is loaded and the cache directory is known. Raises what one of them
        raised, at once.
        """
        await self._availability.wait()

    async def flush(self) -> None:
        """Wait until the disk has all that it is to have of what has ended. Raises TimeoutError."""
        assert self._thread is not None
        for _ in range(3):  # an outcome may be followed by another order
            await self._thread.call(lambda pump: pump.save_all(), FLUSH_DEADLINE_S)
            if self._directory is not None:
                await self._directory.drain(FLUSH_DEADLINE_S)

    async def _end_all(self) -> None:
        """End what runs, and let what is worth it reach the disk."""
        assert self._thread is not None
        try:
            await self._thread.call(
                lambda pump: pump.end_all("the server is shutting down"), FLUSH_DEADLINE_S
            )
            if self._directory is not None:
                await self._directory.drain(FLUSH_DEADLINE_S)
        except TimeoutError:
            log.error("the engine did not end its work within %.0f s", FLUSH_DEADLINE_S)

    async def _keep_disk(self) -> None:
        """The task of the cache directory, for as long as the engine lives."""
        if self._directory is None:
            self._availability.arrived(DIRECTORY)
            return
        try:
            await self._directory.serve(lambda: self._availability.arrived(DIRECTORY))
        except Exception as error:
            if self._availability.has_come(DIRECTORY):
                raise
            self._availability.lost(DIRECTORY, error)

    # --- requests ------------------------------------------------------------------------------

    @property
    def card(self) -> ModelCard:
        return self._language.card

    def status(self) -> EngineStatus:
        pump = self._pump
        return EngineStatus(
            ready=self._availability.is_ready,
            detail=self._availability.detail,
            num_lanes=self._language.num_lanes,
            num_running=pump.num_running if pump else 0,
            num_queued=pump.num_waiting if pump else 0,
            prefilled_tokens_total=pump.steps.num_prefilled_total if pump else 0,
            decoded_tokens_total=pump.steps.num_decoded_total if pump else 0,
            decode_steps_total=pump.steps.num_steps_total if pump else 0,
            cache=self._cache_status(pump) if pump else None,
            speculation=pump.steps.decoding.status if pump else None,
            residence=pump.lanes.paging.status if pump else None,
            has_failed=self._availability.is_interrupted,
            restarts_total=self._num_restarts,
            retry_after_s=self._availability.retry_after_s,
            processes=self._processes(),
        )

    def _cache_status(self, pump: Pump) -> CacheStatus:
        status = pump.lanes.prefixes.status
        return status if self._directory is None else self._directory.described(status)

    async def open(self, request: Request) -> LocalStream:
        """See luceasync.request.Engine."""
        self._check_open(request)
        self._answers.remember()
        stream_id = next(self._stream_ids)
        choices = await self._preparing.choices(request, stream_id)
        self._check_open(request)  # others may have come in between
        stream = self._answers.open(
            stream_id,
            choices[0].prompt,
            len(choices),
            lambda: self._cancel(stream_id),
            lambda is_unread: self._set_unread(stream_id, is_unread),
            request.client,
        )
        self._admission.enter(len(choices), request.client)
        assert self._thread is not None
        capacity = self._admission.capacity
        self._thread.post(lambda pump: pump.submit(choices, capacity))
        return stream

    async def tokens(self, request: Request) -> tuple[int, ...]:
        """See luceasync.request.Engine."""
        self._check_open(request)
        self._answers.remember()
        return tuple((await self._preparing.rendered(request)).ids)

    async def look(self) -> EngineLook:
        """See luceasync.request.Engine."""
        return replace(await self._asked(look_at), device_bytes=self._device_bytes)

    async def drop_kept(self, keys: Sequence[str] | None) -> int:
        """See luceasync.request.Engine."""
        return await self._asked(lambda pump: drop_nodes(pump, keys))

    async def _asked(self, ask: Callable[[Pump], Found]) -> Found:
        """What `ask` finds between two steps. Raises Unavailable."""
        found: list[Found] = []
        if self._thread is not None and self._pump is not None:
            with suppress(TimeoutError):
                await self._thread.call(lambda pump: found.append(ask(pump)), LOOK_DEADLINE_S)
        if not found:
            raise unavailable(self._availability.detail, self._availability.retry_after_s)
        return found[0]

    def spelled(self, ids: Sequence[int], param: str) -> bytes:
        """See luceasync.request.Engine."""
        check_ids(ids, self._language.vocab_size, param)
        return b"".join(map(self._language.tokenizer.token_bytes, ids))

    def _check_open(self, request: Request) -> None:
        if not self._availability.is_ready:
            raise unavailable(self._availability.detail, self._availability.retry_after_s)
        away = self._processes().away
        if away is not None and away.retry_after_s > MAX_AWAY_S:
            raise unavailable(away.detail, away.retry_after_s)
        try:
            self._admission.check(request.num_choices, request.client)
        except QueueFull:
            if away is None:
                raise
            raise unavailable(away.detail, away.retry_after_s) from None

    def _cancel(self, stream_id: int) -> None:
        assert self._thread is not None
        self._thread.post(lambda pump: pump.cancel(stream_id))

    def _set_unread(self, stream_id: int, is_unread: bool) -> None:
        assert self._thread is not None
        self._thread.post(lambda pump: pump.set_unread(stream_id, is_unread=is_unread))

    def _tell(self, outcome: Callable[[PrefixCache], None]) -> None:
        """An outcome of the disk for the engine's thread."""
        assert self._thread is not None
        self._thread.post(lambda pump: outcome(pump.lanes.prefixes))

    # --- from the engine's thread: see luceasync.engine.thread.Listener ------------------------

    def deliver(self, emitted: Sequence[Emitted]) -> None:
        """Hand deltas to their streams."""
        ended = self._answers.deliver(emitted)
        for client, _ in ended:
            self._admission.leave(client)
        if ended:
            asyncio.get_running_loop().call_soon(self._ends_are_told)

    def _ends_are_told(self) -> None:
        """Their readers had their turn: nobody waits any more while the rest is done."""
        assert self._thread is not None
        self._thread.post(lambda pump: pump.lanes.delivered())
        self._answers.remember()

    def loaded(self, pump: Pump | None, error: BaseException | None) -> None:
        """The model is there, or again, or it will never be."""
        self._pump = pump
        if error is not None:
            self._availability.lost(MODEL, error)
        elif self._availability.is_interrupted:
            self._num_restarts += 1
            self._availability.resume()
            if self._directory is not None:
                self._directory.tell_again()
        else:
            self._availability.arrived(MODEL)

    def failed(self, detail: str, back_in_s: int) -> None:
        """The engine has failed; it is made anew."""
        self._pump = None
        self._availability.interrupt(detail, back_in_s)
