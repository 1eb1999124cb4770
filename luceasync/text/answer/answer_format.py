"""How to parse a model's answers, detected from what its chat template renders.

Owns the conversations that a template is tried with. Knows no model by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from typing import Any

from luceasync.errors import RequestError
from luceasync.request import ArgumentsPiece, CallPiece, TextPiece
from luceasync.text.answer.argument_types import ToolSchemas
from luceasync.text.answer.call_formats import FORMATS, CallFormat
from luceasync.text.answer.pieces import (
    THINK,
    THINK_END,
    AnswerPieces,
    Before,
    PieceMaker,
    new_call_id,
)
from luceasync.text.template import Template
from luceasync.text.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
ARGUMENTS = {"a": "b"}
OTHER_ARGUMENTS = {"a": "other"}
IDS = ("callcall0", "functions.f:0")  # Mistral's have nine letters or digits; Kimi's name the tool
WORDS = "§§"  # the beginning of no call
USER = {"role": "user", "content": "x"}
ANSWERED = (USER, {"role": "assistant", "content": WORDS})


def _call(call_id: str, arguments: Mapping[str, str]) -> Mapping[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _called(content: str | None, *calls: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [USER, {"role": "assistant", "content": content, "tool_calls": list(calls)}]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes reasoning and tool calls.

    `reasons`: text between <think> and </think> at the beginning of an answer is reasoning.
    `opens`: an answer opens it itself unless the prompt has. `calls`: the format of tool calls;
    None: none, or unknown. `max_calls`: how many calls of one answer the template takes back; None:
    any number. `separates`: what is reasoning is told apart where the prompt opens it. `shown`:
    special tokens that calls and reasoning are written with, which must be seen to parse them.
    """

    reasons: bool = False
    calls: CallFormat | None = None
    opens: bool = False
    max_calls: int | None = None
    separates: bool = True
    shown: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        template: Template,
        tokenizer: Tokenizer,
        reasoning_format: str = AUTO,
        tool_format: str = AUTO,
    ) -> AnswerFormat:
        """The format that `template` shows by examples; formats other than auto override it."""
        one = _called("", _call(IDS[0], ARGUMENTS))
        result = {"role": "tool", "tool_call_id": IDS[0], "name": "f", "content": "y"}
        examples = [
            _rendered(template, [USER], None),
            _rendered(template, [*one, result], [TOOL]),
        ]
        can_reason = tokenizer.token_id(THINK) is not None or any(THINK in e for e in examples)
        calls, written, content = _shown_format(template, tokenizer)
        if tool_format != AUTO:
            calls = FORMATS.get(tool_format)
        separates = reasoning_format == AUTO
        reasons = can_reason and separates
        return cls(
            reasons,
            calls,
            opens=reasons and _can_disable_reasoning(template),
            max_calls=_most_calls(template, content) if calls else None,
            separates=separates,
            shown=_shown_tokens(tokenizer, reasons, calls, written),
        )

    def before(self, prompt: str) -> Before:
        """The reasoning before the answer to the rendered `prompt`."""
        end = prompt.rstrip()
        if self.separates and end.endswith(THINK):
            return "open"
        return "nothing" if not self.reasons or end.endswith(THINK_END) else "perhaps"

    def most_calls(self, wanted: int | None) -> int | None:
        """The most calls that an answer may have if a request wants at most `wanted`."""
        return min((n for n in (wanted, self.max_calls) if n is not None), default=None)

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
            is_reasoning=self.before(prompt) == "open",
            calls=self.calls if tools else None,
            schemas=ToolSchemas.of(tools or ()),
            max_calls=self.most_calls(max_calls),
            call_id=call_id,
        )


def _shown_tokens(
    tokenizer: Tokenizer, reasons: bool, calls: CallFormat | None, written: str
) -> frozenset[str]:
    """The special tokens of reasoning, if the model `reasons`, and of `calls`, one of which is
    `written`. Not those that end a text.
    """
    words = [THINK, THINK_END] if reasons else []
    if calls is not None:
        words += [*calls.openings, *calls.signs, calls.begin, calls.end, written]
    ends = {tokenizer.special_token(i) for i in tokenizer.eos_ids}
    return frozenset(
        t for t in tokenizer.special_texts if t not in ends and any(t in word for word in words)
    )


def _shown_format(
    template: Template, tokenizer: Tokenizer
) -> tuple[CallFormat | None, str, str | None]:
    """The format whose parser reads back the call that `template` renders, that call, and the
    content beside which it renders one; None if no format does.
    """
    words = _rendered(template, ANSWERED, [TOOL], add_generation_prompt=False)
    for content, call_id in product(("", None), IDS):  # some show calls only beside None
        said = _called(content, _call(call_id, ARGUMENTS))
        example = _rendered(template, said, [TOOL], add_generation_prompt=False)
        call = _without_common_ends(example, words)
        for call_format in FORMATS.values():
            if _reads(call_format, call, tokenizer):
                return call_format, call, content
    return None, "", ""


def _without_common_ends(text: str, other: str) -> str:
    """`text` without what both begin and end with; no tag is cut at its beginning."""
    num_begin = _num_common(text, other)
    if text.rfind("<", 0, num_begin) > text.rfind(">", 0, num_begin):
        num_begin = text.rfind("<", 0, num_begin)
    text, other = text[num_begin:], other[num_begin:]
    return text[: len(text) - _num_common(text[::-1], other[::-1])]


def _num_common(text: str, other: str) -> int:
    """The number of characters that both begin with."""
    pairs = zip(text, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _reads(call_format: CallFormat, text: str, tokenizer: Tokenizer) -> bool:
    """Whether the format's parser finds the example's call in `text`, and nothing else but an end
    of the turn.
    """
    if not all(sign in text for sign in call_format.signs):
        return False
    maker = AnswerPieces(calls=call_format, schemas=ToolSchemas.of([TOOL]))
    match maker.make(text, is_last=True):
        case (CallPiece(_, _, "f"), ArgumentsPiece(_, arguments)):
            rest = ""
        case (CallPiece(_, _, "f"), ArgumentsPiece(_, arguments), TextPiece(rest)):
            pass
        case _:
            return False
    for control in tokenizer.added_texts:
        rest = rest.replace(control, "")
    return not rest.strip() and json.loads(arguments) == ARGUMENTS


def _most_calls(template: Template, content: str | None) -> int | None:
    """1 if `template` refuses or drops the second of two calls beside `content`; else None."""
    both = _called(content, _call(IDS[0], ARGUMENTS), _call("callcall1", OTHER_ARGUMENTS))
    takes_one = bool(_rendered(template, _called(content, _call(IDS[0], ARGUMENTS)), [TOOL]))
    takes_two = OTHER_ARGUMENTS["a"] in _rendered(template, both, [TOOL])
    return 1 if takes_one and not takes_two else None


def _can_disable_reasoning(template: Template) -> bool:
    """Whether the prompt closes reasoning if it is disabled. If so, an answer opens it whenever the
    prompt does neither.
    """
    return THINK_END in _rendered(template, [USER], None, enable_thinking=False)


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
