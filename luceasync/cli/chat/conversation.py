"""A conversation: its messages, the commands that change them, and the loop of turns.

Owns the meaning of the commands. The responder and the screen are passed in.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import msgspec
from anyio import CancelScope
from anyio.from_thread import BlockingPortal, start_blocking_portal

from luceasync import __version__
from luceasync.cli.chat.responders import (
    THINKING,
    About,
    AnswerOptions,
    Figures,
    Messages,
    Responder,
)
from luceasync.cli.chat.screen import PRIVATE_FILE, PipeScreen, Screen, TerminalScreen
from luceasync.cli.output import count_text
from luceasync.errors import ConfigError, LuceasyncError
from luceasync.request import ReasoningPiece, TextPiece

STATE_FOLDER = "luceasync"
HISTORY_FILE = "chat_history"

COMMANDS = {
    "/help": "this text",
    "/system": "[TEXT]  show or set the system message; - removes it",
    "/think": f"[{'|'.join(THINKING)}]  how much the model thinks; default: as it usually does",
    "/retry": "answer the last message again",
    "/stats": "tokens and speeds so far",
    "/save": "FILE  write the conversation: .md as text, else JSON for /load",
    "/load": "FILE  go on with a saved conversation",
    "/clear": "start over",
    "/quit": "end; so does Ctrl-D",
}
KEYS = "Alt-Enter or \\ Enter: another line    Ctrl-C: stop an answer"
HELP = "\n".join([*(f"{name:8} {what}" for name, what in COMMANDS.items()), KEYS])


def run_chat(
    opening: AbstractAsyncContextManager[Responder], system: str | None, options: AnswerOptions
) -> bool:
    """Chat until the input ends or /quit. Returns whether every turn was answered.

    The responder lives on an event loop in another thread, so that this thread can wait for input,
    and Ctrl-C works as usual at a prompt. Raises LuceasyncError.
    """
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    screen: Screen = TerminalScreen([*COMMANDS], history_path()) if on_terminal else PipeScreen()
    all_answered = True
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(opening) as responder,
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # until now it ended the process
        conversation = Conversation(portal, responder, screen, system, options)
        if on_terminal:
            conversation.introduce()
        with closing(screen.turns()) as turns:
            for line in turns:
                if line == "/quit":
                    break
                try:
                    conversation.take(line)
                except ConfigError:
                    raise
                except LuceasyncError as error:
                    screen.error(str(error))
                    all_answered = False
    return all_answered


def history_path() -> Path:
    """The file of the input history, according to the XDG base directory specification."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state) / STATE_FOLDER / HISTORY_FILE


class SavedMessage(msgspec.Struct):
    """A message of a saved conversation."""

    role: Literal["system", "user", "assistant"]
    content: str
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class SavedConversation(msgspec.Struct):
    """The file of /save and /load."""

    messages: list[SavedMessage]


@dataclass(frozen=True, slots=True)
class ChatTotals:
    """The figures of all answers so far, and those of the last one."""

    num_answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    num_decoded: int = 0
    decode_s: float = 0.0
    last: Figures | None = None

    def plus(self, figures: Figures) -> ChatTotals:
        """The totals with one more answer."""
        return ChatTotals(
            self.num_answers + 1,
            self.prompt_tokens + figures.prompt_tokens,
            self.cached_tokens + figures.cached_tokens,
            self.new_tokens + figures.new_tokens,
            self.num_decoded + figures.num_decoded,
            self.decode_s + figures.decode_s,
            figures,
        )


