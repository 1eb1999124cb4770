"""Where what a prompt says of its tools ends, when a system message follows within the same turn.

Agents' helpers have the tools of their agent and another system message: they part there. Owns how
that place is found. Knows no cache.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any

from luceasync.errors import RequestError
from luceasync.text.control_tokens import BREAK
from luceasync.text.template import Template
from luceasync.text.tokenizer import Tokenizer

SYSTEM_ROLES = ("system", "developer")
OTHERS = ("0", "a")  # other system messages; with one of them no message begins as with the other
ASKED = {"role": "user", "content": "0"}  # without a user's turn some templates refuse


class ToolsBlock:
    """What prompts of one template say of tools. Any thread may call it."""

    def __init__(self, template: Template, tokenizer: Tokenizer) -> None:
        self._template = template
        self._num_bytes = _TokenLengths(tokenizer)

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
