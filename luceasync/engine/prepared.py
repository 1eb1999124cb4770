"""What a choice of a request needs to run, made before it waits for a lane.

Values only. Knows no lanes, no queue and nobody who listens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from luceasync.engine.sampling.row import TokenCounts
from luceasync.grammar.guide import Guide
from luceasync.keeping.conversations import Talk
from luceasync.keeping.tenants import NO_TENANT
from luceasync.request import Sampling
from luceasync.text.detokenizer import Detokenizer
from luceasync.text.pieces import PieceMaker, PlainText
from luceasync.text.tokenizer import Tokenizer


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
