"""The server's own routes: health, readiness, metrics, status, and /admin/cache.

Knows no API family and no model list.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, NoReturn

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from luceasync import __version__
from luceasync.errors import LuceasyncError, RequestError, Unavailable
from luceasync.request import Engine, Speculation
from luceasync.server.answer_stats import RecentAnswers
from luceasync.server.drain import Drain, race
from luceasync.server.failures import redact_paths
from luceasync.server.fields import refuse
from luceasync.server.http.auth import matching_key
from luceasync.server.http.body import wait_for_disconnect
from luceasync.server.http.responses import EventStream, encode_event, json_response
from luceasync.server.metrics import CONTENT_TYPE, Metrics
from luceasync.server.web.page import WebPage, wants_page
from luceasync.status import (
    CacheStatus,
    EngineDetails,
    EngineStatus,
    ProcessStatus,
    SpeculationStatus,
)

CACHE_KEY = re.compile(r"[0-9a-f]{64}")
THINKS = re.compile("think|reason", re.IGNORECASE)  # in the chat template of a model that can
EVENTS_INTERVAL_S = 0.5
MAX_WATCHERS = 16


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
        ]

    async def root(self, request: Request) -> Response:
        """The web page for browsers, JSON for programs that check whether the server is there."""
        if wants_page(request):
            return await self._page.index(request)
        return json_response({"name": "luceasync", "version": __version__})

    async def version(self, request: Request) -> Response:
        """The server's version."""
        return json_response({"version": __version__})

    async def status(self, request: Request) -> Response:
        """What the engine serves, holds and has counted."""
        return json_response(status_fields(self._engine))

    async def health(self, request: Request) -> Response:
        """Whether the process works, model loaded or not.

        "degraded": it serves, but disk errors keep prefixes from being saved, or the drafter is
        gone. "failed", with a 503: the engine, or one of its processes, is being restarted, and
        requests wait for it.
        """
        status = self._engine.status()
        if status.has_failed:
            detail, retry_after_s = status.detail, status.retry_after_s
            return _unavailable({"status": "failed", "detail": redact_paths(detail)}, retry_after_s)
        if status.ready and (away := status.processes.away) is not None:
            detail, retry_after_s = away.detail, away.retry_after_s
            return _unavailable({"status": "failed", "detail": redact_paths(detail)}, retry_after_s)
        faults = _faults(status)
        if faults:
            return json_response({"status": "degraded", "detail": redact_paths(faults)})
        return json_response({"status": "ok", "detail": redact_paths(status.detail)})

    async def ready(self, request: Request) -> Response:
        """503 while the model loads, while one of its processes is away, and during shutdown."""
        status = self._engine.status()
        detail, retry_after_s = status.detail, status.retry_after_s
        ready = status.ready and not self._drain.closing
        if self._drain.closing:
            detail = "shutting down"
        elif ready and (away := status.processes.away) is not None:
            ready, detail, retry_after_s = False, away.detail, away.retry_after_s
        answer = {"ready": ready, "detail": redact_paths(detail)}
        return json_response(answer) if ready else _unavailable(answer, retry_after_s)

    async def metrics(self, request: Request) -> Response:
        """Metrics in Prometheus' text format."""
        return Response(self._metrics.exposition(), headers={"content-type": CONTENT_TYPE})


def _faults(status: EngineStatus) -> str:
    """What is broken without failing any request; "" if nothing is."""
    faults = [status.cache.degraded if status.cache else ""]
    faults += [status.speculation.off_reason or "" if status.speculation else ""]
    return "; ".join(fault for fault in faults if fault)


def _unavailable(payload: object, retry_after_s: int) -> Response:
    return json_response(payload, 503, {"retry-after": str(retry_after_s)})


