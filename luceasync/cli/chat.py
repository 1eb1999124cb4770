"""The chat command: a conversation in a terminal, or through a pipe, one line a turn.

Owns the loop of turns. A responder, an engine in this process or a server by URL, answers them.
"""

from __future__ import annotations

import select
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

from luceasync.cli.output import loading_bar, one_line
from luceasync.config import Config
from luceasync.errors import (
    ConfigError,
    GenerationFailed,
    LuceasyncError,
    ModelError,
    Unavailable,
)
from luceasync.models.files import ModelFiles
from luceasync.request import ChatPrompt, Engine, ReasoningPiece, Request, Sampling, TextPiece

CONNECT_TIMEOUT_S = 10.0
# A server under load is silent only between keep-alive comments.
SILENCE_TIMEOUT_S = 120.0
PASTE_GAP_S = 0.05  # between two lines of a paste

Messages = list[dict[str, Any]]
ShownPiece = TextPiece | ReasoningPiece  # no tools are offered


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Sampling options of answers."""

    max_tokens: int | None = None
    temperature: float = 0.6


class Responder(Protocol):
    """Answers a conversation piece by piece."""

    def reply(self, messages: Messages) -> AsyncIterator[ShownPiece]:
        """The next answer as it is generated. Raises LuceasyncError."""
        ...


class LocalResponder:
    """Answers with an engine in this process."""

    def __init__(self, engine: Engine, options: AnswerOptions) -> None:
        self._engine = engine
        self._options = options

    async def reply(self, messages: Messages) -> AsyncIterator[ShownPiece]:
        sampling = Sampling(temperature=self._options.temperature)
        prompt = ChatPrompt(list(messages))
        request = Request(prompt, sampling=sampling, max_tokens=self._options.max_tokens)
        stream = await self._engine.open(request)
        try:
            async for delta in stream:
                for piece in delta.pieces:
                    if isinstance(piece, ShownPiece):
                        yield piece
                if delta.finish is not None and delta.finish.error is not None:
                    raise GenerationFailed(delta.finish.error)
        finally:
            await stream.aclose()


class RemoteResponder:
    """Answers with a server's `/v1/chat/completions`."""

    def __init__(self, client: httpx.AsyncClient, options: AnswerOptions) -> None:
        self._client = client
        self._options = options

    async def reply(self, messages: Messages) -> AsyncIterator[ShownPiece]:
        body = {"messages": messages, "stream": True, "temperature": self._options.temperature}
        if self._options.max_tokens is not None:
            body["max_tokens"] = self._options.max_tokens
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
    config: Config, options: AnswerOptions, model: ModelFiles | None = None
) -> AsyncIterator[Responder]:
    """A responder whose engine is loaded on entry. Raises ConfigError, also for a model without a
    chat template.
    """
    from luceasync.engine.start import build_engine
    from luceasync.text.template import NO_TEMPLATE, TemplateSource

    model = model or ModelFiles(config.model.model_dir)
    if TemplateSource.find(model.path, model.gguf) is None:
        raise ModelError(f"{model.path}: {NO_TEMPLATE}")

    with loading_bar(Console(stderr=True)) as bar:
        bar.start()
        engine = build_engine(config, bar.advance, model=model)
        async with engine:
            await engine.load()
            bar.stop()
            yield LocalResponder(engine, options)


@asynccontextmanager
async def open_remote(
    url: str, api_key: str | None, options: AnswerOptions
) -> AsyncIterator[Responder]:
    """A responder for the server at `url`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    base_url = url.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=timeout) as client:
        yield RemoteResponder(client, options)


def _pieces_of(line: str) -> Iterator[ShownPiece]:
    """The pieces in one line of an event stream. Raises LuceasyncError for an error event."""
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
        return LuceasyncError(f"the server returned status {status}")


HELP = "/clear  start over    /quit  end    /help  this text    Ctrl-C  stop an answer"


def run_chat(opening: AbstractAsyncContextManager[Responder], system: str | None) -> bool:
    """Chat until the input ends or /quit; returns whether every turn was answered.

    The responder lives on an event loop in another thread, so that this one can block in input()
    and Ctrl-C acts as usual at a prompt. Raises ConfigError.
    """
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    all_answered = True
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(opening) as responder,
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # until now it ended the process
        conversation = Conversation(portal, responder, console, system)
        for line in _turns(console):
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
    """The messages so far, without turns that failed."""

    def __init__(
        self, portal: BlockingPortal, responder: Responder, console: Console, system: str | None
    ) -> None:
        self._portal = portal
        self._responder = responder
        self._console = console
        self._beginning: Messages = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._beginning)

    def take(self, line: str) -> None:
        """Run what was typed: a command, or a turn to answer. Raises LuceasyncError."""
        if not line:
            return
        if line == "/clear":
            self._messages = list(self._beginning)
            self._console.print("(cleared)", style="dim")
        elif line == "/help":
            self._console.print(HELP, style="dim", markup=False)
        elif line.startswith("/") and len(line.split()) == 1:
            self._console.print(f"unknown command {line}; {HELP}", style="dim", markup=False)
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        messages = [*self._messages, {"role": "user", "content": line}]
        answer = {"role": "assistant", "content": ""}
        with _ctrl_c() as pressed:
            printing = self._portal.start_task_soon(self._print_answer, messages, answer)
            pressed.add_done_callback(lambda _: printing.cancel())
            try:
                printing.result()
            except CancelledError:
                self._console.print(" (stopped)", style="dim", end="")
        self._console.print()
        self._messages = [*messages, answer]

    async def _print_answer(self, messages: Messages, answer: dict[str, str]) -> None:
        """Print the answer; reasoning dim, and only on a terminal: a pipe gets the text alone."""
        async for piece in self._responder.reply(messages):
            match piece:
                case ReasoningPiece(text):
                    answer["reasoning_content"] = answer.get("reasoning_content", "") + text
                    if self._console.is_terminal:
                        self._console.print(text, style="dim", end="", markup=False)
                case TextPiece(text):
                    if self._console.is_terminal and not answer["content"] and len(answer) > 2:
                        self._console.print("\n")  # between reasoning and text
                    answer["content"] += text
                    self._console.file.write(text)
                    self._console.file.flush()


@contextmanager
def _ctrl_c() -> Iterator[Future[None]]:
    """A future that is done once Ctrl-C is pressed. An exception instead could arrive before there
    is anything to stop.
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


def _turns(console: Console) -> Iterator[str]:
    """What is typed or pasted, a paste of several lines in one piece, or the lines of a pipe.
    Ctrl-C at the prompt starts anew.
    """
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.strip()
        return
    import readline  # gives input() line editing and history

    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    console.print(HELP, style="dim", markup=False)
    while True:
        try:
            yield _typed().strip()
        except KeyboardInterrupt:
            console.print()
        except EOFError:
            console.print()
            return


def _typed() -> str:
    """A line, and what has arrived with it: not every terminal marks where a paste ends."""
    text = input("> ")
    while select.select([sys.stdin], [], [], PASTE_GAP_S)[0]:
        text += "\n" + input()
    return text
