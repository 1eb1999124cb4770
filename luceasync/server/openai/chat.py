"""POST /v1/chat/completions, as a body and an answer.

Owns which of its parts does what when. Knows nothing of who drives it: see luceasync.server.family.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace

from starlette.datastructures import Headers

from luceasync.request import Engine, Request, Stream
from luceasync.server.failures import Failure
from luceasync.server.family import Form
from luceasync.server.openai.chat_events import AnswerFold, ChatEvents
from luceasync.server.openai.chat_schema import ChatBody, ChatCall, parse_chat
from luceasync.server.openai.chat_shapes import ChatChunk, ChatCompletion
from luceasync.server.openai.errors import error_body
from luceasync.server.sse import encode_event
from luceasync.server.tenant import Caller

DONE = b"data: [DONE]\n\n"


class ChatCompletions:
    """See luceasync.server.family.Endpoint."""

    path = "/v1/chat/completions"
    form = Form(ChatBody, streams=True)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> ChatAnswer:
        card = self._engine.card
        return ChatAnswer(parse_chat(body, card, caller, headers), card.name)


class ChatAnswer:
    """See luceasync.server.family.Call. The plain answer always tells the usage."""

    def __init__(self, call: ChatCall, model: str) -> None:
        self._call = call if call.stream else replace(call, include_usage=True)
        self._model = model

    @property
    def requests(self) -> Sequence[Request]:
        return (self._call.request,)

    @property
    def stream(self) -> bool:
        return self._call.stream

    def events(self, streams: Sequence[Stream]) -> AsyncGenerator[ChatChunk, None]:
        [stream] = streams
        return ChatEvents(self._call, self._model, stream.num_prompt_tokens).chunks(stream)

    def encode(self, event: ChatChunk) -> bytes:
        return encode_event(event)

    def end(self, failure: Failure | None) -> bytes:
        """A stream that broke off has no [DONE]."""
        return DONE if failure is None else encode_event(error_body(failure))

    async def fold(self, events: AsyncIterator[ChatChunk]) -> ChatCompletion:
        fold = AnswerFold()
        async for chunk in events:
            fold.take(chunk)
        return fold.completion()
