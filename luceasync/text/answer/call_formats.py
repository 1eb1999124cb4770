"""The formats in which models write tool calls, each a row of one table.

Owns the names of formats. Knows no model by name: a rendered example shows the format.
"""
# ruff: noqa: RUF001 - DeepSeek's tags contain such characters

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from luceasync.text.answer import call_grammar, json_call, python_call, tagged_call
from luceasync.text.answer.argument_types import ToolSchemas
from luceasync.text.answer.call_grammar import CallGrammar, Notation, ToolFunction, WriteCall
from luceasync.text.answer.growing_text import (
    FormatMismatch,
    GrowingText,
    Reading,
    WrittenCall,
)
from luceasync.text.answer.json_call import NameWords
from luceasync.text.answer.tagged_call import AS_JSON, AS_STRING, GLM, QWEN, TagWords

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
ANALYSIS_TO = "<|channel|>analysis to="  # gpt-oss may name the recipient in other places too
LFM2, LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
OLMO, OLMO_END = "<function_calls>", "</function_calls>"
MISTRAL = NameWords("", "[TOOL_CALLS]", "[ARGS]", "", "")
KIMI = NameWords(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
DEEPSEEK = NameWords(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
DEEPSEEK_V3 = replace(
    DEEPSEEK,
    call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    name_end="\n```json\n",
    call_end="\n```<｜tool▁call▁end｜>",
)
FUNCTION = NameWords("", "<function=", ">", "</function>", "")
MINIMAX = TagWords(
    call="<minimax:tool_call>",
    call_end="</minimax:tool_call>",
    function='<invoke name="',
    name_end='">',
    function_end="</invoke>",
    parameter='<parameter name="',
    parameter_name_end='">',
    parameter_end="</parameter>",
)
SEED = replace(QWEN, call="<seed:tool_call>", call_end="</seed:tool_call>")
MINICPM = TagWords(
    call="",
    call_end="",
    function='<function name="',
    name_end='">',
    function_end="</function>",
    parameter='<param name="',
    parameter_name_end='">',
    parameter_end="</param>",
)
DSML = TagWords(
    call="<｜DSML｜function_calls>",
    call_end="</｜DSML｜function_calls>",
    function='<｜DSML｜invoke name="',
    name_end='">',
    function_end="</｜DSML｜invoke>",
    parameter='<｜DSML｜parameter name="',
    parameter_name_end='"',
    parameter_end="</｜DSML｜parameter>",
    has_attributes=True,
)
DSML_V4 = replace(DSML, call="<｜DSML｜tool_calls>", call_end="</｜DSML｜tool_calls>")

# An object, or a list, with the name of a tool, or with one that is spelled with escapes.
_LOOKS_JSON = (
    r"\s*(<\|python_tag\|>)?\s*[{\[](?s:.*)"
    r'"(name|tool_name)"\s*:\s*"((NAMES)"|[^"]*\\)(?s:.*)'
)

Reader = Callable[[GrowingText, ToolSchemas], Reading[list[WrittenCall]]]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write tool calls.

    `in_channels`: a call is a message in a channel, which luceasync.text.answer.channels reads.
    `openings`: what a call may begin with; none is a prefix of another. `only_first`: a call is the
    whole answer, or follows another call. `read` parses calls from an opening on; `write` is the
    grammar of one, `between` separates two, `begin` and `end` surround them all. `signs`: what
    every call in this notation contains. `anchor`: what each single call begins with, if openings
    are those of several. `looks`: of those that are the whole answer, a regular expression for
    what may be read as calls of the tools NAMES.
    """

    name: str
    openings: tuple[str, ...]
    read: Reader
    write: WriteCall
    signs: tuple[str, ...]
    between: str = "\n"
    begin: str = ""
    end: str = ""
    only_first: bool = False
    in_channels: bool = False
    anchor: str = ""
    looks: str = ""

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
        return call_grammar.must_call(
            self.write, self.between, called, max_calls, self.begin, self.end
        )

    def may_call(
        self,
        tools: Sequence[Mapping[str, Any]],
        max_calls: int | None,
        places: Sequence[str] = (),
    ) -> CallGrammar | None:
        """The grammar of an answer whose calls are valid; None if no tool is strict."""
        functions = _functions(tools, places)
        if not any(function.strict for function in functions):
            return None
        notation = Notation(self.openings, self.between, self.begin, self.end)
        if self.looks:
            names = "|".join(call_grammar.quoted(function.name) for function in functions)
            looks = self.looks.replace("NAMES", names)
            return call_grammar.may_be_calls(self.write, notation, functions, max_calls, looks)
        return call_grammar.may_call(self.write, notation, functions, max_calls, self.anchor)


def _functions(tools: Sequence[Mapping[str, Any]], places: Sequence[str]) -> list[ToolFunction]:
    where = places or [f"tools[{i}].function.parameters" for i in range(len(tools))]
    return [ToolFunction.of(tool, place) for tool, place in zip(tools, where, strict=True)]


def _read_tagged(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
    """<tool_call> with JSON, or with functions as tags, which may come without it. Models that
    are used to one of them at times write the other.
    """
    if (yield from text.peek((TOOL_CALL,), text.place)) is not None:
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


def _read_mistral(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
    """[TOOL_CALLS] with a list of JSON, or with a name and arguments."""
    begin = text.place
    yield from text.take(MISTRAL.call)
    yield from text.skip()
    if text.text.startswith(("{", "["), text.place):
        return (yield from json_call.read_calls(text))
    text.place = begin
    return (yield from json_call.read_named(text, MISTRAL))


def _json_between(opening: str, end: str) -> Reader:
    """Reads JSON between two words, of which the last may be missing."""

    def read(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
        yield from text.take(opening)
        calls = yield from json_call.read_calls(text)
        if end:
            yield from text.may_take(end)
        return calls

    return read


def _named(words: NameWords) -> Reader:
    def read(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
        return (yield from json_call.read_named(text, words))

    return read


def _functions_between(words: TagWords) -> Reader:
    """Reads functions as tags, between the words of a call if the notation has them."""

    def read(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
        if words.call:
            yield from text.take(words.call)
            yield from text.skip()
        calls = yield from tagged_call.read_functions(text, schemas, words)
        if words.call_end:
            yield from text.may_take(words.call_end)
        return calls

    return read


def _read_pythonic(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
    """Only calls of known tools: an answer may be a list for other reasons."""
    yield from text.may_take(PYTHON_TAG)
    yield from text.skip()
    return (yield from python_call.read_list(text, tuple(schemas.by_name)))


def _read_lfm2(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
    """A list of calls as in Python, or of JSON, which is how some templates repeat them."""
    yield from text.take(LFM2)
    yield from text.skip()
    begin = text.place
    yield from text.take("[")
    yield from text.skip()
    is_json = text.text.startswith("{", text.place)
    text.place = begin
    calls = yield from (json_call.read_list(text) if is_json else python_call.read_list(text))
    yield from text.may_take(LFM2_END)
    return calls


def _read_olmo(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
    """<function_calls>, a call on each line, </function_calls>."""
    yield from text.take(OLMO)
    calls = []
    while (yield from text.may_take(OLMO_END)) is None:
        yield from text.skip()
        calls.append((yield from python_call.read_call(text)))
    if not calls:
        raise FormatMismatch
    return calls


def _gemma(opening: str, end: str) -> Reader:
    def read(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
        yield from text.take(opening)
        yield from text.skip()
        call = yield from python_call.read_gemma(text)
        yield from text.may_take(end)
        return [call]

    return read


def _json_list(name: str, opening: str, end: str, *members: str) -> CallFormat:
    """A row for a list of JSON objects between two words."""
    keys = members or ("name", "arguments")
    return CallFormat(
        name,
        (opening,),
        _json_between(opening, end),
        call_grammar.json_object("", keys[0], keys[1], ""),
        (opening, f'"{keys[0]}"'),
        between=", ",
        begin=f"{opening}[",
        end=f"]{end}",
    )


def _named_json(name: str, words: NameWords, prefix: str = "", suffix: str = "") -> CallFormat:
    """A row for a name and JSON. `prefix`, `suffix`: what is written around the name, besides the
    words.
    """
    return CallFormat(
        name,
        words.openings,
        _named(words),
        call_grammar.named_json(
            words.call + prefix + "%s" + suffix + words.name_end, words.call_end
        ),
        (words.call, words.name_end),
        between="",
        begin=words.section,
        end=words.section_end,
        anchor=words.call,
    )


def _tags(name: str, words: TagWords) -> CallFormat:
    """A row for functions as tags."""
    lead = words.function + "%s" + words.name_end + "\n"
    parameter = words.parameter + "%s" + words.parameter_name_end
    attributes = (f" {AS_STRING}>", f" {AS_JSON}>") if words.has_attributes else ("", "")
    text_lead, json_lead = (parameter + attribute for attribute in attributes)
    around = (text_lead, words.parameter_end, "\n")
    return CallFormat(
        name,
        (words.call or words.function,),
        _functions_between(words),
        call_grammar.tagged(lead, around, words.function_end, json_lead),
        (words.call, words.function, words.parameter),
        begin=f"{words.call}\n" if words.call else "",
        end=f"\n{words.call_end}" if words.call else "",
        anchor=words.function,
    )


def _read_none(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
    """No call is read here: those in channels are told from text by their header."""
    raise FormatMismatch
    yield


_ROWS = (
    CallFormat(
        "harmony",
        ("<|channel|>commentary to=functions.", "<|start|>assistant to=", ANALYSIS_TO),
        _read_none,
        call_grammar.named_json(
            "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>", ""
        ),
        ("to=functions.", "<|message|>"),
        between="<|call|><|start|>assistant",
        in_channels=True,
    ),
    CallFormat(
        "qwen-xml",
        (TOOL_CALL, QWEN.function),
        _read_tagged,
        call_grammar.tagged(
            "<tool_call>\n<function=%s>\n",
            ("<parameter=%s>\n", "\n</parameter>", "\n"),
            "</function>\n</tool_call>",
        ),
        (TOOL_CALL, QWEN.parameter),
    ),
    CallFormat(
        "glm-xml",
        (TOOL_CALL,),
        _read_keyed,
        call_grammar.tagged(
            "<tool_call>%s\n",
            ("<arg_key>%s</arg_key>\n<arg_value>", "</arg_value>", "\n"),
            "</tool_call>",
        ),
        (TOOL_CALL, GLM.parameter),
    ),
    CallFormat(
        "qwen-json",
        (TOOL_CALL,),
        _read_tagged,
        call_grammar.json_object("<tool_call>\n", "name", "arguments", "\n</tool_call>"),
        (TOOL_CALL, '"name"'),
    ),
    _named_json("function-json", FUNCTION),
    CallFormat(
        "mistral",
        (MISTRAL.call,),
        _read_mistral,
        call_grammar.named_json("[TOOL_CALLS]%s[ARGS]", ""),
        (MISTRAL.call, MISTRAL.name_end),
        between="",
    ),
    CallFormat(
        "mistral-json",
        (MISTRAL.call,),
        _read_mistral,
        call_grammar.json_object("", "name", "arguments", ""),
        (MISTRAL.call, '"name"'),
        between=", ",
        begin="[TOOL_CALLS] [",
        end="]",
    ),
    _named_json("deepseek-v3", DEEPSEEK_V3),
    _named_json("deepseek-v3.1", DEEPSEEK),
    _tags("deepseek-v3.2", DSML),
    _tags("deepseek-v4", DSML_V4),
    _named_json("kimi-k2", KIMI, "functions.", ":0"),
    _tags("minimax-m2", MINIMAX),
    _tags("seed-xml", SEED),
    _tags("minicpm-xml", MINICPM),
    _json_list("granite-json", "<|tool_call|>", ""),
    _json_list("phi4-json", "<|tool_call|>", "<|/tool_call|>"),
    _json_list("nemotron-json", "<TOOLCALL>", "</TOOLCALL>"),
    _json_list("tool-calls-json", "<tool_calls>", "</tool_calls>"),
    _json_list("command-json", "<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"),
    CallFormat(
        "lfm2",
        (LFM2,),
        _read_lfm2,
        call_grammar.keywords("%s(", "=", ")"),
        (LFM2, "("),
        between=", ",
        begin=f"{LFM2}[",
        end=f"]{LFM2_END}",
    ),
    replace(_json_list("lfm2-json", LFM2, LFM2_END), read=_read_lfm2),
    CallFormat(
        "olmo3",
        (OLMO,),
        _read_olmo,
        call_grammar.keywords("%s(", "=", ")"),
        (OLMO, "("),
        begin=f"{OLMO}\n",
        end=f"\n{OLMO_END}",
    ),
    CallFormat(
        "gemma4",
        ("<|tool_call>",),
        _gemma("<|tool_call>", "<tool_call|>"),
        call_grammar.keywords("<|tool_call>call:%s{", ":", "}<tool_call|>"),
        ("<|tool_call>call:",),
        between="",
    ),
    CallFormat(
        "functiongemma",
        ("<start_function_call>",),
        _gemma("<start_function_call>", "<end_function_call>"),
        call_grammar.keywords("<start_function_call>call:%s{", ":", "}<end_function_call>"),
        ("<start_function_call>call:",),
        between="",
    ),
    CallFormat(
        "llama-json",
        ("{", PYTHON_TAG),
        _read_bare,
        call_grammar.json_object("", "name", "parameters", ""),
        ('"name"', '"parameters"'),
        "; ",
        only_first=True,
        looks=_LOOKS_JSON,
    ),
    CallFormat(
        "json-list",
        ("[",),
        _read_bare,
        call_grammar.json_object("", "name", "arguments", ""),
        ("[", '"name"', '"arguments"'),
        ", ",
        begin="[",
        end="]",
        only_first=True,
        looks=_LOOKS_JSON,
    ),
    CallFormat(
        "pythonic",
        ("[", PYTHON_TAG),
        _read_pythonic,
        call_grammar.keywords("%s(", "=", ")"),
        ("[", "("),
        ", ",
        begin="[",
        end="]",
        only_first=True,
        looks=r"\s*(<\|python_tag\|>)?\s*\[\s*(NAMES)\((?s:.*)",
    ),
)
FORMATS = {row.name: row for row in _ROWS}
