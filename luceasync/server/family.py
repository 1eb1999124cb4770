"""The interface that an API family implements for the rest of the server.

A family parses bodies, makes events, folds them into a plain answer and words its errors. It is
independent of sockets, disconnects, keys and shutdowns.
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
SOME_MODEL = "MODEL"  # in examples; the page replaces it with the name of the served model


class Call(Protocol[EventT]):
    """A parsed body: its requests to the engine, and how their streams are answered. Used once."""

    @property
    def requests(self) -> Sequence[Request]:
        """The engine's requests; each gets its own Stream."""
        ...

    @property
    def stream(self) -> bool:
        """Whether to send the events as they arrive, rather than only the result of `fold`."""
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
        """The last bytes: after all events or, on `failure`, in place of the remaining ones."""
        ...

    async def fold(self, events: AsyncIterator[EventT]) -> object:
        """The plain answer with the content of all `events`, to be sent as JSON."""
        ...


@dataclass(frozen=True, slots=True)
class BodySpec:
    """The types of a JSON body, its answer and its error, for the OpenAPI document. `event` is the
    type of an event, if the answer may be streamed; `example` a body to start from; `last` the data
    of the last event, if it is not JSON. `is_selected`: requests may select fields of the answer,
    and may ask for several answers.
    """

    struct: type[msgspec.Struct]
    answer: type[msgspec.Struct]
    error: type[msgspec.Struct]
    event: Any = None
    example: Mapping[str, Any] = field(default_factory=dict)
    last: str = ""
    is_selected: bool = False


class Endpoint(Protocol):
    """A route that takes POST requests. `body` is None if bodies are not JSON."""

    @property
    def path(self) -> str: ...

    @property
    def body(self) -> BodySpec | None: ...

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> Call[Any]:
        """Parse and check a body. Raises RequestError, which names the invalid field."""
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
        """The error object, to be sent as JSON."""
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
        yield  # makes this an async generator

    def encode(self, event: None) -> bytes:
        raise AssertionError("there are no events")

    def end(self, failure: Failure | None) -> bytes:
        raise AssertionError("it is never streamed")

    async def fold(self, events: AsyncIterator[None]) -> object:
        return await self._look_up()


Handler = TypeVar("Handler", bound=Callable[..., Any])
PAGE_SPEC = "luceasync_page_spec"  # the attribute of handlers that holds their PageSpec


@dataclass(frozen=True, slots=True)
class PageSpec:
    """The types of a page's answers by HTTP method, "" for all other methods, for the OpenAPI
    document.
    """

    answers: Mapping[str, Any]
    media_type: str

    def answer(self, method: str) -> Any:
        """The type of the answer to `method`."""
        return self.answers.get(method, self.answers[""])


def typed_answer(
    answer: Any, media_type: str = "application/json", **by_method: Any
) -> Callable[[Handler], Handler]:
    """Mark the handler of a page with the type of its answer, or with types `by_method`."""

    def mark(handler: Handler) -> Handler:
        setattr(handler, PAGE_SPEC, PageSpec({"": answer, **by_method}, media_type))
        return handler

    return mark


def page_spec(handler: object) -> PageSpec:
    """The PageSpec that `typed_answer` attached to a handler; of type Any if there is none."""
    spec: PageSpec = getattr(handler, PAGE_SPEC, PageSpec({"": Any}, "*/*"))
    return spec
