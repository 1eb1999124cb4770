"""What a chat shows and reads: a terminal, with Markdown as it streams, or a pipe, with text alone.

Knows neither commands nor what answers.
"""

from __future__ import annotations

import select
import sys
import termios
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from markdown_it import MarkdownIt
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.spinner import Spinner
from rich.text import Text

from luceasync.cli.output import one_line
from luceasync.request import ReasoningPiece, TextPiece

FRAMES_PER_S = 10
ROWS_BELOW = 2  # of the terminal, which stay free below an answer that grows
CODE_THEME = "ansi_dark"  # the terminal's own colours
PASTE_GAP_S = 0.05  # between two lines of a paste that the terminal does not mark
INPUT_MODES, LOCAL_MODES = 0, 3  # places in what termios tells
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600

ShownPiece = TextPiece | ReasoningPiece


class AnswerView(Protocol):
    """Shows one answer as it arrives."""

    def take(self, piece: ShownPiece) -> None: ...


class Screen(Protocol):
    """Where a chat is held."""

    def turns(self) -> Generator[str]:
        """What is typed, a turn at a time, until the input ends."""
        ...

    def note(self, text: str) -> None:
        """Show lines of our own."""
        ...

    def figures(self, line: str) -> None:
        """Show what an answer took."""
        ...

    def error(self, text: str) -> None:
        """Show what has failed, in one line."""
        ...

    def answer(self) -> _Answer:
        """Shows an answer within its block."""
        ...

    def stopped(self) -> None:
        """Say that the answer was stopped."""
        ...


class _Answer(AnswerView, Protocol):
    def __enter__(self) -> AnswerView: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


# Pipes


class PipeScreen:
    """Lines in, text out, as the model wrote it; errors to stderr."""

    def turns(self) -> Generator[str]:
        for line in sys.stdin:
            yield line.strip()

    def note(self, text: str) -> None:
        print(text, flush=True)

    def figures(self, line: str) -> None:
        """Nothing: a pipe gets the answers alone."""

    def error(self, text: str) -> None:
        print(f"error: {one_line(text)}", file=sys.stderr, flush=True)

    def answer(self) -> PipeAnswer:
        return PipeAnswer()

    def stopped(self) -> None:
        print("(stopped)", flush=True)


class PipeAnswer:
    """Writes the text of an answer, without its reasoning, and ends its line."""

    def __enter__(self) -> Self:
        return self

    def take(self, piece: ShownPiece) -> None:
        if isinstance(piece, TextPiece):
            sys.stdout.write(piece.text)
            sys.stdout.flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        print(flush=True)


# Terminals


class TerminalScreen:
    """A terminal: lines are edited and remembered, answers are rendered. `commands`: completed at
    the beginning of a line.
    """

    def __init__(self, commands: list[str], history: Path | None) -> None:
        self._console = Console(highlight=False)
        self._session: PromptSession[str] = PromptSession(
            history=open_history(history),
            multiline=True,
            key_bindings=_keys(),
            completer=WordCompleter(commands, sentence=True),
            complete_while_typing=Condition(self._types_command),
            prompt_continuation="  ",
            reserve_space_for_menu=4,
        )

    def turns(self) -> Generator[str]:
        """Ctrl-C at the prompt starts anew, Ctrl-D ends."""
        with _typing_unseen():
            while True:
                try:
                    typed = self._session.prompt("> ").strip()
                except KeyboardInterrupt:
                    continue
                except EOFError:
                    return
                yield typed

    def note(self, text: str) -> None:
        self._console.print(Text(visible(text), style="dim"))

    def figures(self, line: str) -> None:
        self._console.print(Text(line, style="dim"))
        self._console.print()

    def error(self, text: str) -> None:
        self._console.print(Text(f"error: {one_line(text)}", style="red"))

    def answer(self) -> RenderedAnswer:
        return RenderedAnswer(self._console)

    def stopped(self) -> None:
        self._console.print(Text("(stopped)", style="dim"))

    def _types_command(self) -> bool:
        return self._session.default_buffer.text.startswith("/")


def open_history(path: Path | None) -> History:
    """What was typed before, in a file that only its owner may read; in memory if there is no path,
    or the file cannot be written.
    """
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        path.touch(PRIVATE_FILE)
        path.chmod(PRIVATE_FILE)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def _keys() -> KeyBindings:
    """Enter sends; Alt-Enter, Ctrl-J, a backslash before Enter and a paste make another line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if event.app.key_processor.input_queue or _more_is_typed():
            buffer.insert_text("\n")  # a paste that the terminal does not mark
        elif buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _more_is_typed() -> bool:
    return bool(select.select([sys.stdin], [], [], PASTE_GAP_S)[0])


def visible(text: str) -> str:
    """`text` with control characters written out: a model must not command a terminal."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" or ord(char) > 0xFF else repr(char)[1:-1]
        for char in text
    )


