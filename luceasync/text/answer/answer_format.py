"""How to parse a model's answers, detected from what its chat template renders.

Owns the conversations that a template is tried with. Contains no model names.
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
from luceasync.text.answer.call_spacing import RenderedCalls, as_rendered
from luceasync.text.answer.channels import (
    ANALYSIS,
    CHANNEL,
    MESSAGE,
    START,
    ChannelPieces,
    MessageHeader,
)
from luceasync.text.answer.pieces import (
    THINK,
    AnswerPieces,
    Before,
    PieceMaker,
    ReasoningWords,
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
OTHER_ARGUMENTS = {"a": "qxzj"}  # contains a word that occurs in no prompt
# Some templates repeat calls in Python syntax, but with unquoted strings.
SHOWN_ARGUMENTS: tuple[Mapping[str, Any], ...] = (ARGUMENTS, {"a": 1})
IDS = ("callcall0", "functions.f:0")  # Mistral's: nine letters or digits; Kimi's: with the tool
# Of two calls. Texts may be quoted in the notation of a format; numbers are not.
PAIRS: tuple[tuple[Mapping[str, Any], ...], ...] = (
    (ARGUMENTS, OTHER_ARGUMENTS),
    ({"a": 1}, {"a": 2}),
)
ID_PAIRS = ((IDS[0], "callcall1"), (IDS[1], "functions.f:1"))
CONTENTS = ("", None, " ")  # some templates show calls only beside None, others accept any content
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # of a message
WORDS = "§§"  # cannot be the beginning of a call
USER = {"role": "user", "content": "x"}
ANSWERED = (USER, {"role": "assistant", "content": WORDS})
# A row applies if an answer, or a template that shows one, contains its words. Harmony's come
# first: if a template contains words of several rows, the earlier row applies.
REASONING_WORDS = (
    ReasoningWords(
        begin=f"{CHANNEL}{ANALYSIS}{MESSAGE}",
        end="<|end|>",
        after=f"{START}assistant",
        lead=f"{CHANNEL}final{MESSAGE}",
        has_channels=True,
    ),
    ReasoningWords(answer="<answer>", answer_end="</answer>"),  # Hunyuan's
    ReasoningWords(answer="<response>", answer_end="</response>"),  # Granite 3.3's, Ernie's
    THINK,
    ReasoningWords("[THINK]", "[/THINK]"),  # Magistral's
    ReasoningWords("<seed:think>", "</seed:think>"),
    ReasoningWords("<mm:think>", "</mm:think>"),  # MiniMax M3's
    ReasoningWords("<|channel>thought\n", "<channel|>"),  # Gemma 4's
    ReasoningWords("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere's
    ReasoningWords("<reasoning>", "</reasoning>"),  # Reka's
    ReasoningWords("<thought>", "</thought>"),  # EXAONE Deep's
    ReasoningWords("<thinking>", "</thinking>"),
    ReasoningWords("◁think▷", "◁/think▷"),  # Kimi-VL's
    ReasoningWords("Here is my thought process:", "Here is my response:"),  # Granite 3.2's
    ReasoningWords(
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        answer_end="[END FINAL RESPONSE]",
    ),  # Apriel's
)


def _call(call_id: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _called(content: str | None, *calls: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [USER, {"role": "assistant", "content": content, "tool_calls": list(calls)}]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes reasoning and tool calls.

    `reasons`: text between `words.begin` and `words.end` at the beginning of an answer is
    reasoning. `opens`: the answer opens its reasoning itself, unless the prompt has. `calls` is the
    format of tool calls; None: none, or unknown. `max_calls` is the number of calls of one answer
    that the template can render; None: unlimited. `separates`: if the prompt opens the reasoning,
    it is separated from the text. `shown` are special tokens used in calls and reasoning, which
    must be visible to parse them.
    """

    reasons: bool = False
    calls: CallFormat | None = None
    opens: bool = False
    max_calls: int | None = None
    separates: bool = True
    shown: frozenset[str] = frozenset()
    words: ReasoningWords = THINK

    @classmethod
    def of(
        cls,
        template: Template,
        tokenizer: Tokenizer,
        reasoning_format: str = AUTO,
        tool_format: str = AUTO,
    ) -> AnswerFormat:
        """Detect the format from examples rendered by `template`; formats other than auto override
        it.
        """
        words = _reasoning_words(template, tokenizer)
        calls, written, content = _shown_format(template, tokenizer, words or THINK)
        if tool_format != AUTO:
            calls = FORMATS.get(tool_format)
        if calls is not None and calls.in_channels:
            words = next(row for row in REASONING_WORDS if row.has_channels)
        separates = reasoning_format == AUTO
        reasons = words is not None and separates
        words = words or THINK
        max_calls = _most_calls(template, content) if calls else None
        if calls is not None and not calls.in_channels:
            num_calls = 1 if max_calls == 1 else 2
            calls = _as_rendered(calls, template, content, num_calls, reasons=reasons)
        return cls(
            reasons,
            calls,
            opens=reasons and _opens_reasoning(template, words),
            max_calls=max_calls,
            separates=separates,
            shown=_shown_tokens(
                tokenizer, words if reasons or words.has_channels else None, calls, written
            ),
            words=words,
        )

    def before(self, prompt: str) -> Before:
        """The reasoning that precedes the answer to the rendered `prompt`."""
        end, words = prompt.rstrip(), self.words
        if self.separates and end.endswith(words.begin.rstrip()):
            return "open"
        if words.has_channels and self._opened(prompt) is not None:
            return "nothing"
        return "nothing" if not self.reasons or end.endswith(words.end) else "perhaps"

    @staticmethod
    def _opened(prompt: str) -> MessageHeader | None:
        """The header of the message that the prompt has begun; None if the answer must
        write one.
        """
        last = prompt[prompt.rfind(START) :]
        header, found, _ = last.partition(MESSAGE)
        return MessageHeader.of(header + found) if found else None

    def most_calls(self, wanted: int | None) -> int | None:
        """The maximum number of calls in an answer if the request allows at most `wanted`."""
        return min((n for n in (wanted, self.max_calls) if n is not None), default=None)

    def maker(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]] | None,
        max_calls: int | None = None,
        call_id: Callable[[], str] = new_call_id,
        *,
        reads_json: bool = True,
    ) -> PieceMaker:
        """A factory of parsers for answers to the rendered `prompt`, which offers `tools`.
        `reads_json`: see AnswerPieces.
        """
        if self.words.has_channels:
            return ChannelPieces(
                separates=self.separates,
                opened=self._opened(prompt),
                schemas=ToolSchemas.of((tools or ()) if self.calls else ()),
                max_calls=self.most_calls(max_calls),
                call_id=call_id,
            )
        return AnswerPieces(
            words=self.words,
            reasons=self.reasons,
            is_reasoning=self.before(prompt) == "open",
            calls=self.calls if tools else None,
            schemas=ToolSchemas.of(tools or ()),
            max_calls=self.most_calls(max_calls),
            reads_json=reads_json,
            call_id=call_id,
        )


