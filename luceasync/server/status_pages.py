"""The server's own routes: health, readiness, metrics, status, and /admin/cache.

Independent of API families and of the model list.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import NoReturn

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from luceasync import __version__
from luceasync.errors import LuceasyncError, RequestError, Unavailable
from luceasync.request import Engine
from luceasync.server.answer_stats import AnswerRecord, RecentAnswers
from luceasync.server.drain import Drain, race
from luceasync.server.failures import redact_paths
from luceasync.server.family import typed_answer
from luceasync.server.fields import refuse
from luceasync.server.http.auth import matching_key
from luceasync.server.http.body import wait_for_disconnect
from luceasync.server.http.responses import EventStream, encode_event, json_response
from luceasync.server.metrics import CONTENT_TYPE, Metrics
from luceasync.server.status_fields import StatusFields, status_fields
from luceasync.server.web.page import WebPage, wants_page
from luceasync.status import (
    EngineStatus,
    LaneStatus,
    NodeStatus,
    WaitingStatus,
)

CACHE_KEY = re.compile(r"[0-9a-f]{64}")
EVENTS_INTERVAL_S = 0.5
MAX_WATCHERS = 16
MODEL_INFO_PATHS = ("/get_model_info", "/model_info", "/get_server_info", "/server_info")


class LiveFields(msgspec.Struct):
    """The fields that change between events: lanes, queue, recently used nodes, device memory and
    recent answers.
    """

    lanes: tuple[LaneStatus, ...]
    waiting: tuple[WaitingStatus, ...]
    nodes: tuple[NodeStatus, ...]
    num_nodes: int
    device_bytes: Mapping[str, int] | None
    device_parts: Mapping[str, Mapping[str, int]] | None
    recent: list[AnswerRecord]


class LiveStatus(StatusFields, kw_only=True):
    """An event: the status and, once the model is loaded, its live fields."""

    live: LiveFields | None


class ServerName(msgspec.Struct):
    name: str
    version: str


class ServerVersion(msgspec.Struct):
    version: str


class HealthFields(msgspec.Struct):
    """`status` is ok, degraded or failed; `detail` says why."""

    status: str
    detail: str


class ReadyFields(msgspec.Struct):
    ready: bool
    detail: str


class CachedNodes(msgspec.Struct):
    """The most recently used nodes out of `num_nodes`."""

    num_nodes: int
    nodes: tuple[NodeStatus, ...]


class DroppedNodes(msgspec.Struct):
    dropped: int


class ModelInfo(msgspec.Struct):
    """The model, with the field names of SGLang's workers; a path is reduced to a name."""

    model_path: str
    served_model_name: str
    tokenizer_path: str
    is_generation: bool
    max_total_num_tokens: int
    max_running_requests: int
    version: str


class ReplicaLoad(msgspec.Struct):
    """The server's load, with the field names of SGLang's workers. `token_usage` is always 0: each
    lane has its own memory and takes none from others, and routers would avoid a server with high
    usage.
    """

    dp_rank: int
    num_reqs: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    max_running_requests: int
    token_usage: float


class ReplicaLoads(msgspec.Struct):
    loads: list[ReplicaLoad]


