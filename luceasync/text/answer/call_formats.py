"""The formats in which models write tool calls, and which of them a chat template asks for.

Owns the names of formats. Knows no model by name: a rendered example shows the format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from luceasync.text.answer import call_grammar, json_call, tagged_call
from luceasync.text.answer.argument_types import ToolSchemas
from luceasync.text.answer.call_grammar import CallGrammar, ToolFunction, WriteCall
from luceasync.text.answer.growing_text import GrowingText, Reading, WrittenCall
from luceasync.text.answer.tagged_call import GLM, QWEN

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write tool calls.

    `openings`: what a call may begin with; none is a prefix of another. `only_first`: a call is the
    whole answer, or follows another call. `read` parses a call from its opening on; `write` is its
    grammar; `between` separates two calls.
    """

    name: str
    openings: tuple[str, ...]
    read: Callable[[GrowingText, ToolSchemas], Reading[list[WrittenCall]]]
    write: WriteCall
    between: str = "\n"
    only_first: bool = False

    def must_call(
        self,
        tools: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        max_calls: int | None,
        places: Sequence[str] = (),
    ) -> CallGrammar:
        """The grammar of an answer that consists of calls of the named tools. `places`: the request
        fields that hold the schemas of their arguments; empty: those of OpenAI's chat API.
        """
        called = [f for f in _functions(tools, places) if f.name in names]
        return call_grammar.must_call(self.write, self.between, called, max_calls)

    def may_call(
        self,
        tools: Sequence[Mapping[str, Any]],
        max_calls: int | None,
        places: Sequence[str] = (),
    ) -> CallGrammar | None:
        """The grammar of an answer whose calls are valid; None if no tool is strict, or the
        beginning of a call cannot be told from other text.
        """
        functions = _functions(tools, places)
        if self.only_first or not any(function.strict for function in functions):
            return None
        return call_grammar.may_call(self.write, self.openings[0], functions, max_calls)


def _functions(tools: Sequence[Mapping[str, Any]], places: Sequence[str]) -> list[ToolFunction]:
    where = places or [f"tools[{i}].function.parameters" for i in range(len(tools))]
    return [ToolFunction.of(tool, place) for tool, place in zip(tools, where, strict=True)]


def _read_tagged(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
    """<tool_call> with JSON, or with functions as tags, which may come without it. Models that
    are used to one of them at times write the other.
    """
    has_tag = (yield from text.peek((TOOL_CALL,), text.place)) is not None
    if has_tag:
        yield from text.take(TOOL_CALL)
        yield from text.skip()
    if text.text.startswith(("{", "["), text.place):
        calls = yield from json_call.read_calls(text)
        yield from text.may_take("}" + TOOL_CALL_END, "}\n" + TOOL_CALL_END, TOOL_CALL_END)
        return calls
    calls = yield from tagged_call.read_functions(text, schemas, QWEN)
    yield from text.may_take(TOOL_CALL_END)
    return calls


def _read_keyed(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
    """<tool_call> with a name, keys and values."""
    begin = text.place
    yield from text.take(TOOL_CALL)
    yield from text.skip()
    if text.text.startswith(("{", "["), text.place):
        text.place = begin
        return (yield from _read_tagged(text, schemas))
    call = yield from tagged_call.read_keyed(text, schemas, GLM)
    yield from text.take(TOOL_CALL_END)
    return [call]


def _read_bare(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
    """Only calls of known tools: an answer may be JSON for other reasons."""
    yield from text.may_take(PYTHON_TAG)
    yield from text.skip()
    calls = yield from json_call.read_calls(text, known=tuple(schemas.by_name))
    yield from text.may_take(";")  # Llama's separator of calls
    return calls


FORMATS = {
    call_format.name: call_format
    for call_format in (
        CallFormat("qwen-json", (TOOL_CALL,), _read_tagged, call_grammar.json_in_tags),
        CallFormat(
            "qwen-xml",
            (TOOL_CALL, QWEN.function),
            _read_tagged,
            call_grammar.parameters_in_tags,
        ),
        CallFormat("glm-xml", (TOOL_CALL,), _read_keyed, call_grammar.keys_and_values),
        CallFormat(
            "llama-json",
            ("{", PYTHON_TAG),
            _read_bare,
            call_grammar.bare_json,
            "; ",
            only_first=True,
        ),
    )
}

# The first sign found decides, so signs that few formats share come first.
SIGNS = (
    ("<function=", "qwen-xml"),
    ("<arg_key>", "glm-xml"),
    ("<tool_call>", "qwen-json"),
    ("<|python_tag|>", "llama-json"),
    ('"parameters":', "llama-json"),
)


def format_of(rendered: str) -> CallFormat | None:
    """The format that a model's template asks for, given a prompt `rendered` with a tool and a call
    of it; None if unknown.
    """
    return next((FORMATS[name] for sign, name in SIGNS if sign in rendered), None)
