"""From a request and its prompt to the choices that lanes run: limits, stops, seeds, counts.

Pure but for the seed that nobody has named. Knows no queue and no lanes.
"""

from __future__ import annotations

import random

from luceasync.engine.guidance import NewGuide, unguided
from luceasync.engine.pins import pins_of
from luceasync.engine.prepared import Prepared
from luceasync.engine.prompts import Language, Rendered
from luceasync.engine.sampling.filter_and_draw import choice_seed
from luceasync.engine.sampling.row import TokenCounts, check_logit_bias, has_penalties
from luceasync.keeping.chunks import opener_of
from luceasync.keeping.conversations import Name, Talk
from luceasync.request import Request
from luceasync.text.detokenizer import Detokenizer


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
