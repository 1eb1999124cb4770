"""A conversation in the terminal: history, commands and Ctrl-C."""

from __future__ import annotations

import asyncio
import io
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from luceasync.cli.chat import Messages, ShownPiece, run_chat
from luceasync.errors import Unavailable
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
