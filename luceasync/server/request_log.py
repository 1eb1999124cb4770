"""Logs one line for each request, and gives it an id by which a client can find that line.

Owns the id, the note on an answer, and the log line. Independent of APIs and bodies.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from luceasync.request import Delta, Finish

logger = logging.getLogger(__name__)

HEADER = "x-request-id"
SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# Polled by programs and by an open status page.
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/status", "/v1/loads", "/get_load"})
_NOTE = "luceasync.request_note"


@dataclass(slots=True)
class RequestNote:
    """What happened to one request, over all of its choices. Times are from `time.perf_counter`, in
    seconds.
    """

    request_id: str
    begun_s: float = field(default_factory=time.perf_counter)
    status: int | None = None
    first_token_s: float | None = None
    num_new: int = 0
    finishes: list[Finish] = field(default_factory=list)
    remark: str = ""

    def take(self, delta: Delta) -> None:
        """Record a delta on its way to the client."""
        if delta.token_ids:
            if self.first_token_s is None:
                self.first_token_s = time.perf_counter()
            self.num_new += len(delta.token_ids)
        if delta.finish is not None:
            self.finishes.append(delta.finish)

    def words(self) -> Iterator[str]:
        """The words of the log line from the status on; unknown values are left out."""
        yield str(self.status or "-")
        yield f"{time.perf_counter() - self.begun_s:.2f} s"
        if self.finishes:
            usages = [finish.usage for finish in self.finishes]
            yield f"prompt={usages[0].prompt_tokens}"
            yield f"cached={max(usage.cached_tokens for usage in usages)}"
        if self.num_new:
            yield f"new={self.num_new}"
        if self.first_token_s is not None:
            yield f"first={self.first_token_s - self.begun_s:.3f} s"
        yield from self._pace()
        if self.remark:
            yield self.remark
        yield f"id={self.request_id}"

    def _pace(self) -> Iterator[str]:
        """Tokens per second after the first one, and tokens per round of speculation."""
        decode_s = max((finish.timings.decode_s for finish in self.finishes), default=0.0)
        num_decoded = sum(finish.timings.num_decoded for finish in self.finishes)
        if decode_s > 0 and num_decoded:
            yield f"{num_decoded / decode_s:.1f} tokens/s"
        rounds = [finish.speculation for finish in self.finishes if finish.speculation]
        num_rounds = sum(each.rounds for each in rounds)
        if num_rounds:
            yield f"tau={(sum(each.accepted for each in rounds) + num_rounds) / num_rounds:.2f}"


def note_of(scope: Scope) -> RequestNote:
    """The note of the request; a dummy outside LogRequests."""
    note: RequestNote | None = scope.get(_NOTE)
    return note or RequestNote("")


class LogRequests:
    """Middleware that counts every answer, gives it an id (the client's, if valid), and logs a line
    when it has ended.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[BaseRoute],
        refusal: Callable[[Scope, Exception], Response],
        count: Callable[[str, int], None],
    ) -> None:
        """`refusal` answers unexpected exceptions, which are re-raised to be logged. `count` is
        called with the route and status of each answer as it begins. `routes` provide the path of
        requests that are refused before they are routed.
        """
        self._app = app
        self._routes = tuple(routes)
        self._refusal = refusal
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note = scope[_NOTE] = RequestNote(_id_of(scope))

        # Not a coroutine function: it is called for each token, and a coroutine would add a frame.
        def send_noted(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                note.status = message["status"]
                self._count(self._route_of(scope), message["status"])
                header = (HEADER.encode(), note.request_id.encode())
                message["headers"] = [*message.get("headers", ()), header]
            return send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception as error:
            if note.status is None:
                await self._refusal(scope, error)(scope, receive, send_noted)
            raise
        finally:
            self._write(scope, note)

    def _write(self, scope: Scope, note: RequestNote) -> None:
        level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
        if logger.isEnabledFor(level):
            words = " ".join(note.words())
            logger.log(level, "%s %s %s", scope["method"], self._route_of(scope), words)

    def _route_of(self, scope: Scope) -> str:
        """The path of the request's route; "unmatched" without one."""
        route = scope.get("route")
        if route is None:
            matching = (each for each in self._routes if each.matches(scope)[0] is not Match.NONE)
            route = next(matching, None)
        return getattr(route, "path", "unmatched")


def _id_of(scope: Scope) -> str:
    sent = Headers(scope=scope).get(HEADER, "")
    return sent if SANE_ID.fullmatch(sent) else f"req-{secrets.token_hex(8)}"
