"""The server's own routes: that it lives, whether it is ready, what it counts.

Owns what they say. Knows no API family and no model list.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from luceasync import __version__
from luceasync.engine_status import EngineStatus
from luceasync.request import Engine
from luceasync.server.discretion import without_paths
from luceasync.server.drain import Drain
from luceasync.server.engine_view import told_status
from luceasync.server.metrics import CONTENT_TYPE, Metrics
from luceasync.server.page import Page, wants_page


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
