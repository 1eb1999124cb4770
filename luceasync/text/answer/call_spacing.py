"""How a chat template spaces tool calls, learned from calls that it has rendered.

Clients send calls back, and the template renders them. The state computed for an answer is found
again only if the model has written the same text, down to the whitespace. Owns in what a template
may differ from the table of formats. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from luceasync.request import ArgumentsPiece, CallPiece
from luceasync.text.answer.argument_types import ToolSchemas
from luceasync.text.answer.call_formats import CallFormat
from luceasync.text.answer.call_grammar import (
    CallGrammar,
    ToolFunction,
    WriteCall,
    json_object,
    keywords,
    tagged,
)
from luceasync.text.answer.pieces import AnswerPieces

# The parts of an expression for one call: a string, an expression in slashes, a schema, brackets.
_PART = re.compile(r'"(?:[^"\\]|\\.)*"|/(?:[^/\\]|\\.)*/|@\w+|[()]|\S')
_SEPARATORS = ("", ",", ";")  # that every parser of several calls accepts
# By format: other spellings of a call, which some templates use.
_SPELLINGS: Mapping[str, Sequence[WriteCall]] = {
    "qwen-json": [json_object("<tool_call>", "name", "arguments", "</tool_call>")],
    "mistral-json": [json_object("", "name", "arguments", "", last="id")],
    "lfm2": [keywords("%s(", "=", ")", apostrophes=True)],
    "qwen-xml": [
        tagged(
            "<tool_call>\n<function=%s>\n",
            ("<parameter=%s>", "\n</parameter>", "\n"),
            "</function>\n</tool_call>",
        )
    ],
    "glm-xml": [
        tagged(
            "<tool_call>%s",
            ("<arg_key>%s</arg_key><arg_value>", "</arg_value>", ""),
            "</tool_call>",
        )
    ],
}


@dataclass(frozen=True, slots=True)
class RenderedCalls:
    """Calls of the function `name`, each with one of `arguments`, in the text of a prompt. The
    answer that consists of them begins at `begin`; None: unknown.
    """

    text: str
    name: str
    arguments: Sequence[Mapping[str, Any]]
    begin: int | None = None


def as_rendered(call_format: CallFormat, calls: RenderedCalls) -> CallFormat | None:
    """`call_format`, with the spelling, the separator and the surroundings of calls as in `calls`.
    None if they differ in more than whitespace, punctuation between calls, brackets around a list
    of them, and the repetition of their surroundings.
    """
    spellings = (call_format.write, *_SPELLINGS.get(call_format.name, ()))
    for write, around in product(spellings, _surroundings(call_format)):
        if found := _found(around, write, calls):
            if len(calls.arguments) < 2:
                return replace(call_format, write=write, lead=_lead(calls, found))
            learned = replace(
                call_format,
                write=write,
                lead=_lead(calls, found),
                begin=found["begin"],
                between=found["between"],
                end=found["end"],
            )
            if _may_separate(call_format, learned.between) and _reads(learned, calls, found[0]):
                return learned
    return None


def _surroundings(call_format: CallFormat) -> Iterator[tuple[str, str]]:
    """The words before and after all calls, also without the brackets of a list."""
    begin, end = call_format.begin, call_format.end
    yield begin, end
    if begin.endswith("[") and end.startswith("]") and begin != "[":
        yield begin.removesuffix("["), end.removeprefix("]")


def _found(around: tuple[str, str], write: WriteCall, calls: RenderedCalls) -> re.Match[str] | None:
    """The calls in their text, with groups begin, between and end."""
    each = [_call_regex(write, calls.name, arguments) for arguments in calls.arguments]
    between = "(?P<between>.*?)".join(each)
    begin, end = map(_spaced, around)
    before = rf"{begin}\s*" if begin else ""
    after = rf"\s*{end}" if end else ""
    return re.search(f"(?P<begin>{before}){between}(?P<end>{after})", calls.text, re.DOTALL)


def _spaced(written: str) -> str:
    """An expression for `written` with any whitespace within it."""
    return r"\s*".join(re.escape(word) for word in re.findall(r"\w+|[^\w\s]", written))


def _call_regex(write: WriteCall, name: str, arguments: Mapping[str, Any]) -> str:
    """An expression for the call with these arguments, as `write` spells it."""
    properties = {key: {"const": value} for key, value in arguments.items()}
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    grammar = CallGrammar()
    rule = write(grammar, ToolFunction(name, schema, strict=False, param="tools"))
    parts = []
    for part in _PART.findall(rule):
        match part[0]:
            case '"':
                parts.append(re.escape(json.loads(part)))
            case "/":
                parts.append(part[1:-1])
            case "@":
                found = grammar.schemas[part[1:]].schema
                value = found.get("const", arguments)
                parts.append(re.escape(json.dumps(value, ensure_ascii=False)))
            case "(":
                parts.append("(?:")
            case other:
                assert other in ")|", "an expression has no other parts"
                parts.append(other)
    return "".join(parts)


def _may_separate(call_format: CallFormat, between: str) -> bool:
    """Whether calls may have `between` as a separator: punctuation, or the surroundings of all
    calls repeated for each.
    """
    repeated = (call_format.end + call_format.begin, call_format.end + "," + call_format.begin)
    allowed = (*_SEPARATORS, call_format.between, *repeated)
    return "".join(between.split()) in ("".join(each.split()) for each in allowed)


def _reads(call_format: CallFormat, calls: RenderedCalls, text: str) -> bool:
    """Whether the parser of `call_format` reads exactly these calls in `text`."""
    tool = {"type": "function", "function": {"name": calls.name}}
    maker = AnswerPieces(calls=call_format, schemas=ToolSchemas.of([tool]))
    pieces = maker.make(text, is_last=True)
    read = [piece.text for piece in pieces if isinstance(piece, ArgumentsPiece)]
    is_whole = all(isinstance(piece, CallPiece | ArgumentsPiece) for piece in pieces)
    return is_whole and [json.loads(each) for each in read] == list(calls.arguments)


def _lead(calls: RenderedCalls, found: re.Match[str]) -> str:
    """The whitespace with which the answer begins; "" if it begins with anything else."""
    lead = "" if calls.begin is None else calls.text[calls.begin : found.start()]
    return "" if lead.strip() else lead
