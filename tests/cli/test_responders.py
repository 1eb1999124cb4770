"""Both responders give the same answers and errors."""

from __future__ import annotations

import json

import httpx
import pytest

from luceasync.cli.chat.responders import (
    About,
    AnswerOptions,
    Figures,
    LocalResponder,
    RemoteResponder,
    ShownPiece,
    open_remote,
)
from luceasync.errors import LuceasyncError, QueueFull, Unavailable
from luceasync.request import Delta, ReasoningPiece, Restore, Speculation, TextPiece
from luceasync.server.app import create_app
from luceasync.server_config import ServerConfig
from tests.server.scripted import ScriptedEngine, Step, answer, finish

HI = [{"role": "user", "content": "Hi"}]
RESPONDERS = ["local", "remote"]
USUAL = AnswerOptions()


@pytest.fixture(params=RESPONDERS)
def responder_of(request):
    def make(engine: ScriptedEngine) -> LocalResponder | RemoteResponder:
        if request.param == "local":
            return LocalResponder(engine)
        transport = httpx.ASGITransport(create_app(engine, ServerConfig()))
        return RemoteResponder(
            httpx.AsyncClient(transport=transport, base_url="http://localhost"),
        )

    return make


async def heard_from(
    responder: LocalResponder | RemoteResponder, options: AnswerOptions = USUAL
) -> list[ShownPiece | Figures]:
    return [heard async for heard in responder.reply(HI, options)]


async def text_of(
    responder: LocalResponder | RemoteResponder, options: AnswerOptions = USUAL
) -> str:
    heard = await heard_from(responder, options)
    return "".join(piece.text for piece in heard if isinstance(piece, ShownPiece))


async def test_the_text_arrives(responder_of):
    engine = ScriptedEngine()
    assert await text_of(responder_of(engine)) == "Hello!"
    assert engine.streams[0].closed.is_set()


async def test_reasoning_is_separate(responder_of):
    script = [Delta(0, (ReasoningPiece("why"), TextPiece("so"))), Delta(0, finish=finish())]
    heard = await heard_from(responder_of(ScriptedEngine(script)))
    assert heard[:2] == [ReasoningPiece("why"), TextPiece("so")]


async def test_figures_come_last(responder_of):
    restored = finish(num_tokens=11, restore=Restore("disk", 4), speculation=Speculation(4, 12, 6))
    heard = await heard_from(responder_of(ScriptedEngine([Delta(0, finish=restored)])))
    assert heard == [
        Figures(
            prompt_tokens=10,
            cached_tokens=4,
            new_tokens=11,
            first_token_s=pytest.approx(0.101),
            decode_s=0.5,
            num_decoded=10,
            tier="disk",
            tau=2.5,
        )
    ]


async def test_the_answer_options_are_passed_on(responder_of):
    engine = ScriptedEngine()
    await text_of(responder_of(engine), AnswerOptions(max_tokens=7, temperature=0.25))
    request = engine.requests[0]
    assert (request.prompt.messages, request.max_tokens) == (HI, 7)
    assert request.sampling.temperature == 0.25
    assert request.most_reasoning_tokens is None


@pytest.mark.parametrize(("thinking", "most_tokens"), [("off", 0), ("on", None), ("low", 2048)])
async def test_how_much_is_thought_is_passed_on(responder_of, thinking, most_tokens):
    engine = ScriptedEngine()
    await text_of(responder_of(engine), AnswerOptions(thinking=thinking))
    assert engine.requests[0].most_reasoning_tokens == most_tokens


async def test_the_local_engine_says_what_it_is():
    about = await LocalResponder(ScriptedEngine()).about()
    assert about == About("tiny", 4096, 1_000_000, ("cpu",), thinks=False)


async def test_a_server_says_what_it_is(on_port):
    async with (
        on_port(ScriptedEngine()) as client,
        open_remote(str(client.base_url), None) as responder,
    ):
        assert await responder.about() == About("tiny", 4096, 1_000_000, ("cpu",), thinks=False)


async def test_a_server_of_another_kind_is_asked_by_its_first_model():
    asked: list[dict] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"object": "list", "data": [{"id": "other"}]})
        if request.url.path == "/v1/chat/completions":
            asked.append(json.loads(request.content))
            return httpx.Response(200, text="data: [DONE]\n\n")
        return httpx.Response(404, json={"detail": "Not Found"})

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://other") as client:
        responder = RemoteResponder(client)
        assert await responder.about() == About("other")
        assert await heard_from(responder) == []
    assert asked[0]["model"] == "other"


@pytest.mark.parametrize(
    "models", [{}, {"data": []}, {"data": [3]}, [], {"data": [{"id": 1, "meta": 2}]}]
)
async def test_what_is_no_list_of_models_is_refused(models):
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=models))
    async with httpx.AsyncClient(transport=transport, base_url="http://other") as client:
        with pytest.raises(LuceasyncError, match="expected a list of models"):
            await RemoteResponder(client).about()


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
    async with open_remote("http://127.0.0.1:1/v1", None) as responder:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
            await responder.about()
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
            await text_of(responder)


async def test_the_key_is_sent_as_a_bearer_token():
    async with open_remote("http://localhost/v1/", "one") as responder:
        client = responder._client
        assert client.headers["authorization"] == "Bearer one"
        assert str(client.base_url) == "http://localhost"