class Conversation:
    """The messages so far, without turns that failed."""

    def __init__(
        self,
        portal: BlockingPortal,
        responder: Responder,
        screen: Screen,
        system: str | None,
        options: AnswerOptions,
    ) -> None:
        self._portal = portal
        self._responder = responder
        self._screen = screen
        self._system = system or ""
        self._options = options
        self._messages: Messages = []  # without the system message
        self._totals = ChatTotals()
        self._about: About | None = None
        self._file: Path | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._screen.note(HELP),
            "/system": self._set_system,
            "/think": self._set_thinking,
            "/retry": self._retry,
            "/stats": lambda _: self._screen.note(self._stats()),
            "/save": self._save,
            "/load": self._load,
            "/clear": self._clear,
        }

    def introduce(self) -> None:
        """Show what the responder serves. Raises LuceasyncError if it is not available."""
        self._screen.note(f"{banner(self._known())}\n/help: commands    {KEYS}")

    def take(self, line: str) -> None:
        """Process a line of input: a command, or a turn to answer. Raises LuceasyncError."""
        name, _, argument = line.partition(" ")
        if not line:
            return
        if "\n" not in line and name in self._commands:
            self._commands[name](argument.strip())
        elif line.startswith("/") and len(line.split()) == 1:
            self._screen.note(f"unknown command {line}; /help lists all")
        else:
            self._answer([*self._messages, {"role": "user", "content": line}])

    # Commands

    def _set_system(self, text: str) -> None:
        if text:
            self._system = "" if text == "-" else text
        self._screen.note(f"system message: {self._system or '(none)'}")

    def _set_thinking(self, how: str) -> None:
        if not self._known().thinks:
            self._screen.note("this model does not think before it answers")
        elif how and how not in THINKING:
            raise LuceasyncError(f"/think {how}: expected {', '.join(THINKING)}")
        else:
            if how:
                self._options = replace(self._options, thinking=how)
            self._screen.note(f"thinking: {self._options.thinking or 'as the model usually does'}")

    def _retry(self, _: str) -> None:
        asked = max(
            (i for i, each in enumerate(self._messages) if each["role"] == "user"), default=None
        )
        if asked is None:
            raise LuceasyncError("/retry: nothing was asked yet")
        self._answer(self._messages[: asked + 1])

    def _clear(self, _: str) -> None:
        self._messages, self._totals, self._file = [], ChatTotals(), None
        self._screen.note("(cleared)")

    def _save(self, name: str) -> None:
        path = _named(name, "/save")
        if path.exists() and path != self._file:
            raise LuceasyncError(f"/save {path}: exists; name another file")
        messages = self._with_system(self._messages)
        is_text = path.suffix == ".md"
        content = as_markdown(messages) if is_text else as_json(messages)
        try:
            with open(path, "w", encoding="utf-8", opener=_open_private) as file:
                file.write(content)
        except OSError as error:
            raise LuceasyncError(f"/save {path}: cannot be written ({error.strerror})") from error
        self._file = path
        self._screen.note(f"saved {count_text(len(messages), 'message')} to {path}")

    def _load(self, name: str) -> None:
        path = _named(name, "/load")
        try:
            saved = msgspec.json.decode(path.read_bytes(), type=SavedConversation)
        except OSError as error:
            raise LuceasyncError(f"/load {path}: cannot be read ({error.strerror})") from error
        except msgspec.DecodeError as error:
            expected = f"expected what /save has written ({error})"
            raise LuceasyncError(f"/load {path}: {expected}") from error
        messages: Messages = msgspec.to_builtins(saved.messages)
        self._system = "\n\n".join(each["content"] for each in messages if _is_system(each))
        self._messages = [each for each in messages if not _is_system(each)]
        self._totals, self._file = ChatTotals(), path
        self._screen.note(f"loaded {count_text(len(messages), 'message')} from {path}")

    def _stats(self) -> str:
        totals, about = self._totals, self._known()
        if totals.last is None:
            return f"{banner(about)}\nno answers yet"
        used = totals.last.prompt_tokens + totals.last.new_tokens
        share = f" of {about.max_ctx_tokens:,} tokens" if about.max_ctx_tokens else " tokens"
        cached = totals.cached_tokens / max(1, totals.prompt_tokens)
        lines = [
            banner(about),
            f"context:  {used:,}{share}",
            f"prompts:  {totals.prompt_tokens:,} tokens, {cached:.0%} cached",
            f"answers:  {totals.num_answers}, {totals.new_tokens:,} tokens",
        ]
        if totals.decode_s:
            lines.append(f"speed:    {totals.num_decoded / totals.decode_s:.1f} tokens/s")
        return "\n".join(lines)

    # Answers

    def _answer(self, messages: Messages) -> None:
        """Answer the last of `messages`, which become the conversation."""
        answer = {"role": "assistant", "content": ""}
        scope = self._portal.call(CancelScope)
        with _ctrl_c() as pressed:
            pressed.add_done_callback(lambda _: self._portal.start_task_soon(scope.cancel))
            figures = self._portal.call(self._show_answer, messages, answer, scope)
        if scope.cancelled_caught:
            self._screen.stopped()
        if figures is not None:
            self._totals = self._totals.plus(figures)
            self._screen.figures(figures_line(figures))
        self._messages = [*messages, answer]

    async def _show_answer(
        self, messages: Messages, answer: dict[str, str], scope: CancelScope
    ) -> Figures | None:
        figures = None
        with scope, self._screen.answer() as view:
            heard_all = self._responder.reply(self._with_system(messages), self._options)
            async for heard in heard_all:
                match heard:
                    case ReasoningPiece(text):
                        answer["reasoning_content"] = answer.get("reasoning_content", "") + text
                        view.take(heard)
                    case TextPiece(text):
                        answer["content"] += text
                        view.take(heard)
                    case Figures():
                        figures = heard
        return figures

    def _with_system(self, messages: Messages) -> Messages:
        head: Messages = [{"role": "system", "content": self._system}] if self._system else []
        return [*head, *messages]

    def _known(self) -> About:
        if self._about is None:
            self._about = self._portal.call(self._responder.about)
        return self._about


