"""Requests that are being answered, by their ids, so that somebody else can end one.

Owns who may: whoever has the key that the request came with. Knows nothing of answers.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from luceasync.errors import RequestError
from luceasync.server.fields import cut
from luceasync.server.http.auth import accepted_key
from luceasync.server.status_pages import json_response


class Ending:
    """One request's end, which somebody may ask for; event loop only."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """End it as soon as may be."""
        self._asked.set()

    async def wait(self) -> NoReturn:
        """Wait for that. Raises RequestError then, for the client that still reads the answer."""
        await self._asked.wait()
        raise RequestError("The request was cancelled.", code="cancelled", status=409)


class Running:
    """An id names every request that came with it: clients may send one twice."""

    def __init__(self) -> None:
        self._endings: defaultdict[tuple[str, str], set[Ending]] = defaultdict(set)

    def __repr__(self) -> str:
        return f"Running({len(self._endings)} ids)"

    @contextmanager
    def enter(self, key: str, request_id: str) -> Iterator[Ending]:
        """The request that came with `key` is there until the end of the `with`."""
        name, ending = (key, request_id), Ending()
        self._endings[name].add(ending)
        try:
            yield ending
        finally:
            self._endings[name].discard(ending)
            if not self._endings[name]:
                del self._endings[name]

    def end(self, key: str, request_id: str) -> int:
        """End those of this id that came with `key`; how many there are."""
        endings = self._endings.get((key, request_id), set())
        for ending in endings:
            ending.ask()
        return len(endings)

    @property
    def routes(self) -> list[Route]:
        """POST /cancel/ID, by the `x-request-id` of the answer that is to end."""
        return [Route("/cancel/{request_id:path}", self._cancel, methods=["POST"])]

    async def _cancel(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        num_ended = self.end(accepted_key(request.scope), request_id)
        if not num_ended:
            raise RequestError(
                f"No request {cut(request_id)} is being answered.",
                param="request_id",
                code="not_running",
                status=404,
            )
        return json_response({"id": request_id, "cancelled": num_ended})
