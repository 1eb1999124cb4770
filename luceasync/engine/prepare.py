"""From a request to the choices that the engine thread takes: rendered, counted, guided.

Owns who renders and who guides. It takes long with long prompts and many choices, so other threads
do it; the event loop waits for nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from luceasync.engine.guidance import Guidance, NewGuide, is_guided, unguided
from luceasync.engine.prompts import Language, Prompts, Rendered, pins_of
from luceasync.engine.sampling.draw import choice_seed
from luceasync.engine.sampling.row import TokenCounts, check_logit_bias, has_penalties
from luceasync.grammar.guide import Guide
from luceasync.prefix_cache.conversations import Name, Talk
from luceasync.prefix_cache.lease import opener_of
from luceasync.prefix_cache.tenants import NO_TENANT, Tenants
from luceasync.request import Request, Sampling
from luceasync.text.answer.pieces import PieceMaker, PlainText
from luceasync.text.detokenizer import Detokenizer
from luceasync.text.tokenizer import Tokenizer

# What a choice of a request needs to run, made before it waits for a lane. Values only. Knows
# no lanes, no queue and nobody who listens.


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a choice needs to run: tokens, limits, sampling and the way back to text.

    `seed` is already drawn; `counts` is None when no penalty needs them. `tenant` is the 32-byte
    key under which what is computed may be shared; `client` is who asks; `boundaries` are where
    turns of the prompt end; `keep_prompt`: the prompt is to be kept for itself; `answer_returns`:
    with which answers a later prompt may begin, after it; `tools_end`: where prompts part from it
    that have the same tools and another system message; `marks`: after how many tokens its client
    asks for a place to go on from; `talk`: of which of the client's conversations it is; `pins`:
    spans of the prompt's tokens that are to stay on the devices; `prompt_top_logprobs`, `priority`:
    see Request; `guide`: which tokens may come, None: any.
    """

    stream_id: int
    index: int
    prompt_ids: Sequence[int]
    max_tokens: int
    stop_ids: frozenset[int]
    sampling: Sampling
    seed: int
    counts: TokenCounts | None
    top_logprobs: int | None
    tokenizer: Tokenizer
    detokenizer: Detokenizer
    piece_maker: PieceMaker = field(default_factory=PlainText)
    tenant: bytes = field(default=NO_TENANT, repr=False)
    client: str = field(default="", repr=False)
    boundaries: tuple[int, ...] = ()
    keep_prompt: bool = False
    answer_returns: Callable[[Sequence[int]], bool] = lambda generated: True
    tools_end: int | None = None
    marks: tuple[int, ...] = ()
    talk: Talk | None = None
    pins: tuple[tuple[int, int], ...] = ()
    prompt_top_logprobs: int | None = None
    guide: Guide | None = None
    priority: int = 0


# From a request and its prompt to the choices that lanes run: limits, stops, seeds, counts.
# Pure but for the seed that nobody has named. Knows no queue and no lanes.


def prepare(
    language: Language,
    request: Request,
    prompt: Rendered,
    stream_id: int,
    new_guide: NewGuide = unguided,
) -> list[Prepared]:
    """The request's choices, in order of their index. Raises RequestError for a bias that names no
    token, for a stop string that is empty and for pins that do not fit. `new_guide`: what guides
    each of them.
    """
    sampling = request.sampling
    check_logit_bias(sampling, language.vocab_size)
    pins = pins_of(request, prompt, language.pin_room)
    room = language.card.max_ctx_tokens - len(prompt.ids)
    talk = _talk_of(request, prompt)
    seed = random.getrandbits(63) if sampling.seed is None else sampling.seed
    return [
        Prepared(
            stream_id=stream_id,
            index=index,
            prompt_ids=prompt.ids,
            max_tokens=room if request.max_tokens is None else min(room, request.max_tokens),
            stop_ids=frozenset() if request.ignore_eos else language.tokenizer.eos_ids,
            sampling=sampling,
            seed=choice_seed(seed, index),
            counts=TokenCounts(prompt.ids) if has_penalties(sampling) else None,
            top_logprobs=request.top_logprobs,
            tokenizer=language.tokenizer,
            detokenizer=Detokenizer(language.tokenizer, request.stop),
            piece_maker=prompt.new_pieces(),
            tenant=prompt.tenant.key,
            client=request.client,
            boundaries=prompt.boundaries,
            keep_prompt=request.keep_prefix,
            answer_returns=prompt.answer_returns,
            tools_end=prompt.tools_end,
            marks=prompt.marks,
            talk=talk,
            pins=pins,
            prompt_top_logprobs=request.prompt_top_logprobs,
            guide=new_guide(),
            priority=request.priority,
        )
        for index in range(request.num_choices)
    ]


def _talk_of(request: Request, prompt: Rendered) -> Talk | None:
    """The conversation that the client names; what opens the answer is no part of the next turn."""
    if not request.conversation:
        return None
    name = Name(prompt.tenant.key, request.client, request.conversation)
    num_tokens = len(prompt.ids)
    return Talk(name, opener_of(prompt.boundaries, num_tokens) or num_tokens)


class Preparing:
    """Of one model's requests."""

    def __init__(self, language: Language, tenants: Tenants) -> None:
        self._language = language
        self._prompts = Prompts(language, tenants)
        self._guidance = Guidance(language)

    async def rendered(self, request: Request) -> Rendered:
        """The prompt as token ids. Raises RequestError."""
        return await asyncio.to_thread(self._prompts.render, request)

    async def choices(self, request: Request, stream_id: int) -> tuple[Rendered, list[Prepared]]:
        """The prompt, and as many choices as are asked for. Raises RequestError."""
        prompt, choices = await asyncio.to_thread(self._at_once, request, stream_id)
        if choices is None:
            new_guide = await self._guidance.of(request, prompt)
            choices = await asyncio.to_thread(
                prepare, self._language, request, prompt, stream_id, new_guide
            )
        return prompt, choices

    async def close(self) -> None:
        """Wait for whoever compiles what guides."""
        await self._guidance.close()

    def _at_once(self, request: Request, stream_id: int) -> tuple[Rendered, list[Prepared] | None]:
        """All of it in one go of one thread; no choices where something has to be compiled first,
        which is waited for elsewhere.
        """
        prompt = self._prompts.render(request)
        guided = is_guided(request)
        new_guide = self._guidance.known(request, prompt) if guided else unguided
        if new_guide is None:
            return prompt, None
        return prompt, prepare(self._language, request, prompt, stream_id, new_guide)