def banner(about: About) -> str:
    """The model and its devices, in one line."""
    size = f"{about.num_parameters / 1e9:.1f} B parameters" if about.num_parameters > 5e7 else ""
    context = f"{about.max_ctx_tokens:,} tokens of context" if about.max_ctx_tokens else ""
    parts = [about.model, size, ", ".join(about.devices), context]
    return f"luceasync {__version__}: {', '.join(part for part in parts if part)}"


def figures_line(figures: Figures) -> str:
    """The figures of an answer, in one line."""
    cached = f"{figures.cached_tokens:,} cached"
    if figures.tier:
        cached += f" ({figures.tier})"
    parts = [count_text(figures.new_tokens, "token")]
    if figures.decode_s:
        parts.append(f"{figures.num_decoded / figures.decode_s:.1f} tokens/s")
    if figures.tau:
        parts.append(f"{figures.tau:.2f} tokens a pass")
    parts.append(f"prompt of {figures.prompt_tokens:,}, {cached}")
    if figures.first_token_s:
        parts.append(f"first token after {figures.first_token_s:.2f} s")
    return ", ".join(parts)


def as_json(messages: Messages) -> str:
    """The conversation in the format that /load reads."""
    saved = SavedConversation([msgspec.convert(each, SavedMessage) for each in messages])
    return msgspec.json.format(msgspec.json.encode(saved)).decode() + "\n"


def as_markdown(messages: Messages) -> str:
    """The conversation in readable form."""
    return "\n".join(f"## {each['role'].title()}\n\n{each['content']}\n" for each in messages)


def _named(name: str, command: str) -> Path:
    if not name:
        raise LuceasyncError(f"{command} FILE: name a file")
    return Path(name).expanduser()


def _is_system(message: dict[str, Any]) -> bool:
    return bool(message["role"] == "system")


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE_FILE)


@contextmanager
def _ctrl_c() -> Iterator[Future[None]]:
    """A future that is done once Ctrl-C is pressed. An exception instead could be raised before
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
