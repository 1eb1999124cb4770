"""The engine with a real model: requests in, streams out, lanes free again."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from luceasync.engine.engine import LocalEngine
from luceasync.errors import ConfigError, ContextLengthError, QueueFull, RequestError, Unavailable
from luceasync.request import (
    ChatPrompt,
    Delta,
    Finish,
    Request,
    Sampling,
    Stream,
    TextPrompt,
    TokenPrompt,
)
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer

pytestmark = pytest.mark.any_family

DEADLINE_S = 20.0


def ask(text: str = "to be or not", **fields: Any) -> Request:
    fields = {"max_tokens": 24, "ignore_eos": True, **fields}
    return Request(ChatPrompt([{"role": "user", "content": text}]), **fields)


async def read(stream: Stream) -> tuple[str, Finish, list[Delta]]:
    """Text, finish and deltas of a stream with one choice."""
    deltas = [delta async for delta in stream]
    assert deltas[-1].finish is not None
    return "".join(delta.text for delta in deltas), deltas[-1].finish, deltas


async def answer(engine: LocalEngine, request: Request) -> str:
    return (await read(await engine.open(request)))[0]


async def until_idle(engine: LocalEngine) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while engine.status().num_running or engine.status().num_queued:
            await asyncio.sleep(0.005)


async def has_room(engine: LocalEngine) -> bool:
    try:
        return bool(await answer(engine, ask()))
    except QueueFull:
        return False


@pytest.mark.slow
async def test_same_seed_same_text_whatever_else_runs(start_engine):
    request = ask(sampling=Sampling(temperature=1.0, seed=11))
    async with start_engine(parallel=4) as engine:
        alone = await answer(engine, request)
        others = [ask("other " * i, sampling=Sampling(temperature=1.0)) for i in range(1, 6)]
        texts = await asyncio.gather(*(answer(engine, r) for r in [*others, request]))
    assert texts[-1] == alone


async def test_greedy_tokens_are_the_backends(start_engine, tiny_dir, family):
    from tests import tiny

    async with start_engine() as engine:
        _, _, deltas = await read(await engine.open(ask(max_tokens=32)))
        prompt = list(await engine.tokens(ask()))
    import torch

    peer = tiny.build(family).generate(
        torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None
    )
    assert [t for d in deltas for t in d.token_ids] == peer[0, len(prompt) :].tolist()


async def test_usage_and_timings_count_what_ran(start_engine):
    async with start_engine(prefill_chunk_tokens=64) as engine:
        stream = await engine.open(ask("be " * 100, max_tokens=5))
        _, finish, _ = await read(stream)
        status = engine.status()
    assert finish.reason == "length"
    assert finish.usage.prompt_tokens == stream.num_prompt_tokens > 64
    assert (finish.usage.completion_tokens, finish.usage.cached_tokens) == (5, 0)
    assert finish.timings.num_prefilled == status.prefilled_tokens_total == stream.num_prompt_tokens
    assert finish.timings.num_decoded == status.decoded_tokens_total == 4


async def test_an_answer_ends_where_the_context_ends(start_engine):
    async with start_engine(max_ctx_tokens=64) as engine:
        stream = await engine.open(ask(max_tokens=None))
        _, finish, _ = await read(stream)
    assert finish.usage.prompt_tokens + finish.usage.completion_tokens == 64


@pytest.mark.slow
async def test_choices_have_their_own_index_and_seed(start_engine):
    request = ask(num_choices=3, sampling=Sampling(temperature=1.0, seed=5))
    async with start_engine(parallel=2) as engine:
        texts = ["", "", ""]
        async for delta in await engine.open(request):
            texts[delta.index] += delta.text
        first = await answer(engine, ask(sampling=Sampling(temperature=1.0, seed=5)))
    assert len(set(texts)) == 3
    assert texts[0] == first


@pytest.mark.slow
async def test_a_stop_string_ends_the_text_before_it(start_engine):
    async with start_engine() as engine:
        whole = await answer(engine, ask())
        stop = whole[6:9]
        text, finish, _ = await read(await engine.open(ask(stop=(stop,))))
    assert text == whole[: whole.index(stop)]
    assert finish.reason == "stop"


async def test_logprobs_cover_every_token(start_engine):
    async with start_engine() as engine:
        _, _, deltas = await read(await engine.open(ask(top_logprobs=3, max_tokens=8)))
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    assert len(logprobs) == 8
    for entry in logprobs:  # greedy: the chosen token is the most probable one
        assert entry.top[0].token_bytes == entry.token_bytes
        assert entry.logprob == entry.top[0].logprob >= entry.top[1].logprob


async def test_a_prompt_longer_than_the_context_is_refused(start_engine):
    async with start_engine(max_ctx_tokens=64) as engine:
        with pytest.raises(ContextLengthError, match="maximum context length is 64 tokens"):
            await engine.open(ask("x" * 100))


async def test_a_bias_outside_the_vocabulary_is_refused(start_engine):
    async with start_engine() as engine:
        with pytest.raises(RequestError, match="100000"):
            await engine.open(ask(sampling=Sampling(logit_bias={100000: 1.0})))
        assert await answer(engine, ask(max_tokens=1)) is not None


async def test_the_queue_is_bounded(start_engine):
    async with start_engine(parallel=1, max_queue=1) as engine:
        streams = [await engine.open(ask(max_tokens=400)) for _ in range(2)]
        with pytest.raises(QueueFull):
            await engine.open(ask())
        for stream in streams:
            await stream.aclose()
        await until_idle(engine)
        async with asyncio.timeout(DEADLINE_S):  # the places are free again
            while not await has_room(engine):
                await asyncio.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
async def test_closing_a_stream_frees_its_lane_at_every_stage(start_engine, stage: str):
    async with start_engine(parallel=1, prefill_chunk_tokens=64) as engine:
        running = await engine.open(ask("be " * 150, max_tokens=300))
        leaving = running
        if stage == "decode":
            await anext(running)
        if stage == "queue":
            leaving = await engine.open(ask())
        await leaving.aclose()
        if stage == "queue":
            await running.aclose()
        await until_idle(engine)
        assert await answer(engine, ask())


async def test_nothing_is_served_before_the_model_is_there(tiny_dir):
    from luceasync.config import Config, ModelConfig
    from luceasync.engine.start import build_engine

    engine = build_engine(Config(model=ModelConfig(model_dir=tiny_dir, dtype="fp32")))
    with pytest.raises(Unavailable, match="loading"):
        await engine.open(ask())


async def test_weights_that_cannot_be_read_are_said_so(tiny_dir, tmp_path):
    """At once, or where they are damaged meanwhile, when they are read."""
    import shutil

    from luceasync.config import Config, ModelConfig
    from luceasync.engine.start import build_engine
    from luceasync.errors import ModelError

    shutil.copytree(tiny_dir, tmp_path / "model")
    config = Config(model=ModelConfig(model_dir=tmp_path / "model", dtype="fp32"))
    engine = build_engine(config)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        build_engine(config)
    async with engine:
        with pytest.raises(ModelError, match="not a readable safetensors file"):
            await engine.load()
        assert not engine.status().ready


async def test_an_unusable_directory_raises_before_the_model_is_loaded(tiny_dir, tmp_path, caplog):
    from luceasync.config import CacheConfig, Config, ModelConfig
    from luceasync.engine.start import build_engine

    (tmp_path / "file").touch()
    config = Config(ModelConfig(tiny_dir, dtype="fp32"), cache=CacheConfig(0, tmp_path / "file"))
    engine, hold = build_engine(config), threading.Event()
    load, engine._load = engine._load, lambda shelf: hold.wait(DEADLINE_S) and load(shelf)
    async with engine:
        with pytest.raises(ConfigError, match="--kv-cache-dir"):
            await engine.load()
        hold.set()
    assert not caplog.records  # nor was anything tried before


async def test_running_streams_end_when_the_engine_does(start_engine):
    async with start_engine() as engine:
        stream = await engine.open(ask(max_tokens=450))
        await anext(stream)
    deltas = [delta async for delta in stream]
    assert deltas[-1].finish.reason == "cancelled"
    assert "shutting down" in deltas[-1].finish.error


@pytest.mark.slow
async def test_a_prompt_of_text_or_ids_is_answered_as_the_messages_that_render_to_it(
    start_engine, tiny_dir
):
    """Special tokens in the text are the tokens that they name; nothing is put before or after."""
    chat = ask()
    text = ChatTemplate.load(tiny_dir).render(chat.prompt.messages)
    ids = tuple(Tokenizer.load(tiny_dir).encode(text))
    prompts = (chat.prompt, TextPrompt(text), TokenPrompt(ids))
    async with start_engine() as engine:
        told = [await read(await engine.open(replace(chat, prompt=prompt))) for prompt in prompts]
    tokens = [[token for delta in deltas for token in delta.token_ids] for _, _, deltas in told]
    assert tokens[0] == tokens[1] == tokens[2]
    assert {finish.usage.prompt_tokens for _, finish, _ in told} == {len(ids)}


async def test_an_answer_that_is_not_said_to_be_sent_is_kept_too(start_engine):
    async with start_engine() as engine:
        first = await read(await engine.open(ask()))
        assert [node for node in (await engine.details()).nodes if node.end > 0]
        engine.sent(), engine.sent()
        again = await read(await engine.open(ask()))
        assert again[0] == first[0]
        assert again[1].usage.cached_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TextPrompt, TokenPrompt])
async def test_only_after_text_is_an_answer_sent_back_as_the_ids_that_it_was(
    start_engine, tiny_dir, kind
):
    tokenizer = Tokenizer.load(tiny_dir)
    text, letters = "to be or not", [tokenizer.encode(letter)[0] for letter in "to"]
    prompt = {TextPrompt: text, TokenPrompt: tuple(tokenizer.encode(text))}[kind]
    sampling = Sampling(temperature=1.0, seed=1, logit_bias=dict.fromkeys(letters, 100.0))
    request = replace(ask(), prompt=kind(prompt), sampling=sampling)
    async with start_engine() as engine:
        said, finish, _ = await read(await engine.open(request))
        stream = await engine.open(replace(request, prompt=TextPrompt(text + said)))
        alone = await engine.open(replace(request, prompt=TextPrompt(said)))
    as_generated = finish.usage.prompt_tokens + finish.usage.completion_tokens
    by_itself = len(tokenizer.encode(text + said))
    assert by_itself < as_generated, "the letters must merge when they are read again"
    assert stream.num_prompt_tokens == (as_generated if kind is TextPrompt else by_itself)
    assert alone.num_prompt_tokens == len(tokenizer.encode(said))
