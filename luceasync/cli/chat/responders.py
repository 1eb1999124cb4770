"""The source of a chat's answers: an engine in this process, or a server at a URL, with the same
fields.

Owns the request for a turn and the parsing of its answer. Independent of commands and terminals.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import msgspec
from rich.console import Console

from luceasync.cli.ahead import begun_ahead, hash_triton, without_compiler
from luceasync.cli.output import loading_bar
from luceasync.config import Config
from luceasync.errors import GenerationFailed, LuceasyncError, ModelError, Unavailable
from luceasync.models.files import ModelFiles
from luceasync.process_memory import frozen_imports
from luceasync.request import Engine, Finish, ReasoningPiece, TextPiece

CONNECT_TIMEOUT_S = 10.0
# Even a server under load sends keep-alive comments more often than this.
SILENCE_TIMEOUT_S = 120.0
ABOUT_TIMEOUT_S = 10.0

Messages = list[dict[str, Any]]
ShownPiece = TextPiece | ReasoningPiece  # no tools are offered

EFFORTS = ("low", "medium", "high")
THINKING: dict[str, dict[str, Any]] = {  # fields of a chat request, by choice
    "off": {"enable_thinking": False},
    "on": {"enable_thinking": True},
    **{effort: {"reasoning_effort": effort} for effort in EFFORTS},
}


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How answers are sampled. `thinking` is one of THINKING; None: the model's default."""

    max_tokens: int | None = None
    temperature: float = 0.6
    thinking: str | None = None

    def body(self, messages: Messages) -> dict[str, Any]:
        """The fields of `/v1/chat/completions` that request the next answer."""
        body: dict[str, Any] = {"messages": messages, "stream": True}
        body |= {"temperature": self.temperature, "stream_options": {"include_usage": True}}
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        return body | THINKING.get(self.thinking or "", {})


@dataclass(frozen=True, slots=True)
class About:
    """The model that answers. `devices` empty, numbers 0: another server, which does not report
    them.
    """

    model: str
    max_ctx_tokens: int = 0
    num_parameters: int = 0
    devices: tuple[str, ...] = ()
    thinks: bool = True


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of an answer: tokens, and seconds until the first token and after it. `tier` is
    where the cached tokens were; `tau` is the number of tokens per pass with a drafter, 0 without
    one.
    """

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    first_token_s: float = 0.0
    decode_s: float = 0.0
    num_decoded: int = 0
    tier: str | None = None
    tau: float = 0.0


Heard = ShownPiece | Figures


class Responder(Protocol):
    """Answers a conversation piece by piece."""

    async def about(self) -> About:
        """The model that answers. Raises LuceasyncError."""
        ...

    def reply(self, messages: Messages, options: AnswerOptions) -> AsyncIterator[Heard]:
        """The next answer as it is generated, followed by its figures. Raises LuceasyncError."""
        ...


class LocalResponder:
    """Answers with an engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def about(self) -> About:
        card = self._engine.card
        devices = (await self._engine.details()).device_bytes or {}
        return About(
            card.name, card.max_ctx_tokens, card.num_parameters, tuple(devices), card.thinks
        )

    async def reply(self, messages: Messages, options: AnswerOptions) -> AsyncIterator[Heard]:
        from luceasync.server.http.auth import Caller
        from luceasync.server.openai.chat_body import parse_chat

        body = msgspec.json.encode(options.body(messages))
        request = parse_chat(body, self._engine.card, Caller()).request
        stream = await self._engine.open(request)
        try:
            async for delta in stream:
                for piece in delta.pieces:
                    if isinstance(piece, ShownPiece):
                        yield piece
                if delta.finish is not None:
                    yield _figures_of(delta.finish)
        finally:
            await stream.aclose()