class RenderedAnswer:
    """Reasoning dim, then Markdown. What is complete is printed for good; the open end, as much of
    it as the terminal holds, is drawn anew some times a second.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._thought = ""  # the line that is not complete
        self._text = ""  # the blocks that are not complete
        self._has_thought = self._has_text = False
        self._spinner = Spinner("dots", style="dim")
        self._live = Live(
            get_renderable=self._open_end,
            console=console,
            transient=True,
            refresh_per_second=FRAMES_PER_S,
            vertical_overflow="crop",
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def take(self, piece: ShownPiece) -> None:
        """Add a piece, and print what it completes."""
        if isinstance(piece, ReasoningPiece):
            self._has_thought = True
            lines, _, self._thought = (self._thought + visible(piece.text)).rpartition("\n")
            self._print_thought(lines)
            return
        self._end_thought()
        self._has_text = True
        self._text += visible(piece.text)
        if "\n" in piece.text:
            *complete, self._text = blocks(self._text)
            self._print_blocks(complete)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
        self._end_thought()
        self._print_blocks(blocks(self._text + "\n"))

    def _print_thought(self, lines: str) -> None:
        if lines:
            self._console.print(Text(lines, style="dim italic"))

    def _end_thought(self) -> None:
        """Print the rest of the reasoning, and a line between it and the text."""
        if self._has_thought:
            self._print_thought(self._thought)
            self._console.print()
            self._thought, self._has_thought = "", False

    def _print_blocks(self, complete: Sequence[str]) -> None:
        for block in complete:
            if block.strip():
                self._console.print(_Rows(_markdown(block)))
                self._console.print()

    def _open_end(self) -> RenderableType:
        if self._text.strip():
            return _Rows(_markdown(self._text), self._console.height - ROWS_BELOW)
        if self._thought:
            text = Text(self._thought, style="dim italic")
            return _Rows(text, self._console.height - ROWS_BELOW)
        return self._spinner


class _Rows:
    """The rows of something, the last `num_rows` of them, without empty ones at its ends, and
    without spaces at theirs: what is selected in a terminal is what was said.
    """

    def __init__(self, inner: RenderableType, num_rows: int = sys.maxsize) -> None:
        self._inner = inner
        self._num_rows = max(1, num_rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(height=None)
        rows = [_stripped(row) for row in console.render_lines(self._inner, unbounded, pad=False)]
        while rows and not rows[-1]:
            rows.pop()
        begin = next((i for i, row in enumerate(rows) if row), 0)
        for row in rows[max(begin, len(rows) - self._num_rows) :]:
            yield from row
            yield Segment.line()


def _stripped(row: list[Segment]) -> list[Segment]:
    """A row without the spaces at its end."""
    row = [*row]
    while row and not row[-1].text.strip():
        row.pop()
    if row:
        row[-1] = Segment(row[-1].text.rstrip(), row[-1].style, row[-1].control)
    return row


# HTML that an answer mentions is text, not to be left out.
_parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")


def _markdown(text: str) -> Markdown:
    rendered = Markdown("", code_theme=CODE_THEME, hyperlinks=False)
    rendered.markup, rendered.parsed = text, _parser.parse(text)
    return rendered


def blocks(text: str) -> list[str]:
    """The blocks of `text`, of which more text may only change the last one. A line that is not
    complete does not begin one: "2" may become a number, an item or a heading.
    """
    complete = text[: text.rfind("\n") + 1]
    lines = complete.splitlines(keepends=True)
    starts = [
        token.map[0]
        for token in _parser.parse(complete)
        if token.level == 0 and token.nesting >= 0 and token.map is not None
    ]
    ends = [*starts[1:], len(lines)]
    found = ["".join(lines[begin:end]) for begin, end in zip([0, *starts[1:]], ends, strict=False)]
    return [*found[:-1], "".join([*found[-1:], text[len(complete) :]])]


@contextmanager
def _typing_unseen() -> Iterator[None]:
    """Between two prompts what is typed waits for the next one, key by key, and is not shown in the
    midst of an answer. Ctrl-C is a signal as ever.
    """
    before = termios.tcgetattr(sys.stdin)
    unseen = [*before]
    unseen[INPUT_MODES] &= ~termios.ICRNL
    unseen[LOCAL_MODES] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, unseen)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