class StatusPages:
    """The GET routes that belong to no API and need no admin key."""

    def __init__(self, engine: Engine, drain: Drain, metrics: Metrics) -> None:
        self._engine = engine
        self._drain = drain
        self._metrics = metrics
        self._page = WebPage()

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/", self.root),
            *self._page.routes,
            Route("/status", self.status),
            Route("/version", self.version),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            *(Route(path, self.model_info) for path in MODEL_INFO_PATHS),
            Route("/v1/loads", self.loads),
            Route("/get_load", self.load),
        ]

    @typed_answer(ServerName)
    async def root(self, request: Request) -> Response:
        """The web page for browsers, JSON for programs that check whether the server is there."""
        if wants_page(request):
            return await self._page.index(request)
        return json_response(ServerName("luceasync", __version__))

    @typed_answer(ServerVersion)
    async def version(self, request: Request) -> Response:
        """The server's version."""
        return json_response(ServerVersion(__version__))

    @typed_answer(StatusFields)
    async def status(self, request: Request) -> Response:
        """The engine's model, lanes, queue, cache and counters."""
        return json_response(status_fields(self._engine))

    @typed_answer(HealthFields)
    async def health(self, request: Request) -> Response:
        """Whether the process works, with or without a loaded model.

        "degraded": it serves, but disk errors keep prefixes from being saved, or the drafter is
        gone. "failed", with a 503: the engine, or one of its processes, is being restarted, and
        requests wait for it.
        """
        status = self._engine.status()
        if status.has_failed:
            detail, retry_after_s = status.detail, status.retry_after_s
            return _unavailable(HealthFields("failed", redact_paths(detail)), retry_after_s)
        if status.ready and (away := status.processes.away) is not None:
            detail, retry_after_s = away.detail, away.retry_after_s
            return _unavailable(HealthFields("failed", redact_paths(detail)), retry_after_s)
        faults = _faults(status)
        if faults:
            return json_response(HealthFields("degraded", redact_paths(faults)))
        return json_response(HealthFields("ok", redact_paths(status.detail)))

    @typed_answer(ReadyFields)
    async def ready(self, request: Request) -> Response:
        """503 while the model loads, while one of its processes is away, and during shutdown."""
        status = self._engine.status()
        detail, retry_after_s = status.detail, status.retry_after_s
        ready = status.ready and not self._drain.closing
        if self._drain.closing:
            detail = "shutting down"
        elif ready and (away := status.processes.away) is not None:
            ready, detail, retry_after_s = False, away.detail, away.retry_after_s
        answer = ReadyFields(ready, redact_paths(detail))
        return json_response(answer) if ready else _unavailable(answer, retry_after_s)

    @typed_answer(str, "text/plain")
    async def metrics(self, request: Request) -> Response:
        """Metrics in Prometheus' text format."""
        return Response(self._metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    @typed_answer(ModelInfo)
    async def model_info(self, request: Request) -> Response:
        """Information that routers request when they register a worker."""
        card, num_lanes = self._engine.card, self._engine.status().num_lanes
        tokens = num_lanes * card.max_ctx_tokens
        names = card.name, card.name, card.name
        return json_response(ModelInfo(*names, True, tokens, num_lanes, __version__))

    @typed_answer(ReplicaLoads)
    async def loads(self, request: Request) -> Response:
        """Running and waiting requests, polled by routers."""
        return json_response(ReplicaLoads([_load(self._engine.status())]))

    @typed_answer(list[ReplicaLoad])
    async def load(self, request: Request) -> Response:
        """The same for older routers."""
        return json_response([_load(self._engine.status())])


def _load(status: EngineStatus) -> ReplicaLoad:
    running, waiting = status.num_running, status.num_queued
    total = running + waiting
    return ReplicaLoad(0, total, running, waiting, total, status.num_lanes, 0.0)


def _faults(status: EngineStatus) -> str:
    """Faults that do not fail any request; "" if there are none."""
    faults = [status.cache.degraded if status.cache else ""]
    faults += [status.speculation.off_reason or "" if status.speculation else ""]
    return "; ".join(fault for fault in faults if fault)


def _unavailable(payload: object, retry_after_s: int) -> Response:
    return json_response(payload, 503, {"retry-after": str(retry_after_s)})


class StatusEvents:
    """GET /status/events: sends the status as an event every EVENTS_INTERVAL_S, to at most
    MAX_WATCHERS clients.

    Watchers do not delay a shutdown.
    """

    def __init__(self, engine: Engine, drain: Drain, recent: RecentAnswers) -> None:
        self._engine = engine
        self._drain = drain
        self._recent = recent
        self._num_watchers = 0

    @property
    def routes(self) -> list[Route]:
        return [Route("/status/events", self._Watch(self), methods=["GET"])]

    @typed_answer(LiveStatus, "text/event-stream")
    class _Watch:
        """The status of the engine and its live fields, as server-sent events. An ASGI app, since a
        Starlette endpoint would have to return a response.
        """

        def __init__(self, events: StatusEvents) -> None:
            self._events = events

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await self._events.watch(receive, send)

    async def watch(self, receive: Receive, send: Send) -> None:
        """Send events until the client disconnects or the server shuts down. Raises RequestError
        with status 429 above MAX_WATCHERS.
        """
        if self._num_watchers >= MAX_WATCHERS:
            message = f"{MAX_WATCHERS} clients watch already."
            raise RequestError(message, code="too_many_watchers", status=429)
        self._num_watchers += 1
        events = EventStream(send)
        try:
            await race(self._send_events(events), wait_for_disconnect(receive))
        except ClientDisconnect:
            return
        except Unavailable:
            await events.close()
        finally:
            self._num_watchers -= 1

    async def _send_events(self, events: EventStream) -> NoReturn:
        while not self._drain.closing:
            await events.write(encode_event(await self._status(), "status"))
            await asyncio.sleep(EVENTS_INTERVAL_S)
        raise Unavailable("The server is shutting down.")

    async def _status(self) -> LiveStatus:
        fields = msgspec.structs.asdict(status_fields(self._engine))
        try:
            found = await self._engine.details()
        except LuceasyncError:  # not loaded yet, or failed: the status reports it
            return LiveStatus(**fields, live=None)
        live = LiveFields(
            lanes=found.lanes,
            waiting=found.waiting,
            nodes=found.nodes,
            num_nodes=found.num_nodes,
            device_bytes=found.device_bytes,
            device_parts=found.device_parts,
            recent=self._recent.records(),
        )
        return LiveStatus(**fields, live=live)


class CacheAdmin:
    """Lists and drops cached nodes; every request needs one of the admin `keys`."""

    def __init__(self, engine: Engine, keys: tuple[str, ...]) -> None:
        self._engine = engine
        self._keys = keys

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/admin/cache", self.nodes, methods=["GET", "DELETE"]),
            Route("/admin/cache/{key}", self.drop_node, methods=["DELETE"]),
        ]

    @typed_answer(CachedNodes, DELETE=DroppedNodes)
    async def nodes(self, request: Request) -> Response:
        """GET: the most recently used nodes. DELETE: drop all nodes that no request needs, from
        memory and from disk.
        """
        self._check(request)
        if request.method == "DELETE":
            return json_response(DroppedNodes(await self._engine.drop_nodes(None)))
        found = await self._engine.details()
        return json_response(CachedNodes(found.num_nodes, found.nodes))

    @typed_answer(DroppedNodes)
    async def drop_node(self, request: Request) -> Response:
        """Drop a node and its descendants."""
        self._check(request)
        key = request.path_params["key"]
        if CACHE_KEY.fullmatch(key) is None:
            refuse("key", key, "the key of a node, 64 hexadecimal digits")
        num_dropped = await self._engine.drop_nodes([key])
        if not num_dropped:
            raise RequestError(
                "There is no such node, or a request needs it.",
                param="key",
                code="not_found",
                status=404,
            )
        return json_response(DroppedNodes(num_dropped))

    def _check(self, request: Request) -> None:
        if matching_key(request.scope, self._keys) is None:
            raise RequestError(
                "This route needs an admin key (--admin-key), sent as 'Authorization: Bearer KEY'.",
                code="no_admin_key",
                status=403,
            )
