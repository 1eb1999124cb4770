"""Where what a prompt says of its tools ends, when a system message follows within the same turn.

Agents' helpers have the tools of their agent and another system message: they part there. Owns how
that place is found. Knows no cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from luceasync.errors import RequestError
from luceasync.text.parting import Parting
from luceasync.text.template import Template

SYSTEM_ROLES = ("system", "developer")
OTHERS = ("0", "a")  # other system messages; with one of them no message begins as with the other
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
