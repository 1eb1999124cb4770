"""Agents' settings and sessions are sound before any agent is installed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from luceasync.request import ArgumentsPiece, TextPiece
from luceasync.text.answer.call_formats import FORMATS
from luceasync.text.answer.pieces import AnswerPieces
from tests.acceptance.clients.agents import EXPORT, settings
from tests.acceptance.clients.record import Exchange
from tests.acceptance.clients.script import WRITERS
from tests.acceptance.clients.seen import uncached, usage
from tests.acceptance.clients.session import SESSIONS, Turn

SERVER = "http://127.0.0.1:9999"
FORMAT_NAMES = {"qwen3": "qwen-json", "qwen3.5": "qwen-xml"}


def answered(prompt: int, cached: int) -> Exchange:
    """An exchange of the chat API."""
    told = {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}
    return Exchange("POST", "/v1/chat/completions", {}, "{}", 200, json.dumps({"usage": told}))


def test_the_page_has_settings_that_agents_can_read() -> None:
    [exports] = settings("Claude Code", SERVER, {})
    assert dict(EXPORT.findall(exports))["ANTHROPIC_BASE_URL"] == SERVER
    config, catalog = settings("Codex", SERVER, {})
    codex = tomllib.loads(config)
    assert codex["model_providers"]["luceasync"]["base_url"] == f"{SERVER}/v1"
    [model] = json.loads(catalog)["models"]
    assert model["slug"] == codex["model"]
    assert model["context_window"] > codex["model_auto_compact_token_limit"]
    [opencode] = settings("OpenCode", SERVER, {})
    provider = json.loads(opencode)["provider"]["luceasync"]
    assert provider["options"]["baseURL"] == f"{SERVER}/v1"


@pytest.mark.parametrize(
    ("runs", "places"),
    [
        ([[(100, 0), (150, 100), (180, 149)]], []),
        ([[(100, 0), (150, 100), (180, 100)]], ["request 2 of run 0"]),
        ([[(100, 0), (150, 100)], [(170, 100), (190, 170)]], []),  # the user's turn: as the first
        ([[(100, 0), (150, 100)], [(170, 50)]], ["request 0 of run 1"]),
    ],
)
def test_prompts_that_were_not_cached_are_told(
    runs: Sequence[Sequence[tuple[int, int]]], places: list[str]
) -> None:
    seen = [[answered(*counts) for counts in run] for run in runs]
    assert [fault.partition(":")[0] for fault in uncached(seen)] == places


def test_usage_of_every_api_is_read() -> None:
    assert usage(answered(100, 40)) == (100, 40)
    told: list[Any] = [
        {"usage": {"input_tokens": 60, "cache_read_input_tokens": 40}},
        {
            "response": {
                "usage": {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 40}}
            }
        },
    ]
    for event in told:
        streamed = f"event: any\ndata: {json.dumps(event)}\n\n"
        assert usage(Exchange("POST", "/", {}, "", 200, streamed)) == (100, 40)


@pytest.mark.parametrize("template", WRITERS)
@pytest.mark.parametrize("agent", SESSIONS)
def test_only_whole_calls_of_a_session_are_calls(agent: str, template: str) -> None:
    session = SESSIONS[agent](Path("/home/work"))
    opens = template == "qwen3"
    texts = session.texts(WRITERS[template], opens=opens)
    turns = [turn for _, turns in session.runs for turn in turns]
    assert {turn.how for turn in turns} == {"whole", "cut", "in a thought"}
    for turn, text in zip(turns, texts.values(), strict=False):
        assert called(turn, text, template) == (turn.tool is not None and turn.how == "whole")
    names = list(texts)
    for text, following in zip(texts.values(), names[1:], strict=False):
        assert text.count(f"~{following}") == 1
    assert all(any(f"~{name}" in asked for name in names) for asked in session.asked())


def called(turn: Turn, text: str, template: str) -> bool:
    """Whether an answer has a call; its words are content in any case."""
    format = FORMATS[FORMAT_NAMES[template]]
    answer = AnswerPieces(is_reasoning=template == "qwen3.5", calls=format)
    pieces = answer.make(text, is_last=True)
    said = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    assert turn.words in said
    return any(isinstance(piece, ArgumentsPiece) for piece in pieces)
