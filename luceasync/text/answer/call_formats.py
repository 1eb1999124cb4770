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
from luceasync.text.answer.growing_text import GrowingText, Reading

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write tool calls.

    `openings`: what a call may begin with; none is a prefix of another. `only_first`: a call is the
    whole answer, or follows another call. `read` parses a call from its opening on; `write` is its
    grammar; `between` separates two calls.
    """

    name: str
    openings: tuple[str, ...]
    read: Callable[[GrowingText, ToolSchemas], Reading[None]]
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


def _read_json(text: GrowingText, schemas: ToolSchemas) -> Reading[None]:
    yield from text.take(TOOL_CALL)
    yield from text.skip()
    yield from json_call.read_object(text)
    yield from _end(text)


def _read_functions(text: GrowingText, schemas: ToolSchemas) -> Reading[None]:
    if (yield from text.peek((TOOL_CALL,), text.place)) is not None:
        yield from text.take(TOOL_CALL)
        yield from text.skip()
    yield from tagged_call.read_function(text, schemas)
    yield from _end(text)


def _read_keyed(text: GrowingText, schemas: ToolSchemas) -> Reading[None]:
    yield from text.take(TOOL_CALL)
    yield from tagged_call.read_keyed(text, schemas)


def _read_bare(text: GrowingText, schemas: ToolSchemas) -> Reading[None]:
    """Only calls of known tools: an answer may be JSON for other reasons."""
    yield from json_call.read_object(text, known=tuple(schemas.by_name))
    yield from text.skip()
    if text.text.startswith(";", text.place):  # Llama's separator of calls
        text.place += 1


def _end(text: GrowingText) -> Reading[None]:
    """The end of a call, if the model wrote it."""
    yield from text.skip()
    if (yield from text.peek((TOOL_CALL_END,), text.place)) is not None:
        yield from text.take(TOOL_CALL_END)


FORMATS = {
    call_format.name: call_format
    for call_format in (
        CallFormat("qwen-json", (TOOL_CALL,), _read_json, call_grammar.json_in_tags),
        CallFormat(
            "qwen-xml",
            (TOOL_CALL, tagged_call.FUNCTION),
            _read_functions,
            call_grammar.parameters_in_tags,
        ),
        CallFormat("glm-xml", (TOOL_CALL,), _read_keyed, call_grammar.keys_and_values),
        CallFormat("llama-json", ("{",), _read_bare, call_grammar.bare_json, "; ", only_first=True),
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
