"""Composes a request's constraints on an answer into one program for llguidance.

Source: llguidance, docs/syntax.md and docs/json_schema.md. Owns the formatting of JSON: one space
after commas and colons and none elsewhere, so that an answer cannot consist of endless spaces, and
most of it is forced by what came before. Pure; whether a program compiles is not checked here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

from luceasync.errors import RequestError
from luceasync.request import Constraint
from luceasync.text.answer.call_grammar import CallGrammar
from luceasync.text.answer.pieces import THINK, Before, ReasoningWords

Grammar = Mapping[str, Any]  # of llguidance, without its name

JSON_FORMAT = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class GrammarProgram:
    """`text` for llguidance, in which clients' grammars have a `source` in Lark or GBNF: see
    luceasync.grammar.trial. `params` maps the name of each JSON schema and grammar to its request
    field; `param` is the field that requested the whole.
    """

    text: str
    param: str
    params: Mapping[str, str]


def compose(
    constraint: Constraint | None = None,
    calls: CallGrammar | None = None,
    before: Before = "nothing",
    words: ReasoningWords = THINK,
) -> GrammarProgram:
    """The program for an answer that matches `constraint`, for tool calls that match `calls`, or
    for either if both are given, after reasoning between `words`. Raises RequestError for a source
    that cannot be parsed.
    """
    grammars: dict[str, Grammar] = {}
    params = {}
    if constraint is not None:
        grammars["said"] = grammar_of(constraint)
        params["said"] = constraint.param
    if calls is not None:
        grammars["calls"] = {"lark_grammar": calls.lark}
    assert grammars, "an unconstrained answer needs no program"
    lead = {"said": f"{lark_text(words.lead)} " if words.lead else ""}
    answer = " | ".join(f"{lead.get(name, '')}@{name}" for name in grammars)
    for name, part in ({} if calls is None else calls.schemas).items():
        grammars[name] = {"json_schema": formatted(part.schema, part.strict)}
        params[name] = part.param
    lines = [*_start(before, words), f"answer: {answer}"]
    named = [{"name": name, **grammar} for name, grammar in grammars.items()]
    text = json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *named]})
    return GrammarProgram(text, "tools" if constraint is None else constraint.param, params)


def _start(before: Before, words: ReasoningWords) -> list[str]:
    """The rules for everything up to `answer`, including that reference."""
    if before == "nothing":
        return ["start: answer"]
    after = lark_text(words.after) if words.after else r"/\n{0,4}/"
    thought = f"thought[suffix={lark_text(words.end)}]: /(?s:.*)/\n"
    if before == "open":
        return [f"start: thought {after} answer", thought]
    return [f"start: ({lark_text(words.begin)} thought {after})? answer", thought]


def grammar_of(constraint: Constraint) -> Grammar:
    """The grammar of a constraint. Raises RequestError, which names the field."""
    match constraint.kind:
        case "json_object":
            return {"json_schema": formatted(ANY_OBJECT, strict=True)}
        case "json_schema":
            return {"json_schema": formatted(_schema(constraint), constraint.strict)}
        case "regex":
            return {"lark_grammar": f"start: {lark_regex(constraint.source)}"}
        case "choice":
            options = [lark_text(option) for option in json.loads(constraint.source)]
            return {"lark_grammar": "start: " + " | ".join(options)}
        case "grammar":
            return {"source": constraint.source}


def _schema(constraint: Constraint) -> Any:
    try:
        return json.loads(constraint.source)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"'{constraint.param}' is not JSON, or nested too deep.", param=constraint.param
        ) from error


def formatted(schema: Any, strict: bool) -> Any:
    """`schema` with the formatting of its JSON. `strict`: keywords that cannot be enforced do not
    compile; otherwise they are ignored, and "oneOf" means "anyOf".
    """
    if not isinstance(schema, Mapping):
        return schema
    options = {"lenient": not strict, "coerce_one_of": not strict}
    return {**schema, "x-guidance": {**JSON_FORMAT, **options}}


def lark_text(text: str) -> str:
    """A literal in Lark syntax."""
    return json.dumps(text, ensure_ascii=False)


def lark_regex(pattern: str) -> str:
    """A regular expression in Lark syntax; `pattern` must match a whole text."""
    return f"/{regex_to_lark(pattern, '')}/"
