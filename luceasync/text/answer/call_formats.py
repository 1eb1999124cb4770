"""The formats in which models write tool calls, each a row of one table.

Owns the names of formats. Independent of model names: a rendered example reveals the format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from luceasync.text.answer import call_grammar, json_call, python_call, tagged_call
from luceasync.text.answer.argument_types import CallReader, ToolSchemas
from luceasync.text.answer.call_grammar import (
    ID,
    NUMBER,
    CallGrammar,
    Notation,
    ToolFunction,
    WriteCall,
)
from luceasync.text.answer.growing_text import (
    FormatMismatch,
    GrowingText,
    Reading,
    WrittenCall,
)
from luceasync.text.answer.json_call import MISTRAL, SOLAR, NameWords
from luceasync.text.answer.tagged_call import AS_JSON, AS_STRING, GLM, QWEN, TagWords

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
ANALYSIS_TO = "<|channel|>analysis to="  # gpt-oss may name the recipient in other places too
LFM2, LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"  # Llama 4's
FUNCTOOLS = "functools"
GIGACHAT = "function call<|role_sep|>"
APERTUS, APERTUS_END = "<|tools_prefix|>", "<|tools_suffix|>"
# An object, or a list of objects, with the name of a tool, or with an escaped name.
_BEFORE = r"(<\|python_tag\|>|<\|python_start\|>|functools)?\s*(<\|python_end\|>)?"
_LOOKS_JSON = (
    rf"\s*{_BEFORE}\s*[{{\[](?s:.*)"
    r'"(name|tool_name)"\s*:\s*"((NAMES)"|[^"]*\\)(?s:.*)'
)


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write tool calls.

    `in_channels`: a call is a message in a channel, parsed by luceasync.text.answer.channels.
    `openings` are the possible beginnings of a call; none is a prefix of another. `only_first`: a
    call is the whole answer, or follows another call. `read` parses calls from an opening on;
    `write` is the grammar of one call; `between` separates calls, `begin` and `end` surround all of
    them. `signs` occur in every call in this notation. `anchor` is the beginning of each single
    call, if an opening begins several calls. `looks`, for calls that are the whole answer, is a
    regular expression for text that may be read as calls of the tools NAMES. `told` is text that
    occurs only in templates for such models, needed if these render calls in another notation.
    `lead` is the whitespace before calls that are the whole answer. Whitespace and separators are
    adapted to the model's template: see luceasync.text.answer.call_spacing.
    """

    name: str
    openings: tuple[str, ...]
    read: CallReader
    write: WriteCall
    signs: tuple[str, ...]
    between: str = "\n"
    begin: str = ""
    end: str = ""
    only_first: bool = False
    in_channels: bool = False
    anchor: str = ""
    looks: str = ""
    told: str = ""
    lead: str = ""

    def must_call(
        self,
        tools: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        max_calls: int | None,
        places: Sequence[str] = (),
    ) -> CallGrammar:
        """The grammar of an answer that consists of calls of the named tools. `places` are the
        request fields that hold the schemas of their arguments; empty: those of OpenAI's chat API.
        """
        called = [f for f in _functions(tools, places) if f.name in names]
        return call_grammar.must_call(
            self.write, self.between, called, max_calls, self.lead + self.begin, self.end
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
    """<tool_call> with JSON, or functions as tags, with or without it. Models trained on one of
    these notations sometimes write the other.
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
    """Calls of known tools only: an answer may be JSON for other reasons."""
    yield from _python_begin(text)
    calls = yield from json_call.read_calls(text, known=tuple(schemas.by_name))
    yield from text.may_take(";", PYTHON_END)  # Llama's separator, and Llama 4's end
    return calls


def _python_begin(text: GrowingText) -> Reading[None]:
    """Skip the tag that Llama models write before calls. Llama 4's template may close it before
    them.
    """
    yield from text.may_take(PYTHON_TAG, PYTHON_START, FUNCTOOLS)
    yield from text.may_take(PYTHON_END)
    yield from text.skip()


def _read_mistral(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
    """[TOOL_CALLS] with a list of JSON, or with a name and arguments."""
    begin = text.place
    yield from text.take(MISTRAL.call)
    yield from text.skip()
    if text.text.startswith(("{", "["), text.place):
        return (yield from json_call.read_calls(text))
    text.place = begin
    return (yield from json_call.read_named(text, MISTRAL))


def _json_between(
    openings: tuple[str, ...],
    end: str,
    read_calls: Callable[[GrowingText], Reading[list[WrittenCall]]] = json_call.read_calls,
) -> CallReader:
    """Reads JSON between one of the openings and `end`, which may be missing."""

    def read(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
        yield from text.take(*openings)
        yield from text.skip()
        calls = yield from read_calls(text)
        if end:
            yield from text.may_take(end)
        return calls

    return read


def _named(words: NameWords) -> CallReader:
    def read(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
        return (yield from json_call.read_named(text, words))

    return read


def _functions_between(words: TagWords) -> CallReader:
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
    """Calls of known tools only: an answer may be a list for other reasons."""
    yield from _python_begin(text)
    calls = yield from python_call.read_list(text, tuple(schemas.by_name))
    yield from text.may_take(PYTHON_END)
    return calls


def _read_lfm2(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
    """A list of calls in Python syntax, or in JSON, as some templates repeat them."""
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


def _gemma(name: str, opening: str, end: str, quote: str) -> CallFormat:
    """A row for Gemma's calls, each between two words."""
    return CallFormat(
        name,
        (opening,),
        python_call.gemma_between(opening, end),
        call_grammar.keywords(f"{opening}call:%s{{", ":", "}" + end, quote),
        (f"{opening}call:",),
        between="",
    )


def _python_lines(name: str, begin: Sequence[str], end: Sequence[str]) -> CallFormat:
    """A row for calls in Python syntax, one per line."""
    return CallFormat(
        name,
        (begin[0],),
        python_call.lines_between(begin, end),
        call_grammar.keywords("%s(", "=", ")"),
        (*begin, "("),
        begin="\n".join(begin) + "\n",
        end="\n" + "\n".join(end),
    )


def _json_list(name: str, opening: str, end: str, *members: str) -> CallFormat:
    """A row for a list of JSON objects between two words."""
    keys = members or ("name", "arguments")
    return CallFormat(
        name,
        (opening,),
        _json_between((opening,), end),
        call_grammar.json_object("", keys[0], keys[1], ""),
        (opening, f'"{keys[0]}"'),
        between=", ",
        begin=f"{opening}[",
        end=f"]{end}",
    )


def _bare_json(
    name: str, arguments: str, begin: str, end: str, openings: tuple[str, ...], told: str = ""
) -> CallFormat:
    """A row for JSON that is the whole answer."""
    return CallFormat(
        name,
        openings,
        _read_bare,
        call_grammar.json_object("", "name", arguments, ""),
        ('"name"', f'"{arguments}"'),
        between=", ",
        begin=begin,
        end=end,
        only_first=True,
        looks=_LOOKS_JSON,
        told=told,
    )


def _mistral(name: str, call_id: str = "", *signs: str) -> CallFormat:
    """A row for Mistral's names and JSON, with `call_id` after the name."""
    return CallFormat(
        name,
        (MISTRAL.call,),
        _read_mistral,
        call_grammar.named_json(f"{MISTRAL.call}%s{call_id}{MISTRAL.name_end}", ""),
        (MISTRAL.call, *signs, MISTRAL.name_end),
        between="",
    )


def _json_each(name: str, openings: tuple[str, ...], space: str, end: str = "") -> CallFormat:
    """A row for a JSON object after an opening and `space`, as the models write it."""
    return CallFormat(
        name,
        openings,
        _json_between(openings, end),
        call_grammar.json_object(openings[0] + space, "name", "arguments", end),
        (openings[-1], '"name"', '"arguments"'),
    )


def _named_json(name: str, words: NameWords, prefix: str = "", suffix: str = "") -> CallFormat:
    """A row for a name and JSON. `prefix` and `suffix` are written around the name, in addition to
    the words.
    """
    return CallFormat(
        name,
        words.openings,
        _named(words),
        call_grammar.named_json(
            words.call + prefix + "%s" + suffix + words.name_end, words.call_end
        ),
        tuple(filter(None, (words.call, words.id_word, words.name_end))),
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
    """Reads no call: calls in channels are recognised by the header of their message."""
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
    _named_json("function-json", json_call.FUNCTION),
    _mistral("mistral-id", f"{MISTRAL.id_word}{ID}", MISTRAL.id_word),
    _mistral("mistral"),
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
    _named_json("deepseek-v3", json_call.DEEPSEEK_V3),
    _named_json("deepseek-v3.1", json_call.DEEPSEEK),
    _tags("deepseek-v3.2", tagged_call.DSML),
    _tags("deepseek-v4", tagged_call.DSML_V4),
    _named_json("kimi-k2", json_call.KIMI, "functions.", f":{NUMBER}"),
    # Its last word ends the turn, so it is not generated.
    replace(_named_json("solar", SOLAR, f"{ID}{SOLAR.id_word}"), end=""),
    _tags("minimax-m2", tagged_call.MINIMAX),
    _tags("seed-xml", tagged_call.SEED),
    _tags("minicpm-xml", tagged_call.MINICPM),
    _json_list("granite-json", "<|tool_call|>", ""),
    _json_list("phi4-json", "<|tool_call|>", "<|/tool_call|>"),
    _json_list("nemotron-json", "<TOOLCALL>", "</TOOLCALL>"),
    _json_list("tool-calls-json", "<tool_calls>", "</tool_calls>"),
    CallFormat(
        "command-json",
        ("<|START_ACTION|>",),
        _json_between(("<|START_ACTION|>",), "<|END_ACTION|>"),
        call_grammar.json_object("", "tool_name", "parameters", "", "tool_call_id"),
        ("<|START_ACTION|>", '"tool_name"'),
        between=",\n    ",
        begin="<|START_ACTION|>[\n    ",
        end="\n]<|END_ACTION|>",
    ),
    CallFormat(
        "apertus",
        (APERTUS,),
        _json_between((APERTUS,), APERTUS_END, json_call.read_by_name),
        call_grammar.named_json('{"%s": ', "}"),
        (APERTUS,),
        between=", ",
        begin=f"{APERTUS}[",
        end=f"]{APERTUS_END}",
    ),
    _json_each("gigachat3", (f"<|message_sep|>\n\n{GIGACHAT}", GIGACHAT), "\n"),
    _json_each("gigachat3.1", ("<|function_call|>",), ""),
    _json_each("internlm2", ("<|action_start|><|plugin|>",), "\n", "<|action_end|>"),
    _json_each("function-call-json", ("<function_call>",), " "),
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
    _python_lines("minicpm3", (LFM2, "```python"), ("```", LFM2_END)),
    _python_lines("olmo3", ("<function_calls>",), ("</function_calls>",)),
    _gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
    _gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    _bare_json(
        "functools-json", "arguments", f"{FUNCTOOLS}[", "]", (f"{FUNCTOOLS}[", "{"), f"{FUNCTOOLS}["
    ),
    replace(
        _bare_json("llama-json", "parameters", "", "", ("{", PYTHON_TAG, PYTHON_START)),
        between="; ",
    ),
    replace(
        _bare_json("json-list", "arguments", "[", "]", ("[",)),
        signs=("[", '"name"', '"arguments"'),
    ),
    CallFormat(
        "pythonic",
        ("[", PYTHON_TAG, PYTHON_START),
        _read_pythonic,
        call_grammar.keywords("%s(", "=", ")"),
        ("[", "("),
        ", ",
        begin="[",
        end="]",
        only_first=True,
        looks=rf"\s*{_BEFORE}\s*\[\s*(NAMES)\((?s:.*)",
    ),
)
FORMATS = {row.name: row for row in _ROWS}
