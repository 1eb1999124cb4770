"""Both responders give the same answers and errors."""

from __future__ import annotations

import httpx
import pytest

from luceasync.cli.chat import AnswerOptions, LocalResponder, RemoteResponder, open_remote
from luceasync.config import ServerConfig
from luceasync.errors import LuceasyncError, QueueFull, Unavailable
from luceasync.request import Delta, ReasoningPiece, TextPiece
from luceasync.server.app import create_app
from tests.server.scripted import ScriptedEngine, Step, answer, finish

HI = [{"role": "user", "content": "Hi"}]
RESPONDERS = ["local", "remote"]


@pytest.fixture(params=RESPONDERS)
def responder_of(request):
    def make(
        engine: ScriptedEngine, options: AnswerOptions | None = None
    ) -> LocalResponder | RemoteResponder:
        if request.param == "local":
            return LocalResponder(engine, options or AnswerOptions())
        transport = httpx.ASGITransport(create_app(engine, ServerConfig()))
        client = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        return RemoteResponder(client, options or AnswerOptions())

    return make


async def text_of(responder: LocalResponder | RemoteResponder) -> str:
    return "".join([piece.text async for piece in responder.reply(HI)])


async def test_the_text_arrives(responder_of):
    engine = ScriptedEngine()
    assert await text_of(responder_of(engine)) == "Hello!"
    assert engine.streams[0].closed.is_set()


async def test_reasoning_is_separate(responder_of):
    script = [Delta(0, (ReasoningPiece("why"), TextPiece("so"))), Delta(0, finish=finish())]
    pieces = [piece async for piece in responder_of(ScriptedEngine(script)).reply(HI)]
    assert pieces == [ReasoningPiece("why"), TextPiece("so")]


async def test_the_answer_options_are_passed_on(responder_of):
    engine = ScriptedEngine()
    await text_of(responder_of(engine, AnswerOptions(max_tokens=7, temperature=0.25)))
    request = engine.requests[0]
    assert (request.prompt.messages, request.max_tokens) == (HI, 7)
    assert request.sampling.temperature == 0.25


@pytest.mark.parametrize(
    "step", [Unavailable("gone"), Delta(0, finish=finish("error", error="gone"))]
)
async def test_a_failure_during_an_answer_is_raised_with_its_message(responder_of, step: Step):
    with pytest.raises(LuceasyncError, match="gone"):
        await text_of(responder_of(ScriptedEngine([*answer("a")[:-1], step])))


async def test_a_refusal_is_raised_with_its_message(responder_of):
    with pytest.raises(LuceasyncError, match="busy"):
        await text_of(responder_of(ScriptedEngine(opening=QueueFull(64, 1))))


async def test_an_unreachable_server_is_named():
    async with open_remote("http://127.0.0.1:1/v1", None, AnswerOptions()) as responder:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
            await text_of(responder)


async def test_the_key_is_sent_as_a_bearer_token():
    async with open_remote("http://localhost/v1/", "one", AnswerOptions()) as responder:
        client = responder._client
        assert client.headers["authorization"] == "Bearer one"
        assert str(client.base_url) == "http://localhost"