class RemoteResponder:
    """Answers with a server's `/v1/chat/completions`. Other servers report less: `model` is the
    first of their list.
    """

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._model: str | None = None

    async def about(self) -> About:
        try:
            models = await self._client.get("/v1/models", timeout=ABOUT_TIMEOUT_S)
            if models.status_code != 200:
                raise _refusal(models.status_code, models.content)
            first = models.json()["data"][0]
            self._model = str(first["id"])
            meta = first.get("meta") or {}
            return About(
                self._model,
                int(first.get("max_model_len") or 0),
                int(meta.get("num_parameters") or 0),
                await self._devices(),
                bool(meta.get("thinks", True)),
            )
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            where = f"{self._client.base_url}/v1/models"
            raise LuceasyncError(f"{where}: expected a list of models") from error

    async def reply(self, messages: Messages, options: AnswerOptions) -> AsyncIterator[Heard]:
        body = options.body(messages)
        if self._model is not None:
            body["model"] = self._model
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    for heard in _parsed_line(line):
                        yield heard
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    async def _devices(self) -> tuple[str, ...]:
        """The devices of a luceasync server, from its first status event."""
        timeout = httpx.Timeout(ABOUT_TIMEOUT_S)
        async with self._client.stream("GET", "/status/events", timeout=timeout) as response:
            async for line in response.aiter_lines():
                if response.status_code != 200:
                    break
                if line.startswith("data: "):
                    live = msgspec.json.decode(line.removeprefix("data: "))["live"] or {}
                    return tuple(live.get("device_bytes") or ())
        return ()

    def _unreachable(self, error: httpx.HTTPError) -> Unavailable:
        return Unavailable(f"{self._client.base_url}: {error or type(error).__name__}")


@asynccontextmanager
async def open_local(config: Config, model: ModelFiles | None = None) -> AsyncIterator[Responder]:
    """A responder whose engine is loaded on entry. Raises ConfigError, also for a model without a
    chat template.
    """
    from luceasync.text.template import NO_TEMPLATE, TemplateSource

    model = model or ModelFiles(config.model.model_dir)
    if TemplateSource.find(model.path, model.gguf) is None:
        raise ModelError(f"{model.path}: {NO_TEMPLATE}")

    with loading_bar(Console(stderr=True)) as bar, begun_ahead(config, model):
        with frozen_imports(), without_compiler():
            hash_triton(config.placement)
            from luceasync.engine.start import build_engine

        bar.start()
        engine = build_engine(config, bar.advance, model=model)
        async with engine:
            await engine.load()
            bar.stop()
            yield LocalResponder(engine)


@asynccontextmanager
async def open_remote(url: str, api_key: str | None) -> AsyncIterator[Responder]:
    """A responder for the server at `url`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    base_url = url.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=timeout) as client:
        yield RemoteResponder(client)


def _figures_of(finish: Finish) -> Figures:
    """The figures of a finished answer. Raises GenerationFailed if it failed."""
    if finish.error is not None:
        raise GenerationFailed(finish.error)
    usage, timings, speculation = finish.usage, finish.timings, finish.speculation
    return Figures(
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        timings.queued_s + timings.prefill_s,
        timings.decode_s,
        timings.num_decoded,
        finish.restore.tier,
        speculation.tau if speculation is not None and speculation.rounds else 0.0,
    )


class _Statistics(msgspec.Struct):
    """The statistics in a server's last chunk; fields that other servers leave out are 0."""

    class Usage(msgspec.Struct):
        class Details(msgspec.Struct):
            cached_tokens: int = 0

        prompt_tokens: int = 0
        completion_tokens: int = 0
        prompt_tokens_details: Details | None = None

    class Timings(msgspec.Struct):
        queued_ms: float = 0.0
        prompt_ms: float = 0.0
        predicted_n: int = 0
        predicted_ms: float = 0.0

    class Ours(msgspec.Struct):
        class Speculation(msgspec.Struct):
            tau: float = 0.0
            rounds: int = 0

        tier: str | None = None
        speculation: Speculation | None = None

    usage: Usage
    timings: Timings | None = None
    luceasync: Ours | None = None

    def figures(self) -> Figures:
        usage, details = self.usage, self.usage.prompt_tokens_details or self.Usage.Details()
        timings, ours = self.timings or self.Timings(), self.luceasync or self.Ours()
        drafted = ours.speculation or self.Ours.Speculation()
        return Figures(
            usage.prompt_tokens,
            details.cached_tokens,
            usage.completion_tokens,
            (timings.queued_ms + timings.prompt_ms) / 1000,
            timings.predicted_ms / 1000,
            timings.predicted_n,
            ours.tier,
            drafted.tau if drafted.rounds else 0.0,
        )


def _parsed_line(line: str) -> Iterator[Heard]:
    """The content of one line of an event stream. Raises LuceasyncError for an error event."""
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
    if event.get("usage"):
        yield msgspec.convert(event, _Statistics).figures()


def _refusal(status: int, body: bytes) -> LuceasyncError:
    try:
        return LuceasyncError(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return LuceasyncError(f"the server returned status {status}")
