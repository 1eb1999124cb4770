"""How families of models write calls of tools: a table, and which row a chat template asks for.

Owns the names of formats. Knows no model by name: a template shows by example what it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from luceasync.text.answer import call_grammar, json_call, tagged_call
from luceasync.text.answer.argument_types import ToolSchemas
from luceasync.text.answer.call_grammar import CallGrammar, Function, WriteCall
from luceasync.text.answer.growing import Growing, Reading

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write calls. `openings`: what a call begins with, none of which begins another;
    `only_first`: a call is the whole answer, or follows another one. `read` is given the text from
    the opening on; `write` says how a call is to be written, and `between` what parts two of them.
    """

    name: str
    openings: tuple[str, ...]
    read: Callable[[Growing, ToolSchemas], Reading[None]]
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
        """An answer that calls tools with these names, and does nothing else. `places`: where a
        request has the schemas of their arguments; none: where OpenAI's chat has them.
        """
        called = [f for f in _functions(tools, places) if f.name in names]
        return call_grammar.must_call(self.write, self.between, called, max_calls)

    def may_call(
        self,
        tools: Sequence[Mapping[str, Any]],
        max_calls: int | None,
        places: Sequence[str] = (),
    ) -> CallGrammar | None:
        """An answer whose calls are right, where a tool wants that; None where none does, or a
        call looks like other text at its beginning.
        """
        functions = _functions(tools, places)
        if self.only_first or not any(function.strict for function in functions):
            return None
        return call_grammar.may_call(self.write, self.openings[0], functions, max_calls)


def _functions(tools: Sequence[Mapping[str, Any]], places: Sequence[str]) -> list[Function]:
    where = places or [f"tools[{i}].function.parameters" for i in range(len(tools))]
    return [Function.of(tool, place) for tool, place in zip(tools, where, strict=True)]


def _read_json(text: Growing, schemas: ToolSchemas) -> Reading[None]:
    yield from text.take(TOOL_CALL)
    yield from text.skip()
    yield from json_call.read_object(text)
    yield from _end(text)


def _read_functions(text: Growing, schemas: ToolSchemas) -> Reading[None]:
    if (yield from text.stands((TOOL_CALL,), text.place)) is not None:
        yield from text.take(TOOL_CALL)
        yield from text.skip()
    yield from tagged_call.read_function(text, schemas)
    yield from _end(text)


def _read_keyed(text: Growing, schemas: ToolSchemas) -> Reading[None]:
    yield from text.take(TOOL_CALL)
    yield from tagged_call.read_keyed(text, schemas)


def _read_bare(text: Growing, schemas: ToolSchemas) -> Reading[None]:
    """Only tools that were named: an answer may be JSON for other reasons."""
    yield from json_call.read_object(text, known=tuple(schemas.by_name))
    yield from text.skip()
    if text.text.startswith(";", text.place):  # Llama's parting of calls
        text.place += 1


def _end(text: Growing) -> Reading[None]:
    """The end of a call, where the model wrote it."""
    yield from text.skip()
    if (yield from text.stands((TOOL_CALL_END,), text.place)) is not None:
        yield from text.take(TOOL_CALL_END)


FORMATS = {
    form.name: form
    for form in (
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

# The first sign that is in a template decides: what only some have comes before what many have.
SIGNS = (
    ("<function=", "qwen-xml"),
    ("<arg_key>", "glm-xml"),
    ("<tool_call>", "qwen-json"),
    ("<|python_tag|>", "llama-json"),
    ('"parameters":', "llama-json"),
)


def format_of(rendered: str) -> CallFormat | None:
    """The format that a prompt asks for, `rendered` by a model's template with a tool and a call of
    it; None where nothing in it is known.
    """
    return next((FORMATS[name] for sign, name in SIGNS if sign in rendered), None)
