"""The server's own routes: that it lives, whether it is ready, what it counts.

Owns what they say. Knows no API family and no model list.
"""

from __future__ import annotations

import asyncio
import hmac
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
from luceasync.server.drain import Drain, race
from luceasync.server.failures import without_paths
from luceasync.server.fields import refuse
from luceasync.server.http.auth import key_in
from luceasync.server.http.body import client_gone
from luceasync.server.http.responses import EventStream, encode_event
from luceasync.server.metrics import CONTENT_TYPE, Metrics
from luceasync.server.web.page import Page, wants_page
from luceasync.status import CacheStatus, EngineLook, EngineStatus, ProcessStatus, SpeculationStatus

# A look at the engine as JSON, for people and their pages. Owns its fields. Knows nothing of
# who looks.


def told_status(engine: Engine) -> dict[str, object]:
    """What it serves, holds and has done; no path is told."""
    status, card = engine.status(), engine.card
    return {
        "model": card.name,
        "family": card.family,
        "num_parameters": card.num_parameters,
        "max_ctx_tokens": card.max_ctx_tokens,
        "ready": status.ready,
        "detail": without_paths(status.detail),
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


def told_look(look: EngineLook) -> Any:
    """Lanes, queue and nodes, field by field."""
    return msgspec.to_builtins(look)


def _process(process: ProcessStatus) -> dict[str, object]:
    return {
        "name": process.name,
        "devices": list(process.devices),
        "detail": without_paths(process.detail),
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
        "degraded": without_paths(cache.degraded),
    }


def _speculation(speculation: SpeculationStatus) -> dict[str, object]:
    proposed, accepted = sum(speculation.proposed_by_slot), sum(speculation.accepted_by_slot)
    total = Speculation(speculation.rounds_total, proposed, accepted)
    return {
        "rounds_total": total.rounds,
        "proposed_total": proposed,
        "accepted_total": accepted,
        "tau": total.tau,
    }


class StatusPages:
    """The GET routes that belong to no API."""

    def __init__(self, engine: Engine, drain: Drain, metrics: Metrics) -> None:
        self._engine = engine
        self._drain = drain
        self._metrics = metrics
        self._page = Page()

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
        """The page for browsers, a line for programs: some only look whether it is there."""
        if wants_page(request):
            return self._page.index(request)
        return json_response({"name": "luceasync", "version": __version__})

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def status(self, request: Request) -> Response:
        """What the engine holds and has done."""
        return json_response(told_status(self._engine))

    async def health(self, request: Request) -> Response:
        """Live: the process answers, whether or not the model is loaded. Degraded: it serves, but
        a fault of the disk keeps prefixes from being kept, or its drafter is gone. Failed, 503: the
        engine is gone and being made anew, or a process of its is and requests wait for it.
        """
        status = self._engine.status()
        if status.has_failed:
            detail, later_s = status.detail, status.retry_after_s
            return _later({"status": "failed", "detail": without_paths(detail)}, later_s)
        if status.ready and (away := status.processes.away) is not None:
            detail, later_s = away.detail, away.retry_after_s
            return _later({"status": "failed", "detail": without_paths(detail)}, later_s)
        faults = _faults(status)
        if faults:
            return json_response({"status": "degraded", "detail": without_paths(faults)})
        return json_response({"status": "ok", "detail": without_paths(status.detail)})

    async def ready(self, request: Request) -> Response:
        """503 while the model loads or a process of its is away, and from the moment the server
        shuts down.
        """
        status = self._engine.status()
        detail, later_s = status.detail, status.retry_after_s
        ready = status.ready and not self._drain.closing
        if self._drain.closing:
            detail = "shutting down"
        elif ready and (away := status.processes.away) is not None:
            ready, detail, later_s = False, away.detail, away.retry_after_s
        answer = {"ready": ready, "detail": without_paths(detail)}
        return json_response(answer) if ready else _later(answer, later_s)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.exposition(), headers={"content-type": CONTENT_TYPE})


def _faults(status: EngineStatus) -> str:
    """What does not work and costs no request; nothing where all does."""
    faults = [status.cache.degraded if status.cache else ""]
    faults += [status.speculation.off_reason or "" if status.speculation else ""]
    return "; ".join(fault for fault in faults if fault)


