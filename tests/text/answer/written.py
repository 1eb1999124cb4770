"""Tool calls as each family of models writes them, and the expected result of parsing."""
# ruff: noqa: RUF001 - DeepSeek's tags contain such characters

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from luceasync.request import ArgumentsPiece, CallPiece, Piece, ReasoningPiece, TextPiece
from luceasync.text.answer.argument_types import ToolSchemas
from luceasync.text.answer.call_formats import FORMATS
from luceasync.text.answer.channels import ChannelPieces, MessageHeader
from luceasync.text.answer.pieces import AnswerPieces, PieceMaker

TOOL = "run_it"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "num": {"type": "integer"},
        "rate": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {}},
        "map": {"$ref": "#/$defs/map"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "$defs": {"map": {"type": "object"}},
}
SCHEMAS = ToolSchemas({TOOL: SCHEMA})
ALPHABET = "ab 0 1,:;\"'\\{}[]<>/\nä€😀=&%\t"


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class AnswerContents:
    """The contents of one answer's pieces."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]


def contents_of(pieces: Sequence[Piece]) -> AnswerContents:
    calls: list[list[str]] = []
    for piece in pieces:
        match piece:
            case CallPiece(index, _, name):
                assert index == len(calls)
                calls.append([name, ""])
            case ArgumentsPiece(index, text):
                assert index == len(calls) - 1
                calls[index][1] += text
    return AnswerContents(
        "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)),
        "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece)),
        tuple((name, arguments) for name, arguments in calls),
    )


def new_maker(
    call_format: str,
    *,
    is_reasoning: bool = False,
    schemas: ToolSchemas = SCHEMAS,
    **options: Any,
) -> PieceMaker:
    """A parser of an answer in that format; `is_reasoning`: the prompt has opened reasoning."""
    if FORMATS[call_format].in_channels:
        opened = MessageHeader.of("<|channel|>analysis<|message|>") if is_reasoning else None
        return ChannelPieces(schemas=schemas, opened=opened, **options)
    calls = FORMATS[call_format]
    return AnswerPieces(calls=calls, schemas=schemas, is_reasoning=is_reasoning, **options)


def read(call_format: str, text: str, cuts: Sequence[int] = (), **options: Any) -> AnswerContents:
    """Parse `text`, which comes in parts."""
    maker = new_maker(call_format, call_id=lambda: "id", **options)
    pieces: list[Piece] = []
    begin = 0
    for end in [*cuts, len(text)]:
        pieces += maker.make(text[begin:end], is_last=False)
        begin = end
    pieces += maker.make("", is_last=True)
    return contents_of(pieces)


def a_call(rng: random.Random) -> Call:
    """A call with any values that the schema allows."""
    makers: dict[str, Callable[[], Any]] = {
        "text": lambda: a_string(rng),
        "num": lambda: rng.randrange(-(10**12), 10**12),
        "rate": lambda: rng.choice([0.5, -1e-9, 1e300, 3.0]),
        "flag": lambda: rng.random() < 0.5,
        "list": lambda: [a_value(rng, 2) for _ in range(rng.randrange(4))],
        "map": lambda: {a_string(rng): a_value(rng, 2) for _ in range(rng.randrange(4))},
        "maybe": lambda: rng.choice([None, 7]),
    }
    names = rng.sample(sorted(makers), rng.randrange(len(makers) + 1))
    return Call(TOOL, {name: makers[name]() for name in names})


def a_string(rng: random.Random) -> str:
    words = [
        "</parameter>",
        "<function=",
        "</tool_call>",
        "</arg_value>",
        '"',
        "12",
        "null",
        "<think>",
    ]
    parts = [rng.choice(words) if rng.random() < 0.1 else rng.choice(ALPHABET) for _ in range(12)]
    # A line end at the ends is the format's own, and so is an end that the next tag follows.
    return "x" + re.sub(r">(\s*)<", r">y\1<", "".join(parts)) + "x"


def a_value(rng: random.Random, depth: int) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: a_string(rng),
        lambda: rng.randrange(100),
        lambda: None,
        lambda: rng.random() < 0.5,
    ]
    if depth:
        kinds.append(lambda: [a_value(rng, depth - 1) for _ in range(2)])
        kinds.append(lambda: {a_string(rng): a_value(rng, depth - 1)})
    return rng.choice(kinds)()


def write_json(call: Call) -> str:
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def write_bare(call: Call) -> str:
    return json.dumps({"name": call.name, "parameters": call.arguments}, ensure_ascii=False)


def write_functions(call: Call) -> str:
    """As Qwen3.5's template does."""
    lines = [f"<tool_call>\n<function={call.name}>"]
    for name, value in call.arguments.items():
        lines.append(f"<parameter={name}>\n{_plain(value)}\n</parameter>")
    return "\n".join([*lines, "</function>\n</tool_call>"])


def write_keyed(call: Call) -> str:
    """As GLM's template does."""
    lines = [f"<tool_call>{call.name}"]
    for name, value in call.arguments.items():
        lines.append(f"<arg_key>{name}</arg_key>\n<arg_value>{_plain(value)}</arg_value>")
    return "\n".join([*lines, "</tool_call>"])


def write_tags(lead: str, parameter: tuple[str, str], tail: str) -> Callable[[Call], str]:
    """Writes each value between the two texts of `parameter`; %s stands for a name."""

    def write(call: Call) -> str:
        begin, end = parameter
        values = [f"{begin % k}{_plain(v)}{end}" for k, v in call.arguments.items()]
        return "\n".join([lead % call.name, *values, tail])

    return write


