"""Two voices that answer a conversation: an engine in this process, and a server by its URL.

Owns how an answer is asked for. Knows nothing of the terminal.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import msgspec
from rich.console import Console

from luceasync.config import Config
from luceasync.errors import GenerationFailed, LuceasyncError, Unavailable
from luceasync.pieces import ReasoningPiece, TextPiece
from luceasync.request import ChatPrompt, Engine, Request, Sampling

CONNECT_TIMEOUT_S = 10.0
# A server under load is silent only between keep-alive comments.
SILENCE_TIMEOUT_S = 120.0

Messages = list[dict[str, Any]]
Spoken = TextPiece | ReasoningPiece  # it is given no tools


@dataclass(frozen=True, slots=True)
class Manner:
    """How long and how varied answers may be."""

    max_tokens: int | None = None
    temperature: float = 0.6


class Voice(Protocol):
    """Answers a conversation piece by piece."""

    def reply(self, messages: Messages) -> AsyncIterator[Spoken]:
        """The next answer as it comes. Raises LuceasyncError."""
        ...


class LocalVoice:
    """Asks an engine in this process."""

    def __init__(self, engine: Engine, manner: Manner) -> None:
        self._engine = engine
        self._manner = manner

    async def reply(self, messages: Messages) -> AsyncIterator[Spoken]:
        sampling = Sampling(temperature=self._manner.temperature)
        prompt = ChatPrompt(list(messages))
        request = Request(prompt, sampling=sampling, max_tokens=self._manner.max_tokens)
        stream = await self._engine.open(request)
        try:
            async for delta in stream:
                for piece in delta.pieces:
                    if isinstance(piece, Spoken):
                        yield piece
                if delta.finish is not None and delta.finish.error is not None:
                    raise GenerationFailed(delta.finish.error)
        finally:
            await stream.aclose()


class RemoteVoice:
    """Asks a server's `/v1/chat/completions`."""

    def __init__(self, client: httpx.AsyncClient, manner: Manner) -> None:
        self._client = client
        self._manner = manner

    async def reply(self, messages: Messages) -> AsyncIterator[Spoken]:
        body = {"messages": messages, "stream": True, "temperature": self._manner.temperature}
        if self._manner.max_tokens is not None:
            body["max_tokens"] = self._manner.max_tokens
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    for piece in _pieces_of(line):
                        yield piece
        except httpx.HTTPError as error:
            where = self._client.base_url
            raise Unavailable(f"{where}: {error or type(error).__name__}") from error


@asynccontextmanager
async def open_local(config: Config, manner: Manner) -> AsyncIterator[Voice]:
    """A voice of an engine that is loaded on entry. Raises ConfigError."""
    from luceasync.cli.serve import loading_bar
    from luceasync.engine.start import build_engine

    with loading_bar(Console(stderr=True)) as bar:
        bar.start()
        engine = build_engine(config, bar.advance)
        async with engine:
            await engine.load()
            bar.stop()
            yield LocalVoice(engine, manner)


@asynccontextmanager
async def open_remote(url: str, api_key: str | None, manner: Manner) -> AsyncIterator[Voice]:
    """A voice of the server at `url`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    base_url = url.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=timeout) as client:
        yield RemoteVoice(client, manner)


def _pieces_of(line: str) -> Iterator[Spoken]:
    """What one line of an event stream adds. Raises LuceasyncError for an error event."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = msgspec.json.decode(line.removeprefix("data: "))
    if "error" in event:
        raise LuceasyncError(event["error"]["message"])
    for choice in event["choices"]:
        if reasoning := choice["delta"].get("reasoning_content"):
            yield ReasoningPiece(reasoning)
        if text := choice["delta"].get("content"):
            yield TextPiece(text)


def _refusal(status: int, body: bytes) -> LuceasyncError:
    try:
        return LuceasyncError(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return LuceasyncError(f"the server answered with status {status}")
