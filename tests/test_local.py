"""A model in this process: the way of the server, with its names, errors and answers."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import msgspec
import pytest

from luceasync.errors import ConfigError, QueueFull, RequestError, Unavailable
from luceasync.local import LocalModel
from luceasync.options import OPTIONS, config_of
from luceasync.request import Delta
from luceasync.server.app import create_app
from luceasync.server_config import ServerConfig
from tests.deltas import text_delta
from tests.server.scripted import ScriptedEngine, answer, finish

ROOT = Path(__file__).parents[1]
HI = [{"role": "user", "content": "Hi"}]
SMALL = {"max_ctx": "1K", "parallel": 1, "dtype": "fp32", "prefix_cache_memory": "64M"}


async def by_http(engine: ScriptedEngine, path: str, **body: object) -> httpx.Response:
    transport = httpx.ASGITransport(app=create_app(engine, ServerConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.post(path, json=body)


def without_ids(body: dict) -> dict:
    return {name: value for name, value in body.items() if name not in ("id", "created")}


async def test_an_answer_is_the_servers_field_for_field():
    fields = {"temperature": 0.5, "seed": 1, "max_tokens": 9, "tools": None, "stop": ["x"]}
    here, there = ScriptedEngine(), ScriptedEngine()
    told = await LocalModel(here).chat(HI, **fields)
    response = await by_http(there, "/v1/chat/completions", messages=HI, **fields)
    assert without_ids(msgspec.to_builtins(told)) == without_ids(response.json())
    [mine], [servers] = here.requests, there.requests
    assert (mine.prompt, mine.sampling, mine.stop) == (
        servers.prompt,
        servers.sampling,
        servers.stop,
    )


async def test_a_text_is_continued_and_streamed_in_the_servers_parts():
    engine = ScriptedEngine()
    model = LocalModel(engine)
    plain = await model.complete("Once", max_tokens=3)
    async with model.stream_complete("Once", max_tokens=3) as events:
        parts = [event.text async for event in events]
    assert plain.text == "".join(parts) == "Hello!" and plain.usage.completion_tokens == 3
    assert parts[0] == "Hel"


async def test_a_string_is_a_message_of_the_user_and_parts_add_up():
    engine = ScriptedEngine()
    async with LocalModel(engine).stream_chat("Hi") as chunks:
        texts = [chunk.text async for chunk in chunks]
    assert "".join(texts) == "Hello!" and len(texts) > 3
    assert engine.requests[0].prompt.messages == HI


async def test_tokens_are_counted_of_a_text_and_of_messages():
    model = LocalModel(ScriptedEngine())
    assert await model.count_tokens("Hi") == await model.count_tokens(HI) == 10
    assert (await model.tokenize("Hi")).tokens == tuple(range(10))


@pytest.mark.parametrize("field", [{"temperature": 9}, {"max_tokens": "x"}, {"tools": [{}]}])
async def test_a_wrong_field_has_the_servers_message(field):
    response = await by_http(ScriptedEngine(), "/v1/chat/completions", messages=HI, **field)
    with pytest.raises(RequestError) as caught:
        await LocalModel(ScriptedEngine()).chat(HI, **field)
    told = response.json()["error"]
    assert (str(caught.value), caught.value.param) == (told["message"], told["param"])


@pytest.mark.parametrize("name", ["temprature", "stream", "prompt"])
async def test_a_field_that_there_is_not_is_an_error(name):
    with pytest.raises(RequestError, match=f"'{name}'") as caught:
        await LocalModel(ScriptedEngine()).chat(HI, **{name: True})
    assert caught.value.param == name


@pytest.mark.parametrize("failure", [QueueFull(1, 2), Unavailable("gone")])
async def test_failures_are_raised_as_they_are(failure):
    with pytest.raises(type(failure)):
        await LocalModel(ScriptedEngine(opening=failure)).chat(HI)
    lost = ScriptedEngine([text_delta(0, "a"), Delta(0, finish=finish("cancelled"))])
    with pytest.raises(Unavailable):
        await LocalModel(lost).chat(HI)
    assert lost.streams[0].closed.is_set()


async def test_leaving_a_stream_or_cancelling_a_task_frees_the_lane():
    gate = asyncio.Event()
    engine = ScriptedEngine([*answer("a")[:-1], gate])
    model = LocalModel(engine)
    async with model.stream_chat(HI) as chunks:
        async for chunk in chunks:
            if chunk.text:
                break
    asking = asyncio.create_task(model.chat(HI))
    while len(engine.streams) < 2:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert [stream.closed.is_set() for stream in engine.streams] == [True, True]


# Settings


def test_settings_are_the_servers_without_its_http_side():
    for option in OPTIONS:
        if option.section == "server":
            with pytest.raises(ConfigError, match="only a server"):
                config_of({option.key: option.default})
        else:
            config_of({option.key: None})
    assert config_of({"max_ctx": "2K"}).engine.max_ctx_tokens == 2048
    assert config_of({"max_ctx": 2048, "kv_cache_dir": Path("x")}).cache.cache_dir == Path("x")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_ctxx": 1}, "max_ctxx: there is no such setting; the nearest one is max_ctx"),
        ({"max_ctx": "lots"}, "max_ctx: 'lots' is not allowed; allowed: an integer number"),
        ({"kvflash_tau": 3}, "kvflash_tau: 3 is not allowed without --kvflash"),
        ({"model_dir": "/nowhere"}, "does not exist"),
    ],
)
async def test_a_wrong_setting_is_one_line(settings, words):
    model = settings.pop("model_dir", None)
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        async with LocalModel.open(model, **settings):
            pass
    assert "\n" not in str(caught.value)


def test_variables_are_not_read_and_a_file_is(monkeypatch, tmp_path):
    monkeypatch.setenv("LUCEASYNC_MAX_CTX", "512")
    file = tmp_path / "luceasync.toml"
    file.write_text("[engine]\nmax_ctx = 1024\nparallel = 3\n[server]\nport = 1\n")
    config = config_of({"parallel": 2}, file)
    assert (config.engine.max_ctx_tokens, config.engine.parallel) == (1024, 2)


# With the bundled model


@pytest.mark.slow  # two models are loaded: that they share nothing shows in real ones only
async def test_two_models_in_one_process_answer_side_by_side():
    ask = {"temperature": 0, "max_tokens": 8}
    async with LocalModel.open(**SMALL) as one, LocalModel.open(**SMALL) as two:
        told = await asyncio.gather(
            *(each.chat("What does json.dumps do?", **ask) for each in (one, two))
        )
        assert told[0].text == told[1].text != ""
        async with one.stream_chat("Hi", ignore_eos=True) as chunks:
            await anext(chunks)
            await two.chat("Hi", **ask)
        async with asyncio.timeout(10):
            while one.status().num_running:
                await asyncio.sleep(0.01)
    with pytest.raises(Unavailable):
        await one.chat("Hi")


@pytest.mark.slow  # the documented program runs as it stands
def test_the_documented_program_runs(capsys):
    text = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    [program] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(program, "docs/python.md", "exec"), {})
    told = dict(line.partition(": ")[::2] for line in capsys.readouterr().out.splitlines())
    assert told["answer"].startswith("`json.dumps(obj")
    assert int(told["cached"]) > 20
    assert msgspec.json.decode(told["json"])["city"] in ("Bern", "Oslo")
    assert (told["call"], told["refused"]) == ("weather", "temperature")
    assert [int(count) for count in told["tokens"].split()][1] > 30
