"""The chat command: a conversation in a terminal or through a pipe, one line a turn.

Owns the loop of turns. Knows nothing of who answers.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import httpx
import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal
from rich.console import Console

from luceasync.cli.words import one_line
from luceasync.config import Config
from luceasync.errors import ConfigError, GenerationFailed, LuceasyncError, Unavailable
from luceasync.models.files import ModelFiles
from luceasync.request import ChatPrompt, Engine, ReasoningPiece, Request, Sampling, TextPiece

# Two voices that answer a conversation: an engine in this process, and a server by its URL.
# Owns how an answer is asked for. Knows nothing of the terminal.


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
async def open_local(
    config: Config, manner: Manner, model: ModelFiles | None = None
) -> AsyncIterator[Voice]:
    """A voice of an engine that is loaded on entry. Raises ConfigError."""
    from luceasync.cli.serve import loading_bar
    from luceasync.engine.start import build_engine

    with loading_bar(Console(stderr=True)) as bar:
        bar.start()
        engine = build_engine(config, bar.advance, model=model)
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


HELP = "/clear  forget all    /quit  end    /help  this text    Ctrl-C  stop an answer"


def run_chat(opening: AbstractAsyncContextManager[Voice], system: str | None) -> bool:
    """Talk until the input ends or /quit; tell whether every turn was answered.

    The voice lives on an event loop in another thread, so that this one can sit in input() and
    Ctrl-C means what it means at a prompt. Raises ConfigError.
    """
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    all_answered = True
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(opening) as voice,
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # before, it ended the process
        conversation = Conversation(portal, voice, console, system)
        for line in _lines(console):
            if line == "/quit":
                break
            try:
                conversation.take(line)
            except ConfigError:
                raise
            except LuceasyncError as error:
                errors.print(f"error: {one_line(error)}", style="red", markup=False)
                all_answered = False
    return all_answered


class Conversation:
    """The messages so far; a turn that failed leaves no trace in them."""

    def __init__(
        self, portal: BlockingPortal, voice: Voice, console: Console, system: str | None
    ) -> None:
        self._portal = portal
        self._voice = voice
        self._console = console
        self._beginning: Messages = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._beginning)

    def take(self, line: str) -> None:
        """Act on one line: a command, or a turn that is answered. Raises LuceasyncError."""
        if not line:
            return
        if line == "/clear":
            self._messages = list(self._beginning)
            self._console.print("(forgotten)", style="dim")
        elif line == "/help":
            self._console.print(HELP, style="dim", markup=False)
        elif line.startswith("/") and " " not in line:
            self._console.print(f"unknown command {line}; {HELP}", style="dim", markup=False)
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        messages = [*self._messages, {"role": "user", "content": line}]
        answer = {"role": "assistant", "content": ""}
        with _ctrl_c() as pressed:
            speech = self._portal.start_task_soon(self._speak, messages, answer)
            pressed.add_done_callback(lambda _: speech.cancel())
            try:
                speech.result()
            except CancelledError:
                self._console.print(" (stopped)", style="dim", end="")
        self._console.print()
        self._messages = [*messages, answer]

    async def _speak(self, messages: Messages, answer: dict[str, str]) -> None:
        """Reasoning is dim, and shown to people only: a pipe gets the answer."""
        async for piece in self._voice.reply(messages):
            match piece:
                case ReasoningPiece(text):
                    answer["reasoning_content"] = answer.get("reasoning_content", "") + text
                    if self._console.is_terminal:
                        self._console.print(text, style="dim", end="", markup=False)
                case TextPiece(text):
                    if self._console.is_terminal and not answer["content"] and len(answer) > 2:
                        self._console.print("\n")  # between the two
                    answer["content"] += text
                    self._console.file.write(text)
                    self._console.file.flush()


@contextmanager
def _ctrl_c() -> Iterator[Future[None]]:
    """A future that is done once Ctrl-C is pressed. An exception in its stead could arrive before
    there is anything to stop.
    """
    pressed: Future[None] = Future()

    def press(signum: int, frame: FrameType | None) -> None:
        if not pressed.done():
            pressed.set_result(None)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _lines(console: Console) -> Iterator[str]:
    """What is typed, or what comes through a pipe; Ctrl-C at the prompt begins a new line."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.strip()
        return
    import readline  # noqa: F401  (input() edits lines and remembers them once this is imported)

    console.print(HELP, style="dim", markup=False)
    while True:
        try:
            yield input("> ").strip()
        except KeyboardInterrupt:
            console.print()
        except EOFError:
            console.print()
            return