class StatusEvents:
    """GET /status/events: the status as an event every EVENTS_INTERVAL_S, for at most MAX_WATCHERS.

    Watchers do not hold up a shutdown.
    """

    def __init__(self, engine: Engine, drain: Drain, recent: RecentAnswers) -> None:
        self._engine = engine
        self._drain = drain
        self._recent = recent
        self._num_watchers = 0

    @property
    def routes(self) -> list[Route]:
        return [Route("/status/events", self._Watch(self), methods=["GET"])]

    class _Watch:
        """The status of the engine and what is live, as server-sent events. An ASGI app, since a
        Starlette endpoint would have to return a response.
        """

        def __init__(self, events: StatusEvents) -> None:
            self._events = events

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await self._events.watch(receive, send)

    async def watch(self, receive: Receive, send: Send) -> None:
        """Send events until the client leaves or the server shuts down. Raises RequestError with
        status 429 above MAX_WATCHERS.
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

    async def _status(self) -> dict[str, object]:
        fields = status_fields(self._engine)
        try:
            live = detail_fields(await self._engine.details())
        except LuceasyncError:  # not loaded yet, or failed: the status says so
            return fields | {"live": None}
        return fields | {"live": live | {"recent": self._recent.fields()}}


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

    async def nodes(self, request: Request) -> Response:
        """GET: the most recently used nodes. DELETE: drop all that no request needs, from memory
        and from disk.
        """
        self._check(request)
        if request.method == "DELETE":
            return json_response({"dropped": await self._engine.drop_nodes(None)})
        fields = detail_fields(await self._engine.details())
        return json_response({"num_nodes": fields["num_nodes"], "nodes": fields["nodes"]})

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
        return json_response({"dropped": num_dropped})

    def _check(self, request: Request) -> None:
        if matching_key(request.scope, self._keys) is None:
            raise RequestError(
                "This route needs an admin key (--admin-key), sent as 'Authorization: Bearer KEY'.",
                code="no_admin_key",
                status=403,
            )


def status_fields(engine: Engine) -> dict[str, object]:
    """The engine's status as JSON fields, with all paths redacted."""
    status, card = engine.status(), engine.card
    return {
        "model": card.name,
        "family": card.family,
        "num_parameters": card.num_parameters,
        "max_ctx_tokens": card.max_ctx_tokens,
        "tool_format": card.tool_format or None,
        "tools_in_system_message": card.tells_tools,
        "takes_chats": card.takes_chats,
        "thinks": card.thinks and THINKS.search(card.chat_template) is not None,
        "reasons": [redact_paths(reason) for reason in card.reasons],
        "ready": status.ready,
        "detail": redact_paths(status.detail),
        "num_lanes": status.num_lanes,
        "num_running": status.num_running,
        "num_queued": status.num_queued,
        "prefilled_tokens_total": status.prefilled_tokens_total,
        "decoded_tokens_total": status.decoded_tokens_total,
        "decode_steps_total": status.decode_steps_total,
        "restarts_total": status.restarts_total,
        "cache": None if status.cache is None else _cache(status.cache),
        "speculation": None if status.speculation is None else _speculation(status.speculation),
        "processes": [_process(each) for each in status.processes.all],
    }


def detail_fields(details: EngineDetails) -> Any:
    """Lanes, queue and nodes as JSON fields."""
    return msgspec.to_builtins(details)


def _process(process: ProcessStatus) -> dict[str, object]:
    return {
        "name": process.name,
        "devices": list(process.devices),
        "detail": redact_paths(process.detail),
        "num_starts": process.num_starts,
        "resident_bytes": process.resident_bytes,
        "node_bytes": process.node_bytes,
    }


def _cache(cache: CacheStatus) -> dict[str, object]:
    return {
        "num_bytes": dict(cache.num_bytes),
        "num_nodes": dict(cache.num_nodes),
        "restored_total": dict(cache.restored_total),
        "restored_tokens_total": dict(cache.restored_tokens_total),
        "missed_total": dict(cache.missed_total),
        "num_unwritten": cache.num_unwritten,
        "degraded": redact_paths(cache.degraded),
    }


def _speculation(speculation: SpeculationStatus) -> dict[str, object]:
    proposed, accepted = sum(speculation.proposed_by_slot), sum(speculation.accepted_by_slot)
    total = Speculation(speculation.rounds_total, proposed, accepted)
    return {
        "rounds_total": total.rounds,
        "proposed_total": proposed,
        "accepted_total": accepted,
        "tau": total.tau,
        "off_reason": redact_paths(speculation.off_reason or "") or None,
    }
