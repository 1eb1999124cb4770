"""The engine as the server sees it: requests in, streams out, all work in one thread of its own.

Puts the parts together and owns their life. Prompts are for Preparing, how many there may be for
Admission, streams for Answers, the disk for CacheDirectory, every step for the pump in the thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Self, TypeVar

from luceasync.config import EngineConfig
from luceasync.engine.admission import Admission
from luceasync.engine.answers import Answers, in_other_thread
from luceasync.engine.availability import Availability, unavailable
from luceasync.engine.cache_directory import Cabinet, CacheDirectory
from luceasync.engine.looking import drop_nodes, look_at
from luceasync.engine.outbox import Emitted
from luceasync.engine.preparing import Preparing
from luceasync.engine.prompts import Language, check_ids
from luceasync.engine.pump import Pump
from luceasync.engine.stream import LocalStream
from luceasync.engine.thread import EngineThread, Loaded
from luceasync.engine_look import EngineLook
from luceasync.engine_status import CacheStatus, EngineStatus
from luceasync.errors import QueueFull
from luceasync.keeping.disk_orders import DiskOrders, NoDisk
from luceasync.keeping.prefixes import Prefixes
from luceasync.keeping.tenants import Tenants
from luceasync.model_card import ModelCard
from luceasync.processes import NO_PROCESSES, Processes
from luceasync.request import Request
from luceasync.text.history import History

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
        load: Callable[[DiskOrders], Loaded],
        config: EngineConfig,
        cabinet: Cabinet | None = None,
        *,
        stopping: threading.Event | None = None,
        release: Callable[[], None] = lambda: None,
        processes: Callable[[], Processes] = lambda: NO_PROCESSES,
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
        self._preparing = Preparing(language, self._tenants)
        self._admission = Admission(language.num_lanes, config.max_queue)
        self._answers = Answers(in_other_thread)
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

    def _make(self, orders: DiskOrders) -> Loaded:
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
            await self._thread.call(lambda pump: pump.keep_all(), FLUSH_DEADLINE_S)
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
            speculation=pump.decoding.status if pump else None,
            residence=pump.lanes.status if pump else None,
            has_failed=self._availability.is_interrupted,
            restarts_total=self._num_restarts,
            retry_after_s=self._availability.retry_after_s,
            processes=self._processes(),
        )

    def _cache_status(self, pump: Pump) -> CacheStatus:
        status = pump.prefixes.status
        return status if self._directory is None else self._directory.described(status)

    async def open(self, request: Request) -> LocalStream:
        """See luceasync.request.Engine."""
        self._check_open(request)
        self._answers.remember()
        stream_id = next(self._stream_ids)
        prompt, choices = await self._preparing.choices(request, stream_id)
        self._check_open(request)  # others may have come in between
        stream = self._answers.open(
            stream_id,
            prompt,
            len(choices),
            lambda: self._cancel(stream_id),
            lambda is_behind: self._read(stream_id, is_behind),
            request.client,
        )
        self._admission.enter(len(choices), request.client)
        assert self._thread is not None
        room = self._admission.room
        self._thread.post(lambda pump: pump.submit(choices, room))
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

    def _read(self, stream_id: int, is_behind: bool) -> None:
        assert self._thread is not None
        self._thread.post(lambda pump: pump.read(stream_id, is_behind=is_behind))

    def _tell(self, outcome: Callable[[Prefixes], None]) -> None:
        """An outcome of the disk for the engine's thread."""
        assert self._thread is not None
        self._thread.post(lambda pump: outcome(pump.prefixes))

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
        self._thread.post(lambda pump: pump.ends_are_told())
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
