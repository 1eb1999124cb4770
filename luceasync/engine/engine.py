"""The engine as the server sees it: requests in, streams out, all work in one separate thread.

Assembles the parts and owns their lifetime: ChoicePreparation, Admission, OpenAnswers,
CacheDirectory, and the pump in its thread.
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
from luceasync.engine.cache_directory import CacheDirectory, CacheDirectorySpec
from luceasync.engine.prepare import ChoicePreparation
from luceasync.engine.prompts import Language, check_ids
from luceasync.engine.pump import Pump
from luceasync.engine.sequence import Generation
from luceasync.engine.streams import Emitted, LocalStream, OpenAnswers, soon
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
    EngineDetails,
    EngineStatus,
    LaneStatus,
    SpeculationStatus,
    WaitingStatus,
    conversation_label,
)
from luceasync.text.history import History

log = logging.getLogger(__name__)

Found = TypeVar("Found")

FLUSH_DEADLINE_S = 30.0
INSPECT_DEADLINE_S = 10.0
SWITCH_INTERVAL_S = 5e-4  # the default of 5 ms lets the thread's Python hold up the event loop
MAX_AWAY_S = 60  # requests are refused rather than wait for a process that is away for longer
MODEL, DIRECTORY = "model", "cache directory"  # both are needed before requests are accepted
MAX_LOADING_S = 60  # the longest delay that clients are told to wait before they retry
MAX_NODES = 256  # in EngineDetails
MAX_WAITING = 64


class LocalEngine:
    """An engine in this process. `async with` starts its thread and ends it.

    `load(orders)` is called in that thread; until it returns, `open` raises Unavailable.
    """

    def __init__(
        self,
        language: Language,
        load: Callable[[DiskOrders], LoadedEngine],
        config: EngineConfig,
        directory_spec: CacheDirectorySpec | None = None,
        *,
        stopping: threading.Event | None = None,
        release: Callable[[], None] = lambda: None,
        processes: Callable[[], BackendProcesses] = lambda: NO_PROCESSES,
        device_parts: Mapping[str, Mapping[str, int]] | None = None,
        gpu_bytes: int = 0,
        drafts_copies: bool = False,
    ) -> None:
        """`stopping`, `release`: see EngineThread. `processes`: of stages and the drafter, besides
        this one. `drafts_copies`: proposals are copied from texts, which are indexed for this
        purpose."""
        self._device_parts = device_parts or {}
        self._gpu_bytes = gpu_bytes
        self._language = language
        self._load = load
        self._directory_spec = directory_spec
        self._stopping = stopping or threading.Event()
        self._release = release
        self._processes = processes
        self._num_restarts = 0
        self._tenants = Tenants(lambda: History(language.tokenizer), language.calls_in)
        self._preparing = ChoicePreparation(language, self._tenants, drafts_copies=drafts_copies)
        self._admission = Admission(language.num_lanes, config.max_queue)
        self._answers = OpenAnswers(soon)
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
        if self._directory_spec is not None:
            self._directory = CacheDirectory(
                self._directory_spec, self._tenants, self._deliver_outcome
            )
            orders = self._directory.orders
        self._thread = EngineThread(
            lambda: self._load_engine(orders), self, stopping=self._stopping, release=self._release
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

    def _load_engine(self, orders: DiskOrders) -> LoadedEngine:
        """Load an engine, initially or after a failure; called in its thread."""
        if self._directory is not None:
            self._directory.begin_life()
        return self._load(orders)

    async def load(self) -> None:
        """Wait until the model is loaded and the cache directory scanned. Raises at once if either
        fails."""
        await self._availability.wait()

    async def flush(self) -> None:
        """Wait until everything to be saved of ended requests is on the disk. Raises
        TimeoutError."""
        assert self._thread is not None
        for _ in range(3):  # the result of an order may cause another order
            await self._thread.call(lambda pump: pump.save_all(), FLUSH_DEADLINE_S)
            if self._directory is not None:
                await self._directory.drain(FLUSH_DEADLINE_S)

    async def _end_all(self) -> None:
        """Cancel all requests, and write to the disk what is worth keeping."""
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
        """Serve the cache directory for the lifetime of the engine."""
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
            speculation=self._speculation_status(pump) if pump else None,
            residence=pump.lanes.paging.status if pump else None,
            experts=pump.steps.experts if pump else None,
            has_failed=self._availability.is_interrupted,
            restarts_total=self._num_restarts,
            retry_after_s=self._availability.retry_after_s,
            processes=self._processes(),
        )

    def _cache_status(self, pump: Pump) -> CacheStatus:
        status = pump.lanes.prefixes.status
        return status if self._directory is None else self._directory.described(status)

    def _speculation_status(self, pump: Pump) -> SpeculationStatus | None:
        status = pump.steps.decoding.status
        return status and replace(status, unindexed_total=self._preparing.num_unindexed)

    def check_ready(self) -> None:
        if not self._availability.is_ready:
            raise Unavailable(self._availability.detail, self._availability.retry_after_s)

    async def open(self, request: Request) -> LocalStream:
        self._check_open(request)
        self._answers.remember()
        stream_id = next(self._stream_ids)
        choices = await self._preparing.choices(request, stream_id)
        if self._directory is not None and await self._directory.learn(choices[0].prompt):
            choices = await self._preparing.choices(request, stream_id)
        self._check_open(request)  # other requests may have entered meanwhile
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

    def sent(self) -> None:
        """No client waits now while lanes are saved and answers are remembered."""
        if self._answers.has_ended:
            assert self._thread is not None
            self._thread.post(lambda pump: pump.lanes.delivered())
            self._answers.remember()

    async def tokens(self, request: Request) -> tuple[int, ...]:
        self._check_open(request)
        self._answers.remember()
        return tuple((await self._preparing.rendered(request)).ids)

    async def details(self) -> EngineDetails:
        parts = self._device_parts
        sums = {name: each["weights"] + each["lanes"] for name, each in parts.items()}
        details = await self._ask(details_of)
        return replace(details, device_bytes=sums, device_parts=parts, gpu_bytes=self._gpu_bytes)

    async def drop_nodes(self, keys: Sequence[str] | None) -> int:
        return await self._ask(lambda pump: drop_nodes(pump, keys))

    async def _ask(self, ask: Callable[[Pump], Found]) -> Found:
        """Run `ask` between two steps and return its result. Raises Unavailable."""
        found: list[Found] = []
        if self._thread is not None and self._pump is not None:
            with suppress(TimeoutError):
                await self._thread.call(lambda pump: found.append(ask(pump)), INSPECT_DEADLINE_S)
        if not found:
            raise unavailable(self._availability.detail, self._availability.retry_after_s)
        return found[0]

    def token_bytes(self, ids: Sequence[int], param: str) -> bytes:
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

    def _deliver_outcome(self, outcome: Callable[[PrefixCache], None]) -> None:
        """Hand the result of a disk order to the engine's thread."""
        assert self._thread is not None
        self._thread.post(lambda pump: outcome(pump.lanes.prefixes))

    # --- called by the engine's thread, as its Listener ----------------------------------------

    def deliver(self, emitted: Sequence[Emitted]) -> None:
        """Hand deltas to their streams, and count the choices that have ended."""
        for client, _ in self._answers.deliver(emitted):
            self._admission.leave(client)

    def loaded(self, pump: Pump | None, error: BaseException | None) -> None:
        """The model is loaded, initially or again; an error means that it never will be."""
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
        """The engine has failed and is being loaded again."""
        self._pump = None
        self._availability.interrupt(detail, back_in_s)