def write_dsml(word: str) -> Callable[[Call], str]:
    def write(call: Call) -> str:
        lines = [f"<｜DSML｜{word}>", f'<｜DSML｜invoke name="{call.name}">']
        for name, value in call.arguments.items():
            is_string = "true" if isinstance(value, str) else "false"
            lead = f'<｜DSML｜parameter name="{name}" string="{is_string}">'
            lines.append(f"{lead}{_plain(value)}</｜DSML｜parameter>")
        return "\n".join([*lines, "</｜DSML｜invoke>", f"</｜DSML｜{word}>"])

    return write


def write_around(
    begin: str, end: str, names: tuple[str, str] = ("name", "arguments"), *, begun: bool = False
) -> Callable[[Call], str]:
    """Writes an object of JSON between two texts; `begun`: `begin` has its first member."""
    name, arguments = names

    def write(call: Call) -> str:
        body = json.dumps({name: call.name, arguments: call.arguments}, ensure_ascii=False)
        return f"{begin}{body.removeprefix('{') if begun else body}{end}"

    return write


def write_named(begin: str, middle: str, end: str) -> Callable[[Call], str]:
    """Writes a name and JSON between three texts."""

    def write(call: Call) -> str:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        return f"{begin}{call.name}{middle}{arguments}{end}"

    return write


def write_python(begin: str, end: str) -> Callable[[Call], str]:
    def write(call: Call) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in call.arguments.items())
        return f"{begin}{call.name}({arguments}){end}"

    return write


def write_gemma(begin: str, quote: str, end: str) -> Callable[[Call], str]:
    def literal(value: Any) -> str:
        match value:
            case str():
                return f"{quote}{value}{quote}"
            case list():
                return "[" + ",".join(map(literal, value)) + "]"
            case dict():
                members = (f"{literal(k)}:{literal(v)}" for k, v in value.items())
                return "{" + ",".join(members) + "}"
            case _:
                return json.dumps(value)

    def write(call: Call) -> str:
        members = ",".join(f"{k}:{literal(v)}" for k, v in call.arguments.items())
        return f"{begin}call:{call.name}{{{members}}}{end}"

    return write


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_DEEPSEEK, _DEEPSEEK_END = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
IN_CHANNELS = {"harmony"}
WRITERS: dict[str, Callable[[Call], str]] = {
    "harmony": write_named(
        "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"
    ),
    "qwen-json": write_json,
    "qwen-xml": write_functions,
    "glm-xml": write_keyed,
    "llama-json": write_bare,
    "function-json": write_named("<function=", ">", "</function>"),
    "mistral": write_named("[TOOL_CALLS]", "[ARGS]", ""),
    "mistral-id": write_named("[TOOL_CALLS]", "[CALL_ID]a1B2c3D4e[ARGS]", ""),
    "mistral-json": write_around("[TOOL_CALLS] [", "]"),
    "deepseek-v3": write_named(
        f"{_DEEPSEEK}function<｜tool▁sep｜>",
        "\n```json\n",
        f"\n```{_DEEPSEEK_END}<｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.1": write_named(
        _DEEPSEEK, "<｜tool▁sep｜>", f"{_DEEPSEEK_END}<｜tool▁calls▁end｜>"
    ),
    "deepseek-v3.2": write_dsml("function_calls"),
    "deepseek-v4": write_dsml("tool_calls"),
    "kimi-k2": write_named(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "solar": write_named(
        "<|tool_calls|><|tool_call:begin|>call12345<|tool_call:name|>",
        "<|tool_call:args|>",
        "<|tool_call:end|><|calls|>",
    ),
    "minimax-m2": write_tags(
        '<minimax:tool_call>\n<invoke name="%s">',
        ('<parameter name="%s">', "</parameter>"),
        "</invoke>\n</minimax:tool_call>",
    ),
    "seed-xml": write_tags(
        "<seed:tool_call>\n<function=%s>",
        ("<parameter=%s>", "</parameter>"),
        "</function>\n</seed:tool_call>",
    ),
    "minicpm-xml": write_tags(
        '<function name="%s">', ('<param name="%s">', "</param>"), "</function>"
    ),
    "granite-json": write_around("<|tool_call|>[", "]"),
    "phi4-json": write_around("<|tool_call|>[", "]<|/tool_call|>"),
    "nemotron-json": write_around("<TOOLCALL>[", "]</TOOLCALL>"),
    "tool-calls-json": write_around("<tool_calls>[", "]</tool_calls>"),
    "command-json": write_around(
        '<|START_ACTION|>[\n    {"tool_call_id": "0", ',
        "\n]<|END_ACTION|>",
        ("tool_name", "parameters"),
        begun=True,
    ),
    "apertus": write_named('<|tools_prefix|>[{"', '": ', "}]<|tools_suffix|>"),
    "gigachat3": write_around("<|message_sep|>\n\nfunction call<|role_sep|>\n", ""),
    "gigachat3.1": write_around("<|function_call|>", ""),
    "internlm2": write_around("<|action_start|><|plugin|>\n", "<|action_end|>"),
    "function-call-json": write_around("<function_call> ", ""),
    "lfm2": write_python("<|tool_call_start|>[", "]<|tool_call_end|>"),
    "lfm2-json": write_around("<|tool_call_start|>[", "]<|tool_call_end|>"),
    "minicpm3": write_python("<|tool_call_start|>\n```python\n", "\n```\n<|tool_call_end|>"),
    "olmo3": write_python("<function_calls>\n", "\n</function_calls>"),
    "gemma4": write_gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
    "functiongemma": write_gemma("<start_function_call>", "<escape>", "<end_function_call>"),
    "functools-json": write_around("functools[", "]"),
    "json-list": write_around("[", "]"),
    "pythonic": write_python("[", "]"),
}
