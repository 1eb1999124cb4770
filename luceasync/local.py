"""A model in this process, for programs that need no server: chats, texts, streams, token counts.

Requests are parsed, prepared and answered as in the server, with the same names and errors.
Independent of HTTP and tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self, cast

import msgspec
from starlette.datastructures import Headers

from luceasync.config import Config
from luceasync.disk_cache.directory import make_usable
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.errors import RequestError
from luceasync.models.files import ModelFiles
from luceasync.options import config_of
from luceasync.request import Engine, ModelCard
from luceasync.server.answers import CallAnswers
from luceasync.server.family import Call, Endpoint
from luceasync.server.http.auth import Caller
from luceasync.server.http.body import SMALL_BYTES
from luceasync.server.openai.chat_answer import ChatChunk, ChatCompletion, ChatCompletions
from luceasync.server.openai.completions import Completion, Completions
from luceasync.server.openai.routes import Tokenize, TokenizedPrompt
from luceasync.status import EngineStatus

Messages = str | Sequence[Mapping[str, Any] | msgspec.Struct]

_no_headers = Headers()


class LocalModel:
    """A loaded model. Created by `open`; used on the event loop only.

    Fields of requests have the names and ranges of the API (docs/api.md), answers are its structs.
    All methods raise RequestError for an invalid request, QueueFull, Unavailable, and
    GenerationFailed. If a task that waits for an answer is cancelled, its lane is freed at the
    engine's next step.
    """

    def __init__(self, engine: Engine, *, trust_cache_salt: bool = False) -> None:
        """`engine` is loaded, and outlives this object."""
        self._engine = engine
        self._answers = CallAnswers(engine, closed=engine.sent)
        self._caller = Caller(may_salt=trust_cache_salt)
        self._chats = ChatCompletions(engine)
        self._texts = Completions(engine)
        self._tokens = Tokenize(engine)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, model: str | Path | None = None, *, config_file: Path | None = None, **settings: object
    ) -> AsyncIterator[Self]:
        """Load a model for the duration of an `async with`; leaving it ends running requests.

        `model` is a Hugging Face directory or a GGUF file; by default that of `config_file`, or
        else the bundled one. `settings` are those of `luceasync serve` (docs/settings.md) except
        the HTTP settings: `max_ctx="32K"`, `parallel=2`. They override a TOML file. Environment
        variables are not read. Raises ConfigError.
        """
        config = config_of({"model_dir": model, **settings}, config_file)
        async with await _build(config) as engine:
            await engine.load()
            yield cls(engine, trust_cache_salt=config.cache.trust_cache_salt)

    @property
    def card(self) -> ModelCard:
        """What is served: name, context, whether the model thinks, its format of tool calls."""
        return self._engine.card

    def status(self) -> EngineStatus:
        """Lanes, queue, cache and speculation."""
        return self._engine.status()

    async def chat(self, messages: Messages, **fields: object) -> ChatCompletion:
        """Answer a conversation; a string is a single user message."""
        call = await self._chat_call(messages, fields, stream=False)
        return cast(ChatCompletion, await self._answers.plain(call))

    @asynccontextmanager
    async def stream_chat(
        self, messages: Messages, **fields: object
    ) -> AsyncIterator[AsyncIterator[ChatChunk]]:
        """The parts of the answer, within an `async with`; leaving it frees the lane."""
        call = await self._chat_call(messages, fields, stream=True)
        async with self._answers.events(call) as chunks:
            yield chunks

    async def complete(self, prompt: str | Sequence[int], **fields: object) -> Completion:
        """Continue a text, or token ids, without the chat template."""
        call = await self._call(self._texts, {"prompt": prompt}, fields, stream=False)
        return cast(Completion, await self._answers.plain(call))

    @asynccontextmanager
    async def stream_complete(
        self, prompt: str | Sequence[int], **fields: object
    ) -> AsyncIterator[AsyncIterator[Completion]]:
        """The parts of the text, within an `async with`; leaving it frees the lane."""
        call = await self._call(self._texts, {"prompt": prompt}, fields, stream=True)
        async with self._answers.events(call) as events:
            yield events

    async def tokenize(
        self, prompt: Messages, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> TokenizedPrompt:
        """The tokens of a text, or of messages (and tools) as the chat template renders them."""
        named = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        body = msgspec.json.encode({**named, "tools": tools})
        call = await _parsed(self._tokens, body, self._caller)
        return cast(TokenizedPrompt, await self._answers.plain(call))

    async def count_tokens(
        self, prompt: Messages, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> int:
        """The number of tokens of a text, or of messages and tools."""
        return (await self.tokenize(prompt, tools)).count

    async def _chat_call(
        self, messages: Messages, fields: Mapping[str, object], *, stream: bool
    ) -> Call[Any]:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return await self._call(self._chats, {"messages": messages}, fields, stream=stream)

    async def _call(
        self,
        endpoint: Endpoint,
        prompt: Mapping[str, object],
        fields: Mapping[str, object],
        *,
        stream: bool,
    ) -> Call[Any]:
        """The parsed request. A server ignores unknown fields, which clients of other servers send;
        here an unknown name is an error.
        """
        assert endpoint.body is not None
        known = endpoint.body.struct.__struct_fields__
        for name in fields:
            if name == "stream":
                raise RequestError("'stream' is not a field here: stream_chat streams.", param=name)
            if name not in known:
                message = f"'{name}' is no field of this request; docs/api.md lists them."
                raise RequestError(message, param=name)
        body = msgspec.json.encode({**prompt, **fields, "stream": stream})
        return await _parsed(endpoint, body, self._caller)


async def _parsed(endpoint: Endpoint, body: bytes, caller: Caller) -> Call[Any]:
    if len(body) <= SMALL_BYTES:
        return endpoint.parse(body, _no_headers, caller)
    return await asyncio.to_thread(endpoint.parse, body, _no_headers, caller)


async def _build(config: Config) -> LocalEngine:
    """An engine that is not running yet. A thread reads headers and tries the chat template, which
    takes a while; if the caller is cancelled, the engine is closed once it is built.
    """
    building = asyncio.create_task(asyncio.to_thread(_engine_of, config))
    try:
        return await asyncio.shield(building)
    except asyncio.CancelledError:
        await asyncio.wait([building])
        if building.exception() is None:
            async with building.result():
                pass
        raise


def _engine_of(config: Config) -> LocalEngine:
    if config.cache.cache_dir is not None:
        make_usable(config.cache.cache_dir)
    return build_engine(config, model=ModelFiles(config.model.model_dir))
