"""What an API family implements, and what the rest of the server asks of it.

A family parses bodies, makes events, folds them into a plain answer and words its errors. It knows
nothing of sockets, disconnects, keys or shutdowns.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.routing import Route

from luceasync.request import Engine, Request, Stream
from luceasync.server.failures import Failure
from luceasync.server.http.auth import Caller
from luceasync.server.http.responses import Framing

EventT = TypeVar("EventT")
SOME_MODEL = "MODEL"  # in examples, where the page puts the name of the served one


class Call(Protocol[EventT]):
    """A parsed body: what it asks of the engine, and how that is answered. Used once."""

    @property
    def requests(self) -> Sequence[Request]:
        """The engine's requests; each gets a Stream of its own."""
        ...

    @property
    def stream(self) -> bool:
        """Whether to send the events as they come, or only what `fold` makes of them."""
        ...

    def events(self, streams: Sequence[Stream]) -> AsyncGenerator[EventT, None]:
        """The events of the answer, in order; `streams` belong to `requests`.

        Exceptions of a stream pass through: the server reports failures.
        """
        ...

    def encode(self, event: EventT) -> bytes:
        """`event` as one or more complete events, in the family's framing."""
        ...

    def end(self, failure: Failure | None) -> bytes:
        """The last bytes: after all events or, on `failure`, in place of the rest."""
        ...

    async def fold(self, events: AsyncIterator[EventT]) -> object:
        """The plain answer with the content of all `events`; sent as JSON."""
        ...


@dataclass(frozen=True, slots=True)
class BodySpec:
    """The types of a JSON body, its answer and an error, for the API's description; `event`: that
    of an event, if the answer may be streamed. `example`: a body to begin with. `last`: the data of
    the last event, if it is no JSON. `is_selected`: requests may ask for some of the answer's
    fields, and for several answers.
    """

    struct: type[msgspec.Struct]
    answer: type[msgspec.Struct]
    error: type[msgspec.Struct]
    event: Any = None
    example: Mapping[str, Any] = field(default_factory=dict)
    last: str = ""
    is_selected: bool = False


class Endpoint(Protocol):
    """A route that takes POST requests. `body` None: bodies are not JSON."""

    @property
    def path(self) -> str: ...

    @property
    def body(self) -> BodySpec | None: ...

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> Call[Any]:
        """Check a body. Raises RequestError, which names the field at fault."""
        ...


class ApiFamily(Protocol):
    """The routes of one API, how its events are sent, and the form of its errors."""

    @property
    def framing(self) -> Framing: ...

    @property
    def endpoints(self) -> Sequence[Endpoint]: ...

    @property
    def pages(self) -> Sequence[Route]:
        """All other routes."""
        ...

    def error(self, failure: Failure) -> object:
        """The error object; sent as JSON."""
        ...


MakeFamily = Callable[[Engine], ApiFamily]


class LookupCall:
    """A Call that generates nothing: `look_up` returns the answer, which is sent as JSON."""

    requests: Sequence[Request] = ()
    stream = False

    def __init__(self, look_up: Callable[[], Awaitable[object]]) -> None:
        self._look_up = look_up

    async def events(self, streams: Sequence[Stream]) -> AsyncGenerator[None, None]:
        return
        yield  # makes it a generator

    def encode(self, event: None) -> bytes:
        raise AssertionError("there are no events")

    def end(self, failure: Failure | None) -> bytes:
        raise AssertionError("it is never streamed")

    async def fold(self, events: AsyncIterator[None]) -> object:
        return await self._look_up()


Handler = TypeVar("Handler", bound=Callable[..., Any])
PAGE_SPEC = "luceasync_page_spec"  # an attribute of handlers


@dataclass(frozen=True, slots=True)
class PageSpec:
    """The types of a page's answers by method, "" for all others, for the API's description."""

    answers: Mapping[str, Any]
    media_type: str

    def answer(self, method: str) -> Any:
        """What it answers to `method`."""
        return self.answers.get(method, self.answers[""])


def typed_answer(
    answer: Any, media_type: str = "application/json", **by_method: Any
) -> Callable[[Handler], Handler]:
    """Mark the handler of a page with the type of its answer; `by_method`: those of methods."""

    def mark(handler: Handler) -> Handler:
        setattr(handler, PAGE_SPEC, PageSpec({"": answer, **by_method}, media_type))
        return handler

    return mark


def page_spec(handler: object) -> PageSpec:
    """What `typed_answer` has said of a handler; anything, if it is not marked."""
    spec: PageSpec = getattr(handler, PAGE_SPEC, PageSpec({"": Any}, "*/*"))
    return spec
