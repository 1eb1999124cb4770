"""A conversation: history, commands and Ctrl-C, typed into a terminal or through a pipe."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import pytest

import luceasync
from luceasync.cli.chat.conversation import run_chat
from luceasync.cli.chat.responders import (
    About,
    AnswerOptions,
    Figures,
    Heard,
    Messages,
    open_local,
)
from luceasync.config import Config, ModelConfig
from luceasync.errors import ModelError, Unavailable
from luceasync.request import ReasoningPiece, TextPiece


class ScriptedResponder:
    """Repeats the last message; "fail" raises, "interrupt" presses Ctrl-C and never ends."""

    def __init__(self, thinks: bool = True) -> None:
        self.heard: list[Messages] = []
        self.options = AnswerOptions()
        self.cancelled = threading.Event()
        self._thinks = thinks

    async def about(self) -> About:
        return About("parrot", 4096, 1_500_000_000, ("cpu",), self._thinks)

    async def reply(self, messages: Messages, options: AnswerOptions) -> AsyncIterator[Heard]:
        self.heard.append(messages)
        self.options = options
        text = messages[-1]["content"]
        if text == "fail":
            raise Unavailable("gone")
        if text == "think":
            yield ReasoningPiece("hm")
        yield TextPiece(f"<{text}>")
        if text == "interrupt":
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            await self._wait()
        yield Figures(100, 80, 11, 0.25, 0.5, 10, "memory")

    async def _wait(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


@pytest.fixture
def talk(monkeypatch):
    def run(
        *lines: str, system: str | None = None, thinks: bool = True
    ) -> tuple[bool, ScriptedResponder]:
        responder = ScriptedResponder(thinks)

        @asynccontextmanager
        async def opening() -> AsyncIterator[ScriptedResponder]:
            yield responder

        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run_chat(opening(), system, AnswerOptions()), responder

    return run


def contents(messages: Messages) -> list[str]:
    return [message["content"] for message in messages]


def test_reasoning_is_sent_back_but_not_printed_to_a_pipe(talk, capsys):
    _, responder = talk("think", "b")
    assert "hm" not in capsys.readouterr().out
    answer = {"role": "assistant", "content": "<think>", "reasoning_content": "hm"}
    assert responder.heard[1][1] == answer


def test_a_pipe_gets_the_answers_alone_and_earlier_turns_are_remembered(talk, capsys):
    answered, responder = talk("a", "", "b")
    assert answered
    assert capsys.readouterr().out == "<a>\n<b>\n"
    assert contents(responder.heard[1]) == ["a", "<a>", "b"]
    assert [m["role"] for m in responder.heard[1]] == ["user", "assistant", "user"]


def test_the_system_message_comes_first_and_survives_clear(talk):
    _, responder = talk("a", "/clear", "b", system="Be brief")
    assert responder.heard[1] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "b"},
    ]


def test_the_system_message_is_set_shown_and_removed(talk, capsys):
    _, responder = talk("/system", "/system Be brief", "a", "/system", "/system -", "b")
    assert contents(responder.heard[0]) == ["Be brief", "a"]
    assert contents(responder.heard[1]) == ["a", "<a>", "b"]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("system")]
    assert [line.partition(": ")[2] for line in said] == [
        *("(none)", "Be brief", "Be brief", "(none)"),
    ]


def test_quit_ends_and_help_names_every_command(talk, capsys):
    _, responder = talk("/help", "/nope", "/quit", "a")
    assert responder.heard == []
    out = capsys.readouterr().out
    for name in "/help /system /save /load /stats /think /retry /clear /quit".split():
        assert f"\n{name} " in f"\n{out}"
    assert "unknown command /nope" in out


def test_retry_answers_the_last_message_again_without_the_answer_before(talk, capsys):
    answered, responder = talk("/retry", "a", "b", "/retry", "c")
    assert not answered
    assert capsys.readouterr().err == "error: /retry: nothing was asked yet\n"
    assert contents(responder.heard[2]) == ["a", "<a>", "b"]
    assert contents(responder.heard[3]) == ["a", "<a>", "b", "<b>", "c"]


def test_a_saved_conversation_goes_on_and_only_its_owner_reads_it(talk, tmp_path):
    file = tmp_path / "talk.json"
    talk("think", f"/save {file}", system="Be brief")
    assert file.stat().st_mode & 0o777 == 0o600
    _, responder = talk("lost", f"/load {file}", "b", f"/save {file}")
    assert contents(responder.heard[1]) == ["Be brief", "think", "<think>", "b"]
    assert responder.heard[1][2]["reasoning_content"] == "hm"
    assert len(json.loads(file.read_text())["messages"]) == 5


def test_a_conversation_is_saved_as_text_to_read(talk, tmp_path):
    talk("a", f"/save {tmp_path}/talk.md", system="Be brief")
    text = (tmp_path / "talk.md").read_text()
    assert text == "## System\n\nBe brief\n\n## User\n\na\n\n## Assistant\n\n<a>\n"


def test_no_other_file_is_overwritten(talk, tmp_path, capsys):
    other = tmp_path / "notes.json"
    other.write_text("mine")
    answered, _ = talk("a", f"/save {other}")
    assert not answered
    assert capsys.readouterr().err == f"error: /save {other}: exists; name another file\n"
    assert other.read_text() == "mine"


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("/save", "/save FILE: name a file"),
        ("/load none.json", "/load none.json: cannot be read (No such file or directory)"),
        ("/load bad.json", "/load bad.json: expected what /save has written (Object missing"),
        ("/save no/such/folder", "/save no/such/folder: cannot be written (No such file"),
        ("/think hard", "/think hard: expected off, on, low, medium, high"),
    ],
)
def test_what_a_command_cannot_do_is_one_line(
    talk, tmp_path, monkeypatch, capsys, command: str, error: str
):
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text("{}")
    answered, _ = talk(command)
    told = capsys.readouterr().err
    assert not answered
    assert told.startswith(f"error: {error}")
    assert told.count("\n") == 1


def test_how_much_is_thought_is_asked_of_models_that_think(talk, capsys):
    _, responder = talk("/think", "/think low", "a")
    assert responder.options.thinking == "low"
    assert "thinking: as the model usually does\nthinking: low\n" in capsys.readouterr().out
    _, responder = talk("/think low", "a", thinks=False)
    assert responder.options.thinking is None
    assert "does not think" in capsys.readouterr().out


def test_stats_add_up_all_answers(talk, capsys):
    talk("/stats", "a", "b", "/stats")
    assert capsys.readouterr().out.splitlines()[-5:] == [
        f"luceasync {luceasync.__version__}: parrot, 1.5 B parameters, cpu, "
        "4,096 tokens of context",
        "context:  111 of 4,096 tokens",
        "prompts:  200 tokens, 80% cached",
        "answers:  2, 22 tokens",
        "speed:    20.0 tokens/s",
    ]


def test_a_failed_turn_is_reported_and_forgotten(talk, capsys):
    answered, responder = talk("fail", "a")
    assert not answered
    assert capsys.readouterr() == ("\n<a>\n", "error: gone\n")
    assert contents(responder.heard[1]) == ["a"]


def test_ctrl_c_stops_the_answer_and_not_the_program(talk, capsys):
    answered, responder = talk("interrupt", "a")
    assert answered
    assert capsys.readouterr().out == "<interrupt>\n(stopped)\n<a>\n"
    assert responder.cancelled.wait(timeout=10)
    assert responder.heard[1][1]["content"] == "<interrupt>"


def test_a_text_that_begins_like_a_command_is_one_only_if_it_is_a_line(talk):
    _, responder = talk("/usr/bin/env prints", "/clearly a text")
    assert responder.heard[0][0]["content"] == "/usr/bin/env prints"


PROMPT = "\x1b[?2004h"  # pastes are marked from here on


class Terminal:
    """A chat in a terminal, which answers with what it was told."""

    PROGRAM = """
