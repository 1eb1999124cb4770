"""Compiling is bounded, and an error says where and why."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import llguidance
import pytest

from luceasync.errors import RequestError, Unavailable
from luceasync.grammar import proving, trial
from luceasync.grammar.compiler import MAX_WAITING, Compiler
from luceasync.grammar.program import compose
from luceasync.grammar.proving import START, GrammarProver
from luceasync.request import Constraint
from luceasync.text.answer.call_grammar import ToolFunction, json_object, must_call, tagged

pytestmark = pytest.mark.slow


@pytest.fixture
async def compiler(vocabulary):
    compiler = Compiler(vocabulary)
    yield compiler
    await compiler.close()


async def compiled(compiler: Compiler, kind: str, source: Any, *, strict: bool = True):
    source = source if isinstance(source, str) else json.dumps(source)
    return await compiler.matcher(lambda: compose(Constraint(kind, source, "field", strict)))


async def test_compiled_programs_are_cached_for_every_thread(compiler):
    asked = compose(Constraint("regex", "[a-c]+", "field"))
    assert compiler.cached(asked) is None
    made = await compiler.matcher(lambda: asked)
    assert await asyncio.to_thread(compiler.cached, asked) is made


@pytest.mark.parametrize(
    ("kind", "source", "param", "words"),
    [
        (
            "json_schema",
            {"type": "thing"},
            "field",
            "'field' does not compile: Invalid type: thing",
        ),
        (
            "json_schema",
            {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "x"}}}},
            "field.properties.a.items",
            "'field' does not compile at '/properties/a/items': Invalid type: x",
        ),
        (
            "json_schema",
            {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/d"}], "$defs": {"d": {"not": {}}}},
            "field.$defs.d",
            "at '/$defs/d': these words cannot be enforced: \"not\"",
        ),
        (
            "json_schema",
            {
                "properties": {"a/b": {"$ref": "#/parts/x"}},
                "parts": {"x": {"items": {"type": "y"}}},
            },
            "field.parts.x.items",
            "at '/parts/x/items': Invalid type: y",
        ),
        (
            "json_schema",
            {
                "properties": {
                    "a/b": {"anyOf": [{"$ref": "#/properties/c"}, {"type": "z"}]},
                    "c": {"type": "string"},
                }
            },
            "field.properties.a/b.anyOf[1]",
            "at '/properties/a~1b/anyOf/1': Invalid type: z",
        ),
        (
            "json_schema",
            {"items": {"properties": {"a": {"$ref": "#/gone"}}}},
            "field.items.properties.a",
            "at '/items/properties/a': Pointer '/gone' does not exist",
        ),
        (
            "json_schema",
            {"items": {"$ref": "https://example.com/x"}},
            "field.items",
            "'https://example.com/x' is not part of the schema",
        ),
        ("json_schema", {"type": "string", "pattern": "(?=a)b"}, "field", "look-around"),
        ("json_schema", False, "field", "nsatisfiable"),
        ("json_schema", {"$ref": "#"}, "field", "nothing is an answer"),
        (
            "json_schema",
            {"type": "string", "format": "date", "maxLength": 2},
            "field",
            "no text satisfies it",
        ),
        (
            "json_schema",
            {"properties": {"a": {"pattern": r"\bfoo"}}},
            "field.properties.a",
            "a boundary or anchor is not supported",
        ),
        ("json_schema", {"type": "integer", "minimum": 10**30}, "field", "64 bits"),
        ("regex", "(", "field", "'field' does not compile: invalid regex: unclosed group"),
        ("regex", r"[^\s\S]", "field", "nothing is an answer"),
        ("grammar", "start: a\na: a", "field", "nothing is an answer"),
        ("grammar", 'start: "a"{1000000}', "field", "too many ways"),
        ("json_schema", "[" * 100_000, "field", "nested"),
    ],
)
async def test_a_refusal_says_where(compiler, kind, source, param, words):
    with pytest.raises(RequestError) as caught:
        await compiled(compiler, kind, source)
    assert caught.value.param == param
    assert "<non-verbose/>" not in str(caught.value)
    assert words in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("source", "where", "words"),
    [
        ('start: a\na: "a" | other', "line 2, column 4", 'unknown name: "other"'),
        ('start: a\na: "b" (', "line 2, column 9", "Expected token"),
        ('start: a\na: "a" | /(/', "line 2, column 4", "invalid regex: unclosed group"),
        ('start: "a"\n | @other', "line 2, column 4", "unknown grammar @other"),
        ('start: a\na: %json {"type": "x"}', "line 2, column 4", "Invalid type: x"),
        ('root ::= a\na ::= "b', "line 2, column 9", "Unexpected end of input"),
        ('root ::= "a"\n\n  | b', "line 3, column 3", "Expected name"),
        ('root ::= "a" other-one', "line 1, column 14", "Rule 'other-one' not found"),
        ('root ::= "a" my-rule\nmy-rule ::= [z-a]', "line 2, column 1", "invalid regex: "),
        ('root ::= "a\\', "line 1, column 13", "unexpected end"),
        ("start: a" + "\n" * 1000 + "b: c", "line 1, column 8", 'unknown name: "a"'),
        ("an answer", "line 1, column 4", "neither Lark, without 'start:', nor GBNF"),
    ],
)
async def test_what_is_wrong_with_a_grammar_has_its_line_and_column(compiler, source, where, words):
    with pytest.raises(RequestError) as caught:
        await compiled(compiler, "grammar", source)
    assert caught.value.param == "field"
    assert str(caught.value).startswith(f"'field' does not compile at {where}: ")
    assert words in str(caught.value) and "\n" not in str(caught.value)


async def test_keywords_that_cannot_be_enforced_are_ignored_unless_strict(compiler):
    schema = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 5}}}}
    with pytest.raises(RequestError, match="not"):
        await compiled(compiler, "json_schema", schema)
    assert (await compiled(compiler, "json_schema", schema, strict=False)).failure is None


def follows(matcher, vocabulary, text: str) -> bool:
    """Whether `text` is an answer from beginning to end."""
    tokens = [*vocabulary.tokenizer.encode(text, special=False), vocabulary.end_ids[0]]
    copied = matcher.copy()
    return copied.num_allowed(tokens) == len(tokens)


NODE = {"$ref": "#/$defs/node"}
TAGGED = tagged("<%s>", ("<%s>", "</>", ""), "</f>")


def tree(child: Any) -> dict[str, Any]:
    """A schema that refers to itself through `child`."""
    node = {"type": "object", "properties": {"next": child}, "additionalProperties": False}
    return {**NODE, "$defs": {"node": node}}


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"type": "string", "pattern": "^(?!x).+$", "maxLength": 3}, '"xyz"', '"wxyz"'),
        ({"type": "string", "pattern": r"(a)\1"}, '"b"', "1"),
        ({"type": "string", "pattern": r"\bfoo\b"}, '"b"', "1"),
        ({"type": "string", "pattern": "^[^[]$"}, '"b"', "1"),
        ({"properties": {"pattern": {"pattern": "(?=a)"}}}, '{"pattern": "b"}', "a"),
        (
            {
                "type": "object",
                "patternProperties": {"^(?!x-)": {"type": "integer"}, "^b$": {"const": 5}},
                "additionalProperties": False,
            },
            '{"a": 1, "b": 5}',
            '{"b": 6}',
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/b"}},
                "$defs": {"b": {"items": {"$ref": "#/$defs/c"}}, "c": {"pattern": "(?<=a)b"}},
            },
            '{"a": ["c"]}',
            "[]",
        ),
        (
            {
                "type": "object",
                "patternProperties": {"^a": {"type": "integer"}, "^ab$": {"const": 5}},
                "additionalProperties": False,
            },
            '{"ab": 1}',
            '{"ab": "x"}',
        ),
        (
            {
                "items": {"$ref": "#/shared/names/full"},
                "shared": {"names": {"full": {"pattern": "(?!a)"}}},
            },
            '["a"]',
            "[",
        ),
        ({"type": "integer", "minimum": 10**30}, "7", "7.5"),
        ({"type": "number", "minimum": -1.7e308, "maximum": 1.7e308}, "1.5", '"a"'),
        ({"minimum": -1.7e308, "exclusiveMaximum": 9.5}, "9", "10"),
        (tree({**NODE, "minProperties": 1}), '{"next": {"next": {}}}', '{"next": 1}'),
        (
            {
                "$id": "https://example.com/x#",
                "type": "object",
                "properties": {"a": {"$ref": "https://example.com/x#", "type": "object"}},
                "additionalProperties": False,
            },
            '{"a": {"a": {}}}',
            '{"a": 1}',
        ),
        (
            tree({"type": "object", "anyOf": [NODE, {"type": "null"}], "minProperties": 1}),
            '{"next": {"next": null}}',
            '{"next": 1}',
        ),
        (tree({"allOf": [NODE, {"required": ["next"]}]}), '{"next": {}}', '{"next": 1}'),
        (tree({"anyOf": [{**NODE, "type": "object"}, {"type": "null"}]}), '{"next": null}', "1"),
    ],
)
async def test_without_strict_what_cannot_compile_is_ignored_and_the_rest_holds(
    compiler, vocabulary, schema, allowed, forbidden
):
    with pytest.raises(RequestError):
        await compiled(compiler, "json_schema", schema)
    made = await compiled(compiler, "json_schema", schema, strict=False)
    assert follows(made, vocabulary, allowed) and not follows(made, vocabulary, forbidden)


@pytest.mark.parametrize("lengths", [{"minLength": 5, "maxLength": 2}, {"maxLength": -1}])
@pytest.mark.parametrize("write", [TAGGED, json_object("", "name", "arguments", "")])
async def test_lengths_that_no_argument_has_are_refused_with_their_place(compiler, write, lengths):
    schema = {"type": "object", "properties": {"a": {"type": "string", **lengths}}}
    tool = {"function": {"name": "f", "parameters": {**schema, "required": ["a"]}}}
    calls = must_call(write, "", [ToolFunction.of(tool, "tools[0].parameters")], 1)
    with pytest.raises(RequestError) as caught:
        await compiler.matcher(lambda: compose(calls=calls))
    assert (caught.value.param or "").startswith("tools[0].parameters")


async def test_what_is_no_schema_at_all_is_refused_without_strict_too(compiler):
    schema = {"properties": {"a": {"pattern": "(?=a)"}, "b": {"items": {"type": "thing"}}}}
    with pytest.raises(RequestError, match="Invalid type: thing"):
        await compiled(compiler, "json_schema", schema, strict=False)


async def test_a_program_that_never_ends_is_killed_and_others_compile(vocabulary):
    compiler = Compiler(vocabulary, GrammarProver(limit_s=0.2))
    with pytest.raises(RequestError, match=r"takes more than 0\.2 s of processor time"):
        await compiled(compiler, "json_schema", {"type": "integer", "multipleOf": 99999989})
    matcher = await compiled(compiler, "regex", "a")
    assert not matcher.is_over
    await compiler.close()


@pytest.mark.parametrize(
    "source",
    [
        "\n" * 32_000 + 'root ::= "a"',
        'root ::= "a"' + "\n" * 32_000,
        'root ::= "a" # ' + "c" * 32_000,
        "root ::= " + "(" * 90 + '"a"' + ")" * 90,
        "start\n" * 5_000,
        "root ::= " + " | ".join(f'"{i}"' for i in range(1_000)),
    ],
    ids=["lines before", "lines after", "comment", "groups", "words", "alternatives"],
)
async def test_grammars_are_read_where_nothing_waits(compiler, source):
    """In processor time of this process, which holds the interpreter for some of it."""
    await compiled(compiler, "regex", "a")
    begin = time.process_time()
    with nullcontext() if "::=" in source else pytest.raises(RequestError):
        await compiled(compiler, "grammar", source)
    assert time.process_time() - begin < 0.1


async def test_a_process_that_dies_is_started_again(compiler):
    await compiled(compiler, "regex", "a")
    compiler._prover._process.kill()
    await compiler._prover._process.wait()
    await compiled(compiler, "regex", "b")


async def test_time_without_a_processor_does_not_count(vocabulary):
    compiler = Compiler(vocabulary, GrammarProver(limit_s=0.3))
    await compiled(compiler, "regex", "a")
    process = compiler._prover._process
    os.kill(process.pid, signal.SIGSTOP)
    asked = asyncio.create_task(compiled(compiler, "regex", "b"))
    await asyncio.sleep(0.5)
    assert not asked.done()
    os.kill(process.pid, signal.SIGCONT)
    assert not (await asked).is_over
    await compiler.close()


async def test_a_machine_that_is_too_busy_is_no_fault_of_the_request(compiler, monkeypatch):
    await compiled(compiler, "regex", "a")
    os.kill(compiler._prover._process.pid, signal.SIGSTOP)
    monkeypatch.setattr(proving, "PATIENCE_S", 0.1)
    with pytest.raises(Unavailable, match="too busy to compile 'field'"):
        await compiled(compiler, "regex", "b")
    monkeypatch.undo()
    await compiled(compiler, "regex", "b")


async def test_one_that_a_program_kills_is_an_answer(compiler):
    await compiled(compiler, "regex", "a")
    process = compiler._prover._process
    os.kill(process.pid, signal.SIGSTOP)  # it has not read the next one when it dies
    asked = asyncio.create_task(compiled(compiler, "regex", "b"))
    await asyncio.sleep(0.1)
    process.kill()
    with pytest.raises(RequestError, match="memory"):
        await asked
    await compiled(compiler, "regex", "b")


async def test_the_same_is_compiled_once(compiler, monkeypatch):
    first = await compiled(compiler, "regex", "a+")
    monkeypatch.setattr(compiler, "_compile", None)
    assert await compiled(compiler, "regex", "a+") is first


async def test_the_number_of_waiting_programs_is_bounded(compiler):
    asked = [compiled(compiler, "regex", f"a{{{i}}}") for i in range(1, MAX_WAITING + 5)]
    ends = await asyncio.gather(*asked, return_exceptions=True)
    refused = [end for end in ends if isinstance(end, Exception)]
    assert all(isinstance(end, Unavailable) for end in refused) and len(refused) == 4


async def test_the_least_recently_used_is_evicted(compiler):
    await compiled(compiler, "regex", "a")
    cache = compiler._cache
    cache._max_bytes = cache._num_bytes + 10
    await compiled(compiler, "regex", "b")
    assert len(cache._matchers) == 1


def test_the_process_finds_llguidance_wherever_it_is_installed():
    where = str(Path(llguidance.__file__).parents[1])
    order = json.dumps({"program": json.dumps({"grammars": [{"json_schema": {}}]}), "limits": {}})
    command = [sys.executable, "-I", "-S", "-c", START, trial.__file__, where]
    found = subprocess.run(command, input=f"{order}\n".encode(), stdout=-1, timeout=60, check=True)
    assert json.loads(found.stdout) == {"error": ""}
