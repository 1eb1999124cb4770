"""Running requests by their ids, and POST /cancel/ID, which cancels one.

A request can be cancelled only with the API key that it was sent with.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from luceasync.errors import RequestError
from luceasync.server.family import typed_answer
from luceasync.server.fields import shorten
from luceasync.server.http.auth import accepted_key
from luceasync.server.http.responses import json_response


class Cancelled(msgspec.Struct):
    """How many requests with that id were cancelled."""

    id: str
    cancelled: int


class Cancellation:
    """The cancellation of one request; used on the event loop only."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()

    def request(self) -> None:
        """End the request as soon as possible."""
        self._requested.set()

    async def wait(self) -> NoReturn:
        """Wait until cancellation is requested, then raise the RequestError for the client."""
        await self._requested.wait()
        raise RequestError("The request was cancelled.", code="cancelled", status=409)


class RunningRequests:
    """Cancellations by key and request id. Clients may reuse an id for several requests."""

    def __init__(self) -> None:
        self._running: defaultdict[tuple[str, str], set[Cancellation]] = defaultdict(set)

    def __repr__(self) -> str:
        return f"RunningRequests({len(self._running)} ids)"

    @contextmanager
    def enter(self, key: str, request_id: str) -> Iterator[Cancellation]:
        """List a request that was sent with `key` until the end of the `with` block."""
        name, cancellation = (key, request_id), Cancellation()
        self._running[name].add(cancellation)
        try:
            yield cancellation
        finally:
            self._running[name].discard(cancellation)
            if not self._running[name]:
                del self._running[name]

    def cancel(self, key: str, request_id: str) -> int:
        """Cancel the requests with this id that were sent with `key`. Returns their number."""
        cancellations = self._running.get((key, request_id), set())
        for cancellation in cancellations:
            cancellation.request()
        return len(cancellations)

    @property
    def routes(self) -> list[Route]:
        """POST /cancel/ID, by the `x-request-id` of the answer."""
        return [Route("/cancel/{request_id:path}", self._cancel, methods=["POST"])]

    @typed_answer(Cancelled)
    async def _cancel(self, request: Request) -> Response:
        """Cancel the running request with this `x-request-id`."""
        request_id = request.path_params["request_id"]
        num_cancelled = self.cancel(accepted_key(request.scope), request_id)
        if not num_cancelled:
            raise RequestError(
                f"No request {shorten(request_id)} is being answered.",
                param="request_id",
                code="not_running",
                status=404,
            )
        return json_response(Cancelled(request_id, num_cancelled))
