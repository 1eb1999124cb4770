"""An answer in a terminal: what is complete is printed once, whatever pieces it came in."""

from __future__ import annotations

import io
import random
import stat

import pytest
from rich.console import Console

from luceasync.cli.chat.screen import RenderedAnswer, blocks, open_history, visible
from luceasync.request import ReasoningPiece, TextPiece

ANSWER = """# Lists

A paragraph with **bold** words,
over two lines.

1. one

2. two with `code`
   - deeper

| a | b |
|---|---|
| 1 | <b> |

Setext
---

```python
def f():

    return "# no heading"
```

The end.
"""


def shown(pieces: list[TextPiece | ReasoningPiece]) -> str:
    """What a terminal has of an answer in the end, without colours and movements."""
    out = io.StringIO()
    console = Console(file=out, width=60, height=12, force_terminal=False)
    with RenderedAnswer(console) as view:
        for piece in pieces:
            view.take(piece)
    return out.getvalue()


def cut(text: str, rng: random.Random) -> list[TextPiece]:
    places = sorted(rng.sample(range(1, len(text)), 40))
    ends = zip([0, *places], [*places, len(text)], strict=True)
    return [TextPiece(text[begin:end]) for begin, end in ends]


@pytest.mark.parametrize("seed", range(5))
def test_the_same_is_shown_whatever_pieces_an_answer_comes_in(seed: int) -> None:
    whole = shown([TextPiece(ANSWER)])
    assert shown(cut(ANSWER, random.Random(seed))) == whole
    assert "**" not in whole and "```" not in whole
    assert "<b>" in whole  # HTML is shown as it is written


def test_no_block_is_split_by_what_follows() -> None:
    whole = blocks(ANSWER)
    assert "".join(whole) == ANSWER
    assert [block[:6] for block in whole] == [
        *("# List", "A para", "1. one", "| a | ", "Setext", "```pyt", "The en")
    ]
    for length in range(len(ANSWER)):
        *complete, rest = blocks(ANSWER[:length])
        assert complete == whole[: len(complete)]
        assert "".join([*complete, rest]) == ANSWER[:length]


def test_reasoning_comes_before_the_text_and_is_not_rendered() -> None:
    out = shown([ReasoningPiece("one **two**\nth"), ReasoningPiece("ree"), TextPiece("four")])
    assert out == "one **two**\nthree\n\nfour\n\n"


def test_an_answer_that_is_cut_within_its_reasoning_is_shown() -> None:
    assert "why" in shown([ReasoningPiece("why")])


def test_a_model_does_not_command_the_terminal() -> None:
    assert visible("a\x1b[2Jb\x9bc\r\n\té漢") == "a\\x1b[2Jb\\x9bc\\r\n\té漢"
    assert "\x1b" not in shown([TextPiece("\x1b]0;title\x07"), ReasoningPiece("\x1b[2J")])


def test_history_that_cannot_be_written_is_kept_in_memory(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    history = open_history(tmp_path / "file" / "history")
    history.append_string("typed")
    assert history.get_strings() == ["typed"]


def test_history_that_others_could_read_is_made_private(tmp_path) -> None:
    path = tmp_path / "history"
    path.touch(0o644)
    open_history(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
