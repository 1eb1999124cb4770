"""Through the server, over a tiny model: a conversation that its client names outlives one-shot
requests under the same name, in little memory; and no hint changes an answer.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from luceasync.server.app import create_app
from luceasync.server_config import ServerConfig
from tests.engines import running

pytestmark = pytest.mark.slow
# A conversation of the other one goes on from any of its rows, so that a name helps it less.
with_state = pytest.mark.parametrize(
    "family",
    [pytest.param("qwen3", marks=pytest.mark.thorough), "qwen3_5"],
    indirect=True,
    scope="session",
)

NUM_TURNS, NUM_TITLES = 6, 3  # and so many titles after each turn
SESSION = {"x-session-id": "ses_1"}
WORDS = "the quick brown fox jumps over lazy dogs while nobody minds it at all today".split()


class Chat:
    """A client of the app."""

    def __init__(self, client: httpx.AsyncClient, headers: dict[str, str]) -> None:
        self._client, self._headers = client, headers
        self._random = random.Random(3)

    def words(self, num_words: int) -> str:
        return " ".join(self._random.choices(WORDS, k=num_words))

    async def ask(self, messages: list[Any], **fields: Any) -> tuple[str, int, int]:
        """Text, tokens of the prompt, and how many of them were found."""
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        sent = await self._client.post(
            "/v1/chat/completions", json={**body, **fields}, headers=self._headers
        )
        told = sent.json()
        usage = told["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return told["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


async def conversation(
    model_dir: Path, memory_bytes: int, headers: dict[str, str], num_titles: int = NUM_TITLES
) -> tuple[list[str], list[bool], int]:
    """The answers, by turn whether the one before was found again, and bytes that are kept."""
    async with running(model_dir, memory_bytes=memory_bytes, max_ctx_tokens=4096) as engine:
        transport = httpx.ASGITransport(app=create_app(engine, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            chat, other = Chat(client, headers), Chat(client, headers)
            said: list[Any] = []
            texts, found, before = [], [], 0
            for _ in range(NUM_TURNS):
                said.append({"role": "user", "content": chat.words(12)})
                text, num_tokens, num_cached = await chat.ask(said)
                said.append({"role": "assistant", "content": text})
                texts.append(text)
                found.append(num_cached >= before - 64)
                before = num_tokens
                for _ in range(num_titles):
                    await other.ask([{"role": "user", "content": "Title: " + other.words(60)}])
        return texts, found, engine.status().cache.num_bytes["memory"]


@pytest.fixture(scope="module")
def alone(tiny_dir: Path) -> tuple[list[str], int]:
    """What a conversation says without others, and how much memory it takes."""
    texts, found, num_bytes = asyncio.run(conversation(tiny_dir, 1 << 30, {}, num_titles=0))
    assert all(found)
    return texts, num_bytes


@pytest.fixture(scope="module")
def named(tiny_dir: Path, alone: tuple[list[str], int]) -> tuple[list[str], list[bool], int]:
    """The same beside titles, under a name."""
    return asyncio.run(conversation(tiny_dir, 2 * alone[1], SESSION))


@with_state
def test_named_it_is_found_again_at_every_turn_and_says_the_same(alone, named):
    (texts, num_bytes), (told, found, kept_bytes) = alone, named
    assert all(found[2:]), found
    assert told == texts and kept_bytes <= 2 * num_bytes


@with_state
def test_without_a_name_it_says_the_same_and_is_found_no_more_often(tiny_dir, alone, named):
    texts, num_bytes = alone
    told, found, _ = asyncio.run(conversation(tiny_dir, 2 * num_bytes, {}))
    assert told == texts and sum(found) <= sum(named[1])


STATIC = "You know all of the standard library, and you say so in few words. " * 25


async def parted(model_dir: Path, mark: dict[str, Any]) -> tuple[list[str], int, int]:
    """The texts of two prompts that part within their system message, how many tokens of the second
    were found, and how many it has.
    """
    async with running(model_dir, max_ctx_tokens=4096) as engine:
        transport = httpx.ASGITransport(app=create_app(engine, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            texts = []
            for day in ("Monday", "a Tuesday"):
                system = [
                    {"type": "text", "text": STATIC, **mark},
                    {"type": "text", "text": f"Today is {day}."},
                ]
                asked = [{"role": "user", "content": f"What is {day}? " + "Say it. " * 40}]
                body = {"model": engine.card.name, "max_tokens": 8, "temperature": 0}
                sent = await client.post(
                    "/v1/messages", json={**body, "system": system, "messages": asked}
                )
                told = sent.json()
                texts.append("".join(block["text"] for block in told["content"]))
            usage = told["usage"]
            cached = usage["cache_read_input_tokens"]
            return texts, cached, usage["input_tokens"] + cached


def test_behind_a_mark_the_first_that_parts_goes_on(tiny_dir, family):
    texts, num_found, num_tokens = asyncio.run(
        parted(tiny_dir, {"cache_control": {"type": "ephemeral"}})
    )
    plain, num_found_without, _ = asyncio.run(parted(tiny_dir, {}))
    assert texts == plain
    assert num_found > num_tokens // 2
    if family == "qwen3_5":  # a state is only where it was kept
        assert num_found_without == 0