def _shown_tokens(
    tokenizer: Tokenizer,
    reasoning: ReasoningWords | None,
    calls: CallFormat | None,
    written: str,
) -> frozenset[str]:
    """The special tokens of `reasoning`, and those of `calls` that occur in `written`, without
    those that end a text.
    """
    words = []
    if reasoning is not None:
        words += [reasoning.begin, reasoning.end, reasoning.after, reasoning.lead]
        words += [reasoning.answer, reasoning.answer_end]
    if calls is not None:
        words += [*calls.openings, *calls.signs, calls.begin, calls.end, written]
    ends = {tokenizer.special_token(i) for i in tokenizer.eos_ids}
    return frozenset(
        t for t in tokenizer.special_texts if t not in ends and any(t in word for word in words)
    )


def _shown_format(
    template: Template, tokenizer: Tokenizer, reasoning: ReasoningWords
) -> tuple[CallFormat | None, str, str | None]:
    """The format whose parser reads back the call that `template` renders, the rendered call, and
    the content beside which it is rendered; None if there is no such format.
    """
    others = _rendered(template, ANSWERED, [TOOL], add_generation_prompt=False)
    opened = _rendered(template, [USER], [TOOL])
    for arguments, content, call_id in product(SHOWN_ARGUMENTS, CONTENTS, IDS):
        said = _called(content, _call(call_id, arguments))
        example = _rendered(template, said, [TOOL], add_generation_prompt=False)
        for call in _calls_in(example, others, opened, reasoning):
            message = f"{CHANNEL}{call}"  # the words before it never differ
            for call_format in FORMATS.values():
                if call_format.told not in example:
                    continue
                if _reads(call_format, call, tokenizer, arguments):
                    return call_format, call, content
                if call_format.in_channels and _reads(call_format, message, tokenizer, arguments):
                    return call_format, message, content
    return None, "", ""


def _calls_in(example: str, other: str, opened: str, reasoning: ReasoningWords) -> list[str]:
    """Candidates for the call in `example`, without the empty reasoning: the part that differs from
    `other`, an answer without a call, and the part that follows the prompt that has `opened` an
    answer.
    """
    found = [_without_common_ends(example, other)]
    if opened and example.startswith(opened):
        found.append(example.removeprefix(opened))
    for word in (reasoning.begin, reasoning.end):
        found = [each.lstrip().removeprefix(word) for each in found]
    return found


