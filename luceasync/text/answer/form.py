"""How a model's answers to a chat are read: what its template and its vocabulary say of them.

Owns how that is found out. Knows no model by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from luceasync.errors import RequestError
from luceasync.text.answer.argument_types import ToolSchemas
from luceasync.text.answer.formats import FORMATS, CallFormat, format_of
from luceasync.text.answer.pieces import THINK, THINK_END, AnswerPieces, PieceMaker, new_call_id
from luceasync.text.template import Template
from luceasync.text.tokenizer import Tokenizer

# What an answer says before it answers: nothing, reasoning that the prompt has opened, or perhaps
# some that it opens itself.
Before = Literal["nothing", "open", "perhaps"]

AUTO, NONE = "auto", "none"
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
CALL = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
PROBE = (
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0", "name": "f", "content": "y"},
)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """`reasons`: what stands between <think> and </think> at an answer's beginning is reasoning.
    `opens`: an answer opens it itself, where the prompt has not. `calls`: how calls of tools are
    written; None: not at all, or nobody knows.
    """

    reasons: bool = False
    calls: CallFormat | None = None
    opens: bool = False

    @classmethod
    def of(
        cls,
        template: Template,
        tokenizer: Tokenizer,
        reasoning_format: str = AUTO,
        tool_format: str = AUTO,
    ) -> AnswerForm:
        """What `template` shows by an example; the formats are its own where they are not auto."""
        shown = _shown(template)
        knows = tokenizer.token_id(THINK) is not None or THINK in shown
        calls = format_of(shown) if tool_format == AUTO else FORMATS.get(tool_format)
        reasons = knows and reasoning_format == AUTO
        return cls(reasons, calls, reasons and _can_be_told_not_to_think(template))

    def before(self, prompt: str) -> Before:
        """What comes before the answer to the rendered `prompt`."""
        end = prompt.rstrip()
        if not self.reasons or end.endswith(THINK_END):
            return "nothing"
        return "open" if end.endswith(THINK) else "perhaps"

    def maker(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]] | None,
        max_calls: int | None = None,
        call_id: Callable[[], str] = new_call_id,
    ) -> PieceMaker:
        """What reads one answer to the rendered `prompt`, in which `tools` were named."""
        return AnswerPieces(
            reasons=self.reasons,
            is_reasoning=self.reasons and prompt.rstrip().endswith(THINK),
            calls=self.calls if tools else None,
            schemas=ToolSchemas.of(tools or ()),
            max_calls=max_calls,
            call_id=call_id,
        )


def _shown(template: Template) -> str:
    """A chat with a tool and a call of it, as the template writes it; "" if it refuses that."""
    return _rendered(template, PROBE, [TOOL])


def _can_be_told_not_to_think(template: Template) -> bool:
    """Whether a prompt shows reasoning that is over where none is wanted: elsewhere there is some,
    and an answer opens it.
    """
    return THINK_END in _rendered(template, PROBE[:1], None, enable_thinking=False)


def _rendered(
    template: Template,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    **kwargs: Any,
) -> str:
    try:
        return template.render(messages, tools, **kwargs)
    except RequestError:
        return ""
