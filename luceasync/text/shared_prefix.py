"""How many of a prompt's tokens it shares with another text, of which the tokens are not known.

Owns the way from characters to tokens. Knows no template.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any

from luceasync.errors import RequestError
from luceasync.text.control_tokens import BREAK
from luceasync.text.template import Template, Turns
from luceasync.text.tokenizer import Tokenizer


class Parting:
    """Of one tokenizer's tokens. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._num_bytes = _TokenLengths(tokenizer)

    def num_tokens(self, text: str, ids: Sequence[int], others: Iterable[str]) -> int:
        """How many of the first `ids`, which spell `text`, all `others` begin with too."""
        shared = text[: min(_num_shared(text, other) for other in others)]
        num_bytes = len(shared.replace(BREAK, "").encode("utf-8", "surrogatepass"))
        ends = accumulate(map(self._num_bytes.__getitem__, ids))
        return sum(1 for _ in takewhile(num_bytes.__ge__, ends))


class _TokenLengths(dict[int, int]):
    """How many bytes each token has, once it was asked for: to look that up takes a while."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> int:
        num_bytes = self[token_id] = len(self._tokenizer.token_bytes(token_id))
        return num_bytes


def _num_shared(text: str, other: str) -> int:
    """How many characters both begin with."""
    least = min(len(text), len(other))
    return bisect_left(range(least), True, key=lambda i: text[: i + 1] != other[: i + 1])


# After how many tokens of a prompt the places lie that a client marks within its messages. Owns
# how they are found: the prompt is rendered with other words from there on. Knows no cache.


MAX_MARKS = 4  # of a prompt, the last ones: each is two renderings
OTHERS = ("0", "a")  # other words; with one of them what is marked does not go on as it does

Message = Mapping[str, Any]


def marked_tokens(
    parting: Parting,
    text: str,
    ids: Sequence[int],
    messages: Sequence[Message],
    marks: Sequence[tuple[int, int]],
    render: Callable[[Sequence[Message]], str],
) -> tuple[int, ...]:
    """How many of the first `ids` come before each place, where `messages` are what `render` makes
    `text` of, and `ids` spell that. A place at the end of a message is none: turns are kept anyway.
    """
    found = []
    for message, num_chars in marks[-MAX_MARKS:]:
        if 0 < num_chars < len(str(messages[message].get("content") or "")):
            try:
                others = [render(said) for said in _others(messages, message, num_chars)]
            except RequestError:  # nothing is known then
                continue
            found.append(parting.num_tokens(text, ids, others))
    return tuple(sorted({place for place in found if place}))


def _others(
    messages: Sequence[Message], message: int, num_chars: int
) -> Iterator[Sequence[Message]]:
    """The messages with other words in one of them, after so many characters."""
    marked = messages[message]
    for other in OTHERS:
        said = {**marked, "content": marked["content"][:num_chars] + other}
        yield [*messages[:message], said, *messages[message + 1 :]]


# How every prompt begins that goes on from the same messages: what is worth keeping of them.
# Owns where that beginning ends. Knows no cache; how text becomes ids is told to it.


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


# Where what a prompt says of its tools ends, when a system message follows within the same
# turn. Agents' helpers have the tools of their agent and another system message: they part
# there. Owns how that place is found. Knows no cache.


SYSTEM_ROLES = ("system", "developer")
ASKED = {"role": "user", "content": "0"}  # without a user's turn some templates refuse


class ToolsBlock:
    """What prompts of one template say of tools. Any thread may call it."""

    def __init__(self, template: Template, parting: Parting) -> None:
        self._template = template
        self._parting = parting

    def end(
        self,
        text: str,
        ids: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> int | None:
        """How many of the first `ids` prompts share that differ in their system message alone.
        `text`, which `ids` spell, is what the template makes of these `messages` and `tools`. None
        where there is no such message, or no tool; near 0 where the template puts tools after it.
        """
        if not tools or not messages or messages[0]["role"] not in SYSTEM_ROLES:
            return None
        system, variables = messages[0], template_kwargs or {}
        try:
            others = [
                self._template.render([{**system, "content": other}, ASKED], tools, **variables)
                for other in OTHERS
            ]
        except RequestError:  # nothing is known then
            return None
        return self._parting.num_tokens(text, ids, others)
