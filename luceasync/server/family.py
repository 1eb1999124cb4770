"""What an API family says for itself, and what the common part of the server asks of it.

A family parses bodies, makes events, folds them to a plain answer and words its failures. It knows
nothing of sockets, clients that leave, keys or shutdowns.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from starlette.datastructures import Headers
from starlette.routing import Route

from luceasync.request import Engine, Request, Stream
from luceasync.server.failures import Failure
from luceasync.server.http.auth import Caller

Event = TypeVar("Event")


class Call(Protocol[Event]):
    """A checked body: what it asks of the engine, and how that is told. It serves one answer."""

    @property
    def requests(self) -> Sequence[Request]:
        """What the engine is asked; each gets a Stream of its own."""
        ...

    @property
    def stream(self) -> bool:
        """Whether the events are sent as they come, or only what `fold` makes of them."""
        ...

    def events(self, streams: Sequence[Stream]) -> AsyncGenerator[Event, None]:
        """The events of the answer, in order; `streams` are those of `requests`.

        What a stream raises is passed on: a choice that failed is told by the common part.
        """
        ...

    def encode(self, event: Event) -> bytes:
        """`event` as server-sent events, whole ones."""
        ...

    def end(self, failure: Failure | None) -> bytes:
        """What goes out last: after all events or, at a `failure`, in place of the rest."""
        ...

    async def fold(self, events: AsyncIterator[Event]) -> object:
        """The plain answer that says what all `events` say; it is sent as JSON."""
        ...


@dataclass(frozen=True, slots=True)
class Form:
    """The type of a JSON body, for whoever describes the route; `streams`: whether the answer may
    come as events.
    """

    body: type
    streams: bool = False


class Endpoint(Protocol):
    """A route that generates: POST `path`. `form` None: bodies are not JSON."""

    @property
    def path(self) -> str: ...

    @property
    def form(self) -> Form | None: ...

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> Call[Any]:
        """Check a body, sent by `caller`. Raises RequestError, which names the field at fault."""
        ...


class Family(Protocol):
    """The routes of one API, and its words for what goes wrong on them."""

    @property
    def endpoints(self) -> Sequence[Endpoint]: ...

    @property
    def pages(self) -> Sequence[Route]:
        """Its other routes."""
        ...

    def error(self, failure: Failure) -> object:
        """The error object; it is sent as JSON."""
        ...


MakeFamily = Callable[[Engine], Family]


# A call that generates nothing: a body is read, and something is looked up. Owns nothing but
# the form: limits, keys and clients that leave are those of every other call.


class Lookup:
    """See luceasync.server.family.Call. `look` gives the answer, which is sent as JSON."""

    requests: Sequence[Request] = ()
    stream = False

    def __init__(self, look: Callable[[], Awaitable[object]]) -> None:
        self._look = look

    async def events(self, streams: Sequence[Stream]) -> AsyncGenerator[None, None]:
        """None."""
        return
        yield  # it is a generator

    def encode(self, event: None) -> bytes:
        raise AssertionError("there are no events")

    def end(self, failure: Failure | None) -> bytes:
        raise AssertionError("it is never streamed")

    async def fold(self, events: AsyncIterator[None]) -> object:
        return await self._look()
