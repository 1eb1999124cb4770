"""Prepares the choices of a request for the engine thread: prompt, limits, seeds, guides.

Long prompts and many choices take time, so worker threads do the work.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from luceasync.engine.copies import ComingIndex, PromptCopies
from luceasync.engine.guidance import (
    Guidance,
    NewGuide,
    is_guided,
    stop_ids_of,
    unguided,
)
from luceasync.engine.prompts import Language, PinSpans, Prompts, pins_of
from luceasync.engine.sampling.draw import choice_seed
from luceasync.engine.sampling.row import TokenCounts, check_logit_bias, has_penalties
from luceasync.grammar.guide import Guide
from luceasync.prefix_cache.tenants import Tenants
from luceasync.request import ChatPrompt, Request
from luceasync.text.answer.pieces import PieceMaker, PlainText
from luceasync.text.detokenizer import Detokenizer
from luceasync.text.prompt import RenderedPrompt
from luceasync.text.tokenizer import Tokenizer

# Most of these threads wait for their turn with the template. Threads of the event loop's default
# pool, which is as small as the machine, must not block on that.
CHAT_THREADS = 64
# Of a chat that is prepared on the event loop: handing it to a thread and back would take longer.
MAX_SHORT_CHARS = 2000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PreparedChoice:
    """One choice of a request, ready to run.

    `seed` is drawn already; `counts` is None unless a penalty needs them. `pins`: spans of the
    prompt's tokens that stay on the devices. `guide`: which tokens are allowed; None: any.
    `copies`: an index of the prompt, and of the answer as it grows, from which proposals are
    copied; None: no copies.
    """

    request: Request
    prompt: RenderedPrompt
    stream_id: int
    index: int
    max_tokens: int
    stop_ids: frozenset[int]
    seed: int
    counts: TokenCounts | None
    tokenizer: Tokenizer
    detokenizer: Detokenizer
    piece_maker: PieceMaker = field(default_factory=PlainText)
    pins: PinSpans = ()
    guide: Guide | None = None
    copies: ComingIndex | None = None


def prepare(
    language: Language,
    request: Request,
    prompt: RenderedPrompt,
    stream_id: int,
    new_guide: NewGuide = unguided,
    prompt_copies: PromptCopies | None = None,
) -> list[PreparedChoice]:
    """The request's choices, by index. Draws a seed unless the request has one. `new_guide` makes
    the guide of each, `prompt_copies` the index of each; None: no index. Raises
    RequestError for a bias outside the vocabulary, an empty stop string, and pins that do not fit.
    """
    sampling = request.sampling
    check_logit_bias(sampling, language.vocab_size)
    pins = pins_of(request, prompt, language.pin_limit)
    room = language.card.max_ctx_tokens - len(prompt.ids)
    end_ids = language.tokenizer.eos_ids | prompt.ends
    end_ids = frozenset() if request.ignore_eos else end_ids
    seed = random.getrandbits(63) if sampling.seed is None else sampling.seed
    stop_ids = end_ids.union(request.stop_token_ids)
    copies: Sequence[ComingIndex | None] = [None] * request.num_choices
    if prompt_copies is not None:
        copies = prompt_copies.coming(prompt, stop_ids, request.num_choices)
    return [
        PreparedChoice(
            request,
            prompt,
            stream_id,
            index,
            max_tokens=room if request.max_tokens is None else min(room, request.max_tokens),
            stop_ids=end_ids | stop_ids_of(request, language.tokenizer),
            seed=choice_seed(seed, index),
            counts=TokenCounts(prompt.ids) if has_penalties(sampling) else None,
            tokenizer=language.tokenizer,
            detokenizer=Detokenizer(
                language.tokenizer,
                request.stop,
                prompt.before,
                language.answers.shown,
                language.answers.words,
                request.least_indent,
            ),
            piece_maker=prompt.new_pieces(),
            pins=pins,
            guide=new_guide(),
            copies=copies[index],
        )
        for index in range(request.num_choices)
    ]


class ChoicePreparation:
    """Prepares the requests of one model."""

    def __init__(
        self, language: Language, tenants: Tenants, *, drafts_copies: bool = False
    ) -> None:
        """`drafts_copies`: index prompts, so that proposals can be copied from them."""
        self._language = language
        self._prompts = Prompts(language, tenants)
        self._copies = PromptCopies(language.tokenizer) if drafts_copies else None
        self._guidance = Guidance(language)
        self._chats = ThreadPoolExecutor(CHAT_THREADS, "prepare-chat")

    @property
    def num_unindexed(self) -> int:
        """Prompts that could not be indexed, so that nothing is copied from them."""
        return 0 if self._copies is None else self._copies.num_failed

    async def rendered(self, request: Request) -> RenderedPrompt:
        """Render the prompt. Raises RequestError."""
        return await self._in_thread(request, partial(self._prompts.render, request))

    async def choices(self, request: Request, stream_id: int) -> list[PreparedChoice]:
        """Prepare the request's choices, at least one. Raises RequestError."""
        at_once = partial(self._at_once, request, stream_id)
        prompt, choices = await self._in_thread(request, at_once)
        if choices is None:
            new_guide = await self._guidance.of(request, prompt)
            choices = await asyncio.to_thread(
                prepare, self._language, request, prompt, stream_id, new_guide, self._copies
            )
        return choices

    async def close(self) -> None:
        """Close the compiler of grammars and wait for it, and for an index in the making."""
        self._chats.shutdown(wait=False, cancel_futures=True)
        if self._copies is not None:
            await asyncio.to_thread(self._copies.close)
        await self._guidance.close()

    async def _in_thread(self, request: Request, call: Callable[[], T]) -> T:
        """Run `call` in a thread where it delays only requests that are rendered in the same
        way; at once if that is short."""
        match request.prompt:
            case ChatPrompt() as chat if self._is_short(request, chat):
                return call()
            case ChatPrompt():
                return await asyncio.get_running_loop().run_in_executor(self._chats, call)
            case _:
                return await asyncio.to_thread(call)

    def _is_short(self, request: Request, chat: ChatPrompt) -> bool:
        """Whether preparing the chat takes a fraction of a millisecond."""
        if not self._language.renders_here or chat.tools or chat.template_kwargs or chat.marks:
            return False
        said = [value for message in chat.messages for value in message.values()]
        is_text = all(isinstance(value, str) for value in said)
        return is_text and not is_guided(request) and sum(map(len, said)) <= MAX_SHORT_CHARS

    def _at_once(
        self, request: Request, stream_id: int
    ) -> tuple[RenderedPrompt, list[PreparedChoice] | None]:
        """Do everything in one call on one thread. Returns no choices if a grammar has to be
        compiled first; the caller awaits that on the event loop."""
        prompt = self._prompts.render(request)
        guided = is_guided(request)
        new_guide = self._guidance.known(request, prompt) if guided else unguided
        if new_guide is None:
            return prompt, None
        choices = prepare(self._language, request, prompt, stream_id, new_guide, self._copies)
        return prompt, choices
