"""A conversation in the terminal: history, commands and Ctrl-C."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from anyio.from_thread import start_blocking_portal
from rich.console import Console

from luceasync.cli.chat import (
    AnswerOptions,
    Conversation,
    Messages,
    ShownPiece,
    open_local,
    run_chat,
)
from luceasync.config import Config, ModelConfig
from luceasync.errors import ModelError, Unavailable
from luceasync.request import ReasoningPiece, TextPiece


class ScriptedResponder:
    """Repeats the last message; "fail" raises, "interrupt" presses Ctrl-C and never ends."""

    def __init__(self) -> None:
        self.heard: list[Messages] = []
        self.cancelled = threading.Event()

    async def reply(self, messages: Messages) -> AsyncIterator[ShownPiece]:
        self.heard.append(messages)
        text = messages[-1]["content"]
        if text == "fail":
            raise Unavailable("gone")
        if text == "think":
            yield ReasoningPiece("hm")
        yield TextPiece(f"<{text}>")
        if text == "interrupt":
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            await self._wait()

    async def _wait(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


@pytest.fixture
def talk(monkeypatch):
    def run(*lines: str, system: str | None = None) -> tuple[bool, ScriptedResponder]:
        responder = ScriptedResponder()

        @asynccontextmanager
        async def opening() -> AsyncIterator[ScriptedResponder]:
            yield responder

        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run_chat(opening(), system), responder

    return run


def test_reasoning_is_sent_back_but_not_printed_to_a_pipe(talk, capsys):
    _, responder = talk("think", "b")
    assert "hm" not in capsys.readouterr().out
    answer = {"role": "assistant", "content": "<think>", "reasoning_content": "hm"}
    assert responder.heard[1][1] == answer


def test_each_line_is_a_turn_and_earlier_ones_are_remembered(talk, capsys):
    answered, responder = talk("a", "", "b")
    assert answered
    assert capsys.readouterr().out == "<a>\n<b>\n"
    assert [m["content"] for m in responder.heard[1]] == ["a", "<a>", "b"]
    assert [m["role"] for m in responder.heard[1]] == ["user", "assistant", "user"]


def test_the_system_message_comes_first_and_survives_clear(talk):
    _, responder = talk("a", "/clear", "b", system="Be brief")
    assert responder.heard[1] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "b"},
    ]


def test_quit_ends_and_help_helps(talk, capsys):
    _, responder = talk("/help", "/nope", "/quit", "a")
    assert responder.heard == []
    out = capsys.readouterr().out
    assert "/clear  start over" in out
    assert "unknown command /nope" in out


def test_a_failed_turn_is_reported_and_forgotten(talk, capsys):
    answered, responder = talk("fail", "a")
    assert not answered
    assert capsys.readouterr().err == "error: gone\n"
    assert [m["content"] for m in responder.heard[1]] == ["a"]


def test_ctrl_c_stops_the_answer_and_not_the_program(talk, capsys):
    answered, responder = talk("interrupt", "a")
    assert answered
    assert capsys.readouterr().out == "<interrupt> (stopped)\n<a>\n"
    assert responder.cancelled.wait(timeout=10)
    assert responder.heard[1][1]["content"] == "<interrupt>"


class Terminal:
    """Prints the turns that are typed into a terminal, one a line."""

    PROGRAM = """
from rich.console import Console
from luceasync.cli.chat import _turns
for turn in _turns(Console()):
    print(f"turn {turn!r}", flush=True)
"""

    def __init__(self) -> None:
        self._fd, its_end = pty.openpty()
        command = [sys.executable, "-c", self.PROGRAM]
        streams = {"stdin": its_end, "stdout": its_end, "stderr": its_end}
        env = {**os.environ, "TERM": "xterm"}
        self._process = subprocess.Popen(command, **streams, env=env, start_new_session=True)
        os.close(its_end)
        self._seen = ""
        self.wait_for("> ")

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, words: str) -> None:
        """Read until the terminal shows `words`."""
        while words not in self._seen:
            assert select.select([self._fd], [], [], 20)[0], self._seen
            self._seen += os.read(self._fd, 4096).decode()
        self._seen = self._seen.partition(words)[2]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)


@pytest.mark.slow
@pytest.mark.parametrize(
    "paste", ["\x1b[200~one\n/two\n\nthree\x1b[201~", "one\n/two\n\nthree"], ids=["marked", "bare"]
)
def test_a_paste_of_several_lines_is_one_turn(paste):
    terminal = Terminal()
    try:
        terminal.type(paste)
        terminal.wait_for("three")
        terminal.type("\r")
        terminal.wait_for(r"turn 'one\n/two\n\nthree'")
        terminal.wait_for("> ")
        terminal.type("next\r")
        terminal.wait_for("turn 'next'")
    finally:
        terminal.close()


def test_a_text_that_begins_like_a_command_is_one_only_if_it_is_a_line():
    responder = ScriptedResponder()
    with start_blocking_portal() as portal:
        conversation = Conversation(portal, responder, Console(file=io.StringIO()), None)
        conversation.take("/clear")
        conversation.take("/usr/bin/env\nprint()")
    assert responder.heard[0][0]["content"] == "/usr/bin/env\nprint()"


def test_a_model_without_a_chat_template_is_refused_before_it_is_loaded(tmp_path):
    async def chat() -> None:
        async with open_local(Config(model=ModelConfig(tmp_path)), AnswerOptions()):
            pass

    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="has no chat template, so it takes no chats"):
        asyncio.run(chat())
