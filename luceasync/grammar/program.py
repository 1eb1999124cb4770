"""What a request asks of an answer, as one program of llguidance.

Source: llguidance, docs/syntax.md and docs/json_schema.md. Owns the form of JSON: one space after a
comma and a colon and none elsewhere, so that an answer cannot go on with spaces, and most of it
follows from what came before. Pure; whether a program compiles is seen elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from luceasync.errors import RequestError
from luceasync.request import Constraint
from luceasync.text.answer.call_grammar import CallGrammar
from luceasync.text.answer.answer_format import Before

Grammar = Mapping[str, Any]  # one of llguidance's, without a name

FORM = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
ANY_OBJECT = {"type": "object"}

_THOUGHT = 'thought[suffix="</think>"]: /(?s:.*)/\n'
_STARTS: dict[Before, str] = {
    "open": r"start: thought /\n{0,4}/ answer",
    "perhaps": r'start: ("<think>" thought /\n{0,4}/)? answer',
}


@dataclass(frozen=True, slots=True)
class Program:
    """What llguidance is given, and by the name of each of its JSON schemas the field that has it;
    `param` is the field that asks for all of it.
    """

    text: str
    param: str
    params: Mapping[str, str]


def program(
    constraint: Constraint | None = None,
    calls: CallGrammar | None = None,
    before: Before = "nothing",
) -> Program:
    """The program for an answer that is as `constraint` says, or that calls as `calls` says, or
    either where both are given. Raises RequestError for what is no grammar.
    """
    grammars: dict[str, Grammar] = {}
    params = {}
    if constraint is not None:
        grammars["said"] = grammar_of(constraint)
        params["said"] = constraint.param
    if calls is not None:
        grammars["calls"] = {"lark_grammar": calls.lark}
    answer = " | ".join(f"@{name}" for name in grammars)
    assert answer, "an answer of which nothing is asked needs no program"
    for name, part in ({} if calls is None else calls.parts).items():
        grammars[name] = {"json_schema": formed(part.schema, part.strict)}
        params[name] = part.param
    lines = [_STARTS.get(before, "start: answer"), f"answer: {answer}"]
    if before != "nothing":
        lines.append(_THOUGHT)
    named = [{"name": name, **grammar} for name, grammar in grammars.items()]
    text = json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *named]})
    return Program(text, "tools" if constraint is None else constraint.param, params)


def grammar_of(constraint: Constraint) -> Grammar:
    """What it says. Raises RequestError, which names the field."""
    match constraint.kind:
        case "json_object":
            return {"json_schema": formed(ANY_OBJECT, strict=True)}
        case "json_schema":
            return {"json_schema": formed(_schema(constraint), constraint.strict)}
        case "regex":
            return {"lark_grammar": f"start: {lark_regex(constraint.source)}"}
        case "choice":
            options = [lark_text(option) for option in json.loads(constraint.source)]
            return {"lark_grammar": "start: " + " | ".join(options)}
        case "grammar":
            return {"lark_grammar": _lark(constraint)}


def _schema(constraint: Constraint) -> Any:
    try:
        return json.loads(constraint.source)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"'{constraint.param}' is no JSON, or nested too deep.", param=constraint.param
        ) from error


def formed(schema: Any, strict: bool) -> Any:
    """`schema` with the form of its JSON. `strict`: what cannot be enforced does not compile;
    otherwise such words say nothing, and one of several is any of them.
    """
    if not isinstance(schema, Mapping):
        return schema
    return {**schema, "x-guidance": {**FORM, "lenient": not strict, "coerce_one_of": not strict}}


def lark_text(text: str) -> str:
    """`text` as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def lark_regex(pattern: str) -> str:
    """`pattern`, which stands for all of a text, as Lark writes it."""
    return f"/{regex_to_lark(pattern, '')}/"


def _lark(constraint: Constraint) -> str:
    """A grammar of Lark's, or of llama.cpp's GBNF."""
    try:
        return any_to_lark(constraint.source)
    except Exception as error:  # whatever a converter stumbles over, the text is no grammar
        raise RequestError(
            f"'{constraint.param}' is no grammar, neither Lark nor GBNF: {str(error)[:200]}",
            param=constraint.param,
        ) from error
