"""Where a prompt parts from what was run before, and whether that place is worth a state. Pure.

Only models that cannot go on from within a node need it: others find what two prompts share.
"""

from __future__ import annotations

from collections.abc import Iterable

from luceasync.keeping.memory_nodes import NodeSize
from luceasync.kv.pages import CHUNK_TOKENS

LEAST_TOKENS = 256  # that a state saves who parts there; fewer are soon run again
MAX_STATE_BYTES = 8  # for each byte of the rows that are not run again


def least_tokens(token: NodeSize) -> int:
    """How many tokens a state must save to be worth its bytes; `token`: the sizes of one and of the
    state after it. Two prompts have shown that others will part there, so that it may be larger
    than what it saves.
    """
    worth_bytes = MAX_STATE_BYTES * token.span_bytes
    return max(LEAST_TOKENS, -(-token.end_bytes // worth_bytes))


def fork_of(
    num_shared: int, num_tokens: int, known_end: int, turns: Iterable[int], min_tokens: int
) -> int | None:
    """Where the prefill of a prompt of `num_tokens` tokens is to leave a state, because another
    one that was run shares the first `num_shared` with it; None where nothing parts, or where a
    state is near: at `known_end`, from where on the prompt is kept, or at one of the `turns` that
    its prefill keeps anyway.

    The place is a multiple of 64 tokens: who parts a few tokens earlier, as prompts do that end
    with dates and names, most often finds it too.
    """
    if num_shared >= num_tokens:
        return None
    fork = num_shared // CHUNK_TOKENS * CHUNK_TOKENS
    before = max([known_end, *(turn for turn in turns if turn <= fork)])
    return fork if fork - before >= min_tokens else None
