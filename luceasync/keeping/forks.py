"""Where a prompt parts from others within a turn, and whether a node is to end there. Pure.

Models that can go on from within a node find what two prompts share anyway; it is kept once then.
"""

from __future__ import annotations

from collections.abc import Iterable

from luceasync.keeping.memory_nodes import NodeSize
from luceasync.kv.pages import CHUNK_TOKENS

LEAST_TOKENS = CHUNK_TOKENS  # that a state saves who parts there; fewer are soon run again
MAX_STATE_BYTES = 8  # for each byte of the rows that are not run again


def least_tokens(token: NodeSize) -> int:
    """How many tokens a state must save to be worth its bytes; `token`: the sizes of one and of the
    state after it. Others will part there, so that it may be larger than what it saves once.
    """
    worth_bytes = MAX_STATE_BYTES * token.span_bytes
    return max(LEAST_TOKENS, -(-token.end_bytes // worth_bytes))


def fork_of(
    num_shared: int, num_tokens: int, known_end: int, turns: Iterable[int], min_tokens: int
) -> int | None:
    """Where the prefill of a prompt of `num_tokens` tokens is to end a node, because another one
    that was run shares the first `num_shared` with it; None where nothing parts, or where an end
    is near: at `known_end`, from where on the prompt is kept, or at one of the `turns` that its
    prefill keeps anyway.

    The place is a multiple of 64 tokens: who parts a few tokens earlier, as prompts do that end
    with dates and names, most often finds it too.
    """
    if num_shared >= num_tokens:
        return None
    fork = num_shared // CHUNK_TOKENS * CHUNK_TOKENS
    before = max([known_end, *(turn for turn in turns if turn <= num_shared)])
    return fork if fork - before >= min_tokens else None


def fork_behind_tools(tools_end: int | None, num_tokens: int, min_tokens: int) -> int | None:
    """Where others part from a prompt of `num_tokens` tokens that have its tools, which end at
    `tools_end`, and another system message; None where there is no such place, or it saves little.
    It follows from the prompt alone: the first one that has these tools leaves the state.
    """
    fork = (tools_end or 0) // CHUNK_TOKENS * CHUNK_TOKENS
    return fork if min_tokens <= fork < num_tokens else None