from contextlib import asynccontextmanager
from luceasync.cli.chat.conversation import run_chat
from luceasync.cli.chat.responders import About, AnswerOptions, Figures
from luceasync.request import TextPiece

class Parrot:
    async def about(self):
        return About("parrot", 4096)

    async def reply(self, messages, options):
        yield TextPiece(f"**heard** {messages[-1]['content']!r}")
        yield Figures(10, 4, 11, 0.25, 0.5, 10, "memory")

@asynccontextmanager
async def opening():
    yield Parrot()

run_chat(opening(), None, AnswerOptions())
"""

    def __init__(self, home: Path) -> None:
        self._fd, its_end = pty.openpty()
        command = [sys.executable, "-c", self.PROGRAM]
        streams = {"stdin": its_end, "stdout": its_end, "stderr": its_end}
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "XDG_STATE_HOME": str(home)}
        env["PROMPT_TOOLKIT_NO_CPR"] = "1"  # this terminal does not say where its cursor is
        self._process = subprocess.Popen(command, **streams, env=env, start_new_session=True)
        os.close(its_end)
        self._seen = ""

    def __enter__(self) -> Self:
        self.wait_for(PROMPT)
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, words: str) -> str:
        """Read until the terminal shows `words`; returns what it showed before them."""
        while words not in self._seen:
            assert select.select([self._fd], [], [], 20)[0], self._seen
            self._seen += os.read(self._fd, 4096).decode()
        before, _, self._seen = self._seen.partition(words)
        return before


@pytest.mark.slow
def test_lines_are_typed_pasted_and_remembered_in_a_terminal(tmp_path):
    history = tmp_path / "luceasync/chat_history"
    with Terminal(tmp_path) as terminal:
        for typed in ("\x1b[200~one\n/two\n\nthree\x1b[201~", "one\n/two\n\nthree"):
            terminal.type(typed)  # a paste that is marked, and one that is not
            terminal.wait_for("three")
            terminal.type("\r")
            terminal.wait_for(r"'one\n/two\n\nthree'")
            terminal.wait_for("10, 4 cached (memory)")
            terminal.wait_for(PROMPT)
        for typed, seen in (("first\\", "first\\"), ("\r", "\n"), ("second", "second")):
            terminal.type(typed)
            terminal.wait_for(seen)
        terminal.type("\r")
        terminal.wait_for(r"'first\nsecond'")
        terminal.wait_for(PROMPT)
        for typed in ("not this", "\x03", "this"):
            terminal.type(typed)
            terminal.wait_for(PROMPT if typed == "\x03" else typed)
        terminal.type("\r")
        terminal.wait_for("'this'")
        assert history.stat().st_mode & 0o777 == 0o600
        assert "+second\n" in history.read_text()


def test_a_model_without_a_chat_template_is_refused_before_it_is_loaded(tmp_path):
    async def chat() -> None:
        async with open_local(Config(model=ModelConfig(tmp_path))):
            pass

    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="has no chat template, so it takes no chats"):
        asyncio.run(chat())
