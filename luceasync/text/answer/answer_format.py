"""How to parse a model's answers, detected from its chat template and vocabulary.

Knows no model by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from luceasync.errors import RequestError
from luceasync.text.answer.argument_types import ToolSchemas
from luceasync.text.answer.call_formats import FORMATS, CallFormat, format_of
from luceasync.text.answer.pieces import THINK, THINK_END, AnswerPieces, PieceMaker, new_call_id
from luceasync.text.template import Template
from luceasync.text.tokenizer import Tokenizer

# Reasoning before the text of an answer: none, opened by the prompt, or perhaps opened by the
# answer itself.
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
EXAMPLE = (
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0", "name": "f", "content": "y"},
)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes reasoning and tool calls.

    `reasons`: text between <think> and </think> at the beginning of an answer is reasoning.
    `opens`: an answer opens it itself unless the prompt has. `calls`: the format of tool calls;
    None: none, or unknown.
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
    ) -> AnswerFormat:
        """The format that `template` shows by an example; formats other than auto override it."""
        example = _rendered(template, EXAMPLE, [TOOL])
        can_reason = tokenizer.token_id(THINK) is not None or THINK in example
        calls = format_of(example) if tool_format == AUTO else FORMATS.get(tool_format)
        reasons = can_reason and reasoning_format == AUTO
        return cls(reasons, calls, reasons and _can_disable_reasoning(template))

    def before(self, prompt: str) -> Before:
        """The reasoning before the answer to the rendered `prompt`."""
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
        """A parser of one answer to the rendered `prompt`, which offers `tools`."""
        return AnswerPieces(
            reasons=self.reasons,
            is_reasoning=self.reasons and prompt.rstrip().endswith(THINK),
            calls=self.calls if tools else None,
            schemas=ToolSchemas.of(tools or ()),
            max_calls=max_calls,
            call_id=call_id,
        )


def _can_disable_reasoning(template: Template) -> bool:
    """Whether the prompt closes reasoning if it is disabled. If so, an answer opens it whenever the
    prompt does neither.
    """
    return THINK_END in _rendered(template, EXAMPLE[:1], None, enable_thinking=False)


def _rendered(
    template: Template,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    **kwargs: Any,
) -> str:
    """The rendered prompt; "" if the template refuses it."""
    try:
        return template.render(messages, tools, **kwargs)
    except RequestError:
        return ""