class Availability:
    """Whether requests are accepted, and if not, why: they are refused until every part is loaded,
    after a fault, and between `interrupt` and `resume`. Event loop only."""

    def __init__(self, parts: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_s = clock()
        self._back_s: float | None = None  # when an interruption is expected to be over
        self._awaited = set(parts)
        self._arrivals: dict[str, asyncio.Future[None]] = {}
        self._fault = ""
        self._interruption = ""

    @property
    def is_ready(self) -> bool:
        return not self._awaited and not self._fault and not self._interruption

    @property
    def is_interrupted(self) -> bool:
        """Whether the engine has failed and has not recovered yet."""
        return bool(self._interruption)

    @property
    def detail(self) -> str:
        """Why requests are not accepted, or "ready"."""
        awaited = "loading the model" if self._awaited else "ready"
        return self._fault or self._interruption or awaited

    @property
    def retry_after_s(self) -> int:
        """Seconds after which a refused client may retry: the rest of an interruption; during the
        first load, whose duration is unknown, as long as it has taken so far."""
        now_s = self._clock()
        if self._back_s is not None:
            return max(1, math.ceil(self._back_s - now_s))
        loading_s = round(now_s - self._begun_s) if self._awaited else 1
        return max(1, min(MAX_LOADING_S, loading_s))

    def begin(self) -> None:
        """The parts are being loaded; called on the event loop."""
        self._begun_s = self._clock()
        loop = asyncio.get_running_loop()
        self._arrivals = {part: loop.create_future() for part in self._awaited}

    async def wait(self) -> None:
        """Wait until every part is loaded. Raises at once if one fails."""
        assert self._arrivals, "`begin` comes first"
        await asyncio.gather(*map(asyncio.shield, self._arrivals.values()))

    def has_come(self, part: str) -> bool:
        """Whether the part is loaded, or has failed."""
        return self._arrivals[part].done()

    def arrived(self, part: str) -> None:
        """The part is loaded."""
        self._arrivals[part].set_result(None)
        self._awaited.discard(part)

    def lost(self, part: str, error: BaseException) -> None:
        """The part has failed for good."""
        self._fault = str(error)
        self._arrivals[part].set_exception(error)

    def interrupt(self, words: str, back_in_s: int) -> None:
        """Refuse requests for now; clients may retry in `back_in_s` seconds."""
        self._interruption, self._back_s = words, self._clock() + back_in_s

    def resume(self) -> None:
        """Accept requests again."""
        self._interruption, self._back_s = "", None

    def stop(self, words: str) -> None:
        """Refuse all requests from now on."""
        self._fault = words


def unavailable(detail: str, retry_after_s: int) -> Unavailable:
    """The error of a refused request."""
    return Unavailable(f"The model is not available: {detail}.", retry_after_s)


def details_of(pump: Pump, num_nodes: int = MAX_NODES) -> EngineDetails:
    """Lanes, queue and the nodes used last. Engine thread only."""
    pump.lanes.release_deferred()  # nodes of answers that have ended are among them
    now_s, nodes = time.monotonic(), list(pump.lanes.prefixes.index)
    words = pump.lanes.prefixes.conversation_words()
    labels = {key.hex(): conversation_label(word) for key, word in words.items()}
    return EngineDetails(
        lanes=tuple(_lane_status(pump, g, now_s) for g in pump.scheduler.running),
        waiting=tuple(
            WaitingStatus(len(g.prepared.prompt.ids), now_s - g.submitted_at, _label(g))
            for g in pump.scheduler.waiting[:MAX_WAITING]
        ),
        nodes=tuple(
            replace(node, conversation=labels.get(node.key)) for node in newest(nodes, num_nodes)
        ),
        num_nodes=len(nodes),
    )


def _lane_status(pump: Pump, generation: Generation, now_s: float) -> LaneStatus:
    lane = generation.on_lane
    speculation = pump.steps.decoding.speculation(lane)
    residence = pump.lanes.paging.residence(lane)
    return LaneStatus(
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
        conversation=_label(generation),
        tier=generation.lease.restore.tier,
        decision=generation.lease.restore.decision,
        miss_reason=generation.lease.restore.miss_reason,
    )


def _label(generation: Generation) -> str | None:
    return conversation_label(generation.prepared.request.conversation)


def _phase(generation: Generation) -> str:
    if generation.is_restoring:
        return "restoring"
    if generation.is_unread:
        return "unread"
    return "decoding" if generation.is_decoding else "prefilling"


def drop_nodes(pump: Pump, keys: Collection[str] | None) -> int:
    """Drop the nodes of these keys, or all, in every tier, and their descendants; returns how many.
    Nodes that a request needs stay. Engine thread only.
    """
    pump.lanes.release_deferred()  # nodes of answers that have ended are dropped too
    prefixes = pump.lanes.prefixes
    before = sum(1 for _ in prefixes.index)
    prefixes.clear({bytes.fromhex(key) for key in keys} if keys is not None else None)
    return before - sum(1 for _ in prefixes.index)