def _later(payload: object, seconds: int) -> Response:
    """`payload` as a 503 that says when to ask again."""
    response = json_response(payload, 503)
    response.headers["retry-after"] = str(seconds)
    return response


def json_response(payload: object, status: int = 200) -> Response:
    """`payload` as JSON."""
    return Response(msgspec.json.encode(payload), status, media_type="application/json")


# /admin/cache: what is kept, and letting go of it, for those who have an admin key. Owns who
# may. Knows nothing of how nodes are kept.


KEY = re.compile(r"[0-9a-f]{64}")


class CacheAdmin:
    """The routes; without an admin key nobody may."""

    def __init__(self, engine: Engine, keys: tuple[str, ...]) -> None:
        self._engine = engine
        self._keys = keys

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/admin/cache", self.all, methods=["GET", "DELETE"]),
            Route("/admin/cache/{key}", self.dropped, methods=["DELETE"]),
        ]

    async def all(self, request: Request) -> Response:
        """The nodes that were used last; or all go that no request needs, from memory and from the
        disk.
        """
        self._check(request)
        if request.method == "DELETE":
            return json_response({"dropped": await self._engine.drop_kept(None)})
        look = told_look(await self._engine.look())
        return json_response({"num_nodes": look["num_nodes"], "nodes": look["nodes"]})

    async def dropped(self, request: Request) -> Response:
        """One goes, and what continues it."""
        self._check(request)
        key = request.path_params["key"]
        if KEY.fullmatch(key) is None:
            refuse("key", key, "the key of a node, 64 hexadecimal digits")
        num_gone = await self._engine.drop_kept([key])
        if not num_gone:
            raise RequestError(
                "No such node is kept, or a request needs it.",
                param="key",
                code="not_found",
                status=404,
            )
        return json_response({"dropped": num_gone})

    def _check(self, request: Request) -> None:
        sent = key_in(request.scope)
        # Every key is compared, so that the time tells nothing of which one was near.
        found = [key for key in self._keys if hmac.compare_digest(sent, key.encode())]
        if not found:
            raise RequestError(
                "This needs an admin key (--admin-key), sent as 'Authorization: Bearer KEY'.",
                code="no_admin_key",
                status=403,
            )


# GET /status/events: a look at the engine now and then, for whoever watches. Owns how often,
# and that watchers hold up no shutdown. Knows nothing of what is looked at.


INTERVAL_S = 0.5
MAX_WATCHERS = 16


class Live:
    """The route; each watcher gets the same look."""

    def __init__(self, engine: Engine, drain: Drain) -> None:
        self._engine = engine
        self._drain = drain
        self._num_watchers = 0

    @property
    def routes(self) -> list[Route]:
        return [Route("/status/events", self._Watch(self), methods=["GET"])]

    class _Watch:
        """An ASGI app: a stream has no end of its own."""

        def __init__(self, live: Live) -> None:
            self._live = live

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await self._live.watch(receive, send)

    async def watch(self, receive: Receive, send: Send) -> None:
        """Tell until the client leaves or the server ends. Raises RequestError where too many
        watch.
        """
        if self._num_watchers >= MAX_WATCHERS:
            words = f"{MAX_WATCHERS} watch already."
            raise RequestError(words, code="too_many_watchers", status=429)
        self._num_watchers += 1
        events = EventStream(send)
        try:
            await race(self._tell(events), client_gone(receive))
        except ClientDisconnect:
            return
        except Unavailable:
            await events.close()
        finally:
            self._num_watchers -= 1

    async def _tell(self, events: EventStream) -> NoReturn:
        while not self._drain.closing:
            await events.write(encode_event(await self._look(), "status"))
            await asyncio.sleep(INTERVAL_S)
        raise Unavailable("The server is shutting down.")

    async def _look(self) -> dict[str, object]:
        told = told_status(self._engine)
        try:
            return told | {"live": told_look(await self._engine.look())}
        except LuceasyncError:  # not loaded yet, or it has failed: the status says so
            return told | {"live": None}
