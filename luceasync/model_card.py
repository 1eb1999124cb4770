"""The served model as it is told to people and clients. Knows nothing of how it is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ANY_NAME = "*"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What `/v1/models` tells about the served model. `created` is a Unix time in seconds.

    `aliases` are other names of it; ANY_NAME among them is every name. `reasons`: why lanes and
    context are as they are, a line for each size that the user left open. `special_tokens` by the
    names that tokenizer_config.json gives them; `chat_template`: the source of its template.
    `tool_format`: how it writes calls of tools, "": in no way that is known; `thinks`: reasoning is
    told apart from its answers.
    """

    name: str
    created: int
    max_ctx_tokens: int
    num_parameters: int
    family: str
    aliases: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str = ""
    tool_format: str = ""
    thinks: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Its own name and the others, without ANY_NAME."""
        return (self.name, *(alias for alias in self.aliases if alias != ANY_NAME))

    def serves(self, name: str) -> bool:
        """Whether somebody who asks for `name` means this model."""
        return ANY_NAME in self.aliases or name in self.names
