"""The chat command: a conversation in a terminal or through a pipe, one line a turn.

Owns the loop of turns. Knows nothing of who answers.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, contextmanager
from types import FrameType

from anyio.from_thread import BlockingPortal, start_blocking_portal
from rich.console import Console

from luceasync.cli.talk import Messages, Voice
from luceasync.cli.words import one_line
from luceasync.errors import ConfigError, LuceasyncError
from luceasync.pieces import ReasoningPiece, TextPiece

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