def _without_common_ends(text: str, other: str) -> str:
    """`text` without the prefix and suffix that it shares with `other`, but with whole tags."""
    num_begin = _num_common(text, other)
    if text.rfind("<", 0, num_begin) > text.rfind(">", 0, num_begin):
        num_begin = text.rfind("<", 0, num_begin)
    text, other = text[num_begin:], other[num_begin:]
    end = len(text) - _num_common(text[::-1], other[::-1])
    if text.rfind("<", 0, end) > text.rfind(">", 0, end):
        end = max(end, text.find(">", end) + 1)
    return text[:end]


def _num_common(text: str, other: str) -> int:
    """The length of the common prefix."""
    pairs = zip(text, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _reads(
    call_format: CallFormat, text: str, tokenizer: Tokenizer, expected: Mapping[str, Any]
) -> bool:
    """Whether the format's parser finds the example's call in `text`, with the `expected` arguments
    and nothing else but an end of turn.
    """
    if not all(sign in text for sign in call_format.signs):
        return False
    maker = _example_maker(call_format)
    match maker.make(text, is_last=True):
        case (CallPiece(_, _, "f"), ArgumentsPiece(_, arguments)):
            rest = ""
        case (CallPiece(_, _, "f"), ArgumentsPiece(_, arguments), TextPiece(rest)):
            pass
        case _:
            return False
    for control in tokenizer.added_texts:
        rest = rest.replace(control, "")
    return not rest.strip() and json.loads(arguments) == expected


def _example_maker(call_format: CallFormat) -> PieceMaker:
    if call_format.in_channels:
        return ChannelPieces(schemas=ToolSchemas.of([TOOL]))
    return AnswerPieces(calls=call_format, schemas=ToolSchemas.of([TOOL]))


def _most_calls(template: Template, content: str | None) -> int | None:
    """1 if `template` refuses or drops the second of two calls beside `content`; None otherwise."""
    both = _called(content, _call(IDS[0], ARGUMENTS), _call("callcall1", OTHER_ARGUMENTS))
    one = _called(content, _call(IDS[0], ARGUMENTS))
    # Without the opening of a next answer, since some templates then drop calls without a result.
    takes_one = bool(_rendered(template, one, [TOOL], add_generation_prompt=False))
    takes_two = OTHER_ARGUMENTS["a"] in _rendered(
        template, both, [TOOL], add_generation_prompt=False
    )
    return 1 if takes_one and not takes_two else None


def _as_rendered(
    calls: CallFormat, template: Template, content: str | None, num_calls: int, *, reasons: bool
) -> CallFormat:
    """`calls`, spaced as `template` spaces them beside `content`; unchanged if that cannot be told.
    `reasons`: reasoning may precede them.
    """
    opened = _rendered(template, [USER], [TOOL])
    for pair, ids in product(PAIRS, ID_PAIRS):
        arguments = pair[:num_calls]
        said = _called(content, *map(_call, ids, arguments))
        text = _rendered(template, said, [TOOL], add_generation_prompt=False)
        begin = len(opened) if text.startswith(opened) and not reasons else None
        if learned := as_rendered(calls, RenderedCalls(text, "f", arguments, begin)):
            return learned
    return calls


def _reasoning_words(template: Template, tokenizer: Tokenizer) -> ReasoningWords | None:
    """The words around reasoning: the first row that `template` shows in an answer, in how it opens
    one, or in its instructions to the model; otherwise a row that the tokenizer has a token for.
    None: the model does not reason.
    """
    said = {"role": "assistant", "content": WORDS}
    call = _called("", _call(IDS[0], ARGUMENTS))
    result = {"role": "tool", "tool_call_id": IDS[0], "name": "f", "content": "y"}
    shown = [
        _rendered(template, [USER], None),
        _rendered(template, [USER], None, enable_thinking=True, thinking=True),
        _rendered(template, [*call, result], [TOOL]),
        *(_rendered(template, [USER, {**said, field: "y"}], None) for field in REASONING_FIELDS),
        _rendered(template, [USER, {**said, "content": [{"type": "thinking", "thinking": "y"}]}]),
    ]
    text = "\n".join(shown)
    rows = [row for row in REASONING_WORDS if row.begin in text and row.answer in text]
    known = (row for row in REASONING_WORDS if not row.answer and not row.has_channels)
    rows += [row for row in known if tokenizer.token_id(row.begin) is not None]
    return rows[0] if rows else None


def _opens_reasoning(template: Template, words: ReasoningWords) -> bool:
    """Whether an answer opens reasoning whenever the prompt neither opens nor closes it. True if
    the prompt closes it when it is disabled, if the prompt tells the model to reason, and for
    channels.
    """
    if words.has_channels:
        return True
    is_told = words.begin in _rendered(template, [USER])
    return is_told or words.end in _rendered(template, [USER], enable_thinking=False)


def _rendered(
    template: Template,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> str:
    """The rendered prompt; "" if the template refuses it."""
    try:
        return template.render(messages, tools, **kwargs)
    except RequestError:
        return ""
