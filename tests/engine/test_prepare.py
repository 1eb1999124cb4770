"""The choices of a request: limits, stop tokens and seeds."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from luceasync.engine.prepare import MAX_SHORT_CHARS, ChoicePreparation, prepare
from luceasync.engine.prompts import Language
from luceasync.errors import RequestError
from luceasync.prefix_cache.tenants import Tenants
from luceasync.request import ChatPrompt, ModelCard, Request, Sampling, TextPrompt, TokenPrompt
from luceasync.text.history import History
from luceasync.text.prompt import RenderedPrompt, Tenant
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer

MAX_CTX_TOKENS = 64
REQUEST = Request(TokenPrompt((1, 2, 3)))


@pytest.fixture
def language(tiny_dir: Path) -> Language:
    tokenizer = Tokenizer.load(tiny_dir)
    card = ModelCard("tiny", 0, MAX_CTX_TOKENS, 1, "qwen3")
    return Language(card, tokenizer, ChatTemplate.load(tiny_dir), vocab_size=300, num_lanes=2)


def choices(language: Language, **fields):
    tenant = Tenant(b"t" * 32, History(language.tokenizer))
    prompt = RenderedPrompt(tenant, None, (1, 2, 3), (3,))
    return prepare(language, replace(REQUEST, **fields), prompt, stream_id=7)


@pytest.mark.parametrize(("asked", "given"), [(None, 61), (5, 5), (1000, 61)])
def test_an_answer_has_the_room_that_the_prompt_leaves(language, asked, given):
    [choice] = choices(language, max_tokens=asked)
    assert choice.max_tokens == given


def test_choices_have_their_own_index_and_seed_and_the_first_keeps_the_seed(language):
    prepared = choices(language, num_choices=3, sampling=Sampling(temperature=1.0, seed=11))
    assert [(c.stream_id, c.index) for c in prepared] == [(7, 0), (7, 1), (7, 2)]
    assert prepared[0].seed == 11
    assert len({c.seed for c in prepared}) == 3


def test_without_a_seed_each_request_draws_another(language):
    assert choices(language)[0].seed != choices(language)[0].seed


def test_tokens_are_counted_only_for_penalties_and_for_each_choice_by_itself(language):
    assert choices(language)[0].counts is None
    penalised = choices(language, num_choices=2, sampling=Sampling(presence_penalty=1.0))
    assert penalised[0].counts is not penalised[1].counts
    assert sorted(penalised[0].counts.ids) == [1, 2, 3]


def test_the_end_token_ends_unless_it_is_to_be_ignored(language):
    assert choices(language)[0].stop_ids == language.tokenizer.eos_ids
    assert choices(language, ignore_eos=True)[0].stop_ids == frozenset()


def test_tokens_of_the_request_end_it_too(language):
    ends = language.tokenizer.eos_ids
    assert choices(language, stop_token_ids=(5, 6))[0].stop_ids == ends | {5, 6}
    assert choices(language, stop_token_ids=(5,), ignore_eos=True)[0].stop_ids == {5}


def test_a_bias_outside_the_vocabulary_is_refused(language):
    with pytest.raises(RequestError, match="token 300"):
        choices(language, sampling=Sampling(logit_bias={300: 1.0}))


async def test_chats_that_wait_for_the_template_hold_up_no_text(language):
    is_free = threading.Event()

    class Slow:
        def render(self, messages, tools=None, /, **kwargs) -> str:
            return "ab" if is_free.wait(20) else "late"

    slow = replace(language, template=Slow())
    preparation = ChoicePreparation(slow, Tenants(lambda: History(language.tokenizer)))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    asked = Request(ChatPrompt([{"role": "user", "content": "Hi"}]))
    chats = [asyncio.create_task(preparation.rendered(asked)) for _ in range(4)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(10):
        assert (await preparation.rendered(Request(TextPrompt("ab")))).ids
        is_free.set()
        assert all(prompt.text == "ab" for prompt in await asyncio.gather(*chats))
    await preparation.close()


async def test_only_short_chats_with_a_template_of_our_own_are_prepared_on_the_event_loop(language):
    """Anything that may take long runs in a thread, where it delays no other request."""
    here = threading.get_ident()
    seen: list[int] = []

    class Watched:
        def render(self, messages, tools=None, /, **kwargs):
            seen.append(threading.get_ident())
            return language.template.render(messages, tools, **kwargs)

    short = ChatPrompt([{"role": "user", "content": "x"}])
    long = ChatPrompt([{"role": "user", "content": "x " * MAX_SHORT_CHARS}])
    parts = ChatPrompt([{"role": "user", "content": [{"type": "text", "text": "x"}]}])
    cases = [(short, True, True), (short, False, False), (long, True, False), (parts, True, False)]
    for prompt, renders_here, is_at_once in cases:
        told = replace(language, template=Watched(), renders_here=renders_here)
        preparing = ChoicePreparation(told, Tenants(lambda: History(language.tokenizer)))
        seen.clear()
        with contextlib.suppress(RequestError):  # the long one has too many tokens
            await preparing.choices(Request(prompt), 1)
        await preparing.close()
        assert {thread == here for thread in seen} == {is_at_once}, prompt
