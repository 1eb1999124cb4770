"""`luceasync chat` in a real terminal (tmux), typed as people type, over a model that says what it
was made for.

    python -m tests.acceptance.check_terminal [--picture docs/images/terminal.svg]

Exit status 1 at the first step that the terminal does not show. `--picture` writes what it shows.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from luceasync.config import BUNDLED_MODEL_DIR
from tests import crafted

COLUMNS, ROWS = 96, 44
SHOWN_S = 120.0  # until something is shown, a model that loads included
TEMPLATE = Path(__file__).parent / "turns/qwen3.jinja"
ANSWER = """<think>
A short function, then what it costs.
</think>

Split each line and add up:

```python
def count_words(path):
    with open(path) as file:
        return sum(len(line.split()) for line in file)
```

| | time | memory |
|---|---|---|
| **by lines** | one pass | the longest line |
| `read().split()` | one pass | the whole file |

1. Words are what stands between *white space*.
2. A file that is no text raises `UnicodeDecodeError`.
"""
LONG = "Numbers, one after the other: " + ", ".join(map(str, range(1000, 3000)))


class Terminal:
    """A program in a tmux of its own."""

    def __init__(self, command: str, environ: dict[str, str]) -> None:
        self._tmux = ["tmux", "-L", f"luceasync-{os.getpid()}", "-f", "/dev/null"]
        settings = " ".join(f"{name}={shlex.quote(text)}" for name, text in environ.items())
        size = ("-x", str(COLUMNS), "-y", str(ROWS))
        self._run("new-session", "-d", *size, f"env {settings} {command}; echo status $?; sleep 9")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._run("kill-server")

    def type(self, text: str) -> None:
        self._run("send-keys", "-l", text)

    def press(self, key: str) -> None:
        self._run("send-keys", key)

    def paste(self, text: str, *, marked: bool) -> None:
        """Paste it, as a terminal that marks pastes or one that does not."""
        self._run("set-buffer", text)
        self._run("paste-buffer", *(["-p"] if marked else []))

    def screen(self, *, coloured: bool = False) -> str:
        return self._run("capture-pane", "-p", *(["-e"] if coloured else []))

    def wait_for(self, pattern: str) -> str:
        """The screen once it shows `pattern`. Raises TimeoutError."""
        end = time.monotonic() + SHOWN_S
        while not re.search(pattern, screen := self.screen(), re.MULTILINE):
            if time.monotonic() > end:
                raise TimeoutError(f"{pattern!r} is not shown:\n{screen}")
            time.sleep(0.1)
        return screen

    def _run(self, *words: str) -> str:
        command = [*self._tmux, *words]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=20
        ).stdout


def hold(terminal: Terminal) -> str:
    """A conversation; returns what the terminal shows, with colours, after the first answer. Raises
    TimeoutError or AssertionError.
    """
    terminal.wait_for(r"^luceasync \S+: words, .*tokens of context\n(.*\n)?.*/help")
    terminal.wait_for(r"^> *$")
    terminal.type("How do I count the words of a file?")
    terminal.press("M-Enter")
    terminal.type("Show what it costs, too.")
    terminal.press("Enter")
    shown = terminal.wait_for(r"^\d+ tokens, [\d.]+ tokens/s, .*prompt of \d+, \d+ cached")
    assert "A short function" in shown and "def count_words(path):" in shown, shown
    assert "```" not in shown and "**" not in shown and "|---|" not in shown, shown
    terminal.type("/stats")
    terminal.press("Enter")
    terminal.wait_for(r"^speed: +[\d.]+ tokens/s")
    picture = terminal.screen(coloured=True)
    terminal.type("/system\r")
    terminal.wait_for(r"^system message: Answer briefly")
    terminal.type("Now the numbers ~long\r")  # the prompt may not be there yet
    terminal.wait_for(r"\d{4}, \d{4}")
    terminal.press("C-c")
    terminal.wait_for(r"^\(stopped\)\n(> *\n)?")
    for marked in (True, False):
        terminal.paste(f"pasted {marked}\n\n/quit\nas one turn ~words", marked=marked)
        terminal.wait_for(rf"^> pasted {marked}\n *\n +/quit\n +as one turn ~words$")
        terminal.press("C-c")
    terminal.press("Up")
    terminal.wait_for(r"^> Now the numbers ~long")
    terminal.press("C-c")
    terminal.press("C-d")
    terminal.wait_for(r"^status 0$")
    return picture


def draw(screen: str, path: Path) -> None:
    """Write the screen as an SVG that needs no font from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text.from_ansi(screen.rstrip()))
    svg = console.export_svg(title="luceasync chat", theme=MONOKAI)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    path.write_text(re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--picture", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts = {"words": ANSWER, "long": LONG}
        source = TEMPLATE.read_text(encoding="utf-8")
        model = crafted.save(Path(folder, "words"), texts, source, 8192, BUNDLED_MODEL_DIR)
        words = ["-m", "luceasync", "chat", str(model), "--max-ctx", "8K", "--parallel", "1"]
        words += ["--dtype", "fp32", "--system", "Answer briefly. ~words"]
        command = shlex.join([sys.executable, *words])
        home = {"HOME": folder, "XDG_STATE_HOME": folder}
        with Terminal(command, home) as terminal:
            picture = hold(terminal)
        assert Path(folder, "luceasync/chat_history").stat().st_mode & 0o777 == 0o600
    if args.picture is not None:
        draw(picture, args.picture)
    print(
        "banner, Markdown, figures, two lines, pastes, history, Ctrl-C and Ctrl-D: as they should"
    )


if __name__ == "__main__":
    main()
