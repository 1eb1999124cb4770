"""How every prompt begins that goes on from the same messages: what is worth keeping of them.

Owns where that beginning ends. Knows no cache; how text becomes ids is told to it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from luceasync.text.template import Template, Turns

Tools = Sequence[Mapping[str, Any]] | None

# What a user may say next; they have not even their first character in common.
REPLIES = ("0", "a")


def shared_ids(
    template: Template,
    turns: Turns,
    encode: Callable[[str], array[int]],
    messages: Sequence[Mapping[str, Any]],
    tools: Tools = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> array[int]:
    """The ids with which all prompts begin that continue `messages` with a user's turn, up to where
    that turn begins.

    Templates refuse a lone system message, put it into the user's turn, or leave something out of
    older answers, all by what follows: so two prompts that differ in that turn alone are compared.
    Raises RequestError as Template.render and `encode` do.
    """

    variables = {**(template_kwargs or {}), "add_generation_prompt": False}

    def ids_of(reply: str, *said: Mapping[str, Any], tools: Tools = None) -> array[int]:
        asked = {"role": "user", "content": reply}
        return encode(template.render([*said, asked], tools, **variables))

    one, other = (ids_of(reply, *messages, tools=tools) for reply in REPLIES)
    parted = (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    shared = one[: next(parted, min(len(one), len(other)))]
    ends = turns.ends(shared)
    if not ends:
        return shared
    opening, alone = shared[ends[-1] :], ids_of(REPLIES[0])
    begin = max([0, *turns.ends(alone)])
    is_empty = alone[begin : begin + len(opening)] == opening
    return shared[: ends[-1]] if is_empty else shared
