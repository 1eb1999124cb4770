"""An answer that is nothing but the JSON of calls of its tools is these calls, in every format;
whatever else it says makes it a text, to the last character.
"""

from __future__ import annotations

import json
import random

import pytest

from luceasync.request import TextPiece
from luceasync.text.answer.argument_types import ToolSchemas
from luceasync.text.answer.call_formats import FORMATS
from luceasync.text.answer.pieces import AnswerPieces
from tests.text.answer.written import SCHEMAS, TOOL, AnswerContents, a_call, new_maker, read

NAMED = [name for name, row in FORMATS.items() if not (row.in_channels or row.only_first)]
CALL = '{"name": "run_it", "arguments": {"num": 1}}'
OTHER = '{"name": "run_it", "arguments": {"text": "a"}}'
CALLS = (("run_it", '{"num": 1}'), ("run_it", '{"text": "a"}'))


def everywhere_cut(text: str, **options: object) -> AnswerContents:
    """What `text` is parsed to, which must not depend on how it is split."""
    whole = read("qwen-json", text, **options)
    assert read("qwen-json", text, range(1, len(text)), **options) == whole
    for cut in range(1, len(text)):
        assert read("qwen-json", text, [cut], **options) == whole
    return whole


@pytest.mark.parametrize("name", NAMED)
def test_a_call_is_read_in_every_format(name: str) -> None:
    assert read(name, CALL) == AnswerContents("", "", CALLS[:1])


@pytest.mark.parametrize(
    ("text", "num_calls"),
    [
        (CALL, 1),
        (f" \n{CALL}\n", 1),
        (f"{CALL}\n{OTHER}", 2),
        (f"[{CALL}, {OTHER}]", 2),
        (f"[\n{CALL}\n]\n", 1),
        ('{"name" : "run_it","parameters":{"num": 1} }', 1),
    ],
)
def test_nothing_but_calls_is_calls(text: str, num_calls: int) -> None:
    assert everywhere_cut(text) == AnswerContents("", "", CALLS[:num_calls])


@pytest.mark.parametrize(
    "text",
    [
        f"{CALL} so",
        f"so {CALL}",
        f"```json\n{CALL}\n```",  # models show calls so, too
        f"{CALL}, {OTHER}",
        f"[{CALL}",
        f"[{CALL}] {CALL}",
        "[]",
        "[1]",
        CALL[:-1],
        CALL.replace("run_it", "other"),
        '{"name": "run_it"}',
        '{"arguments": {"num": 1}, "name": "run_it"}',
        '{"name": "run_it", "arguments": {"num": 1}, "id": 7}',
        '{"name": "run_it", "arguments": {"num": "one"}}',  # no value of its type
        '{"name": "run_it", "arguments": [1]}',
        '{"name": "run_it", "arguments": "{}"}',
        f"{CALL}\n" + OTHER.replace("run_it", "other"),
    ],
)
def test_anything_more_or_less_is_text(text: str) -> None:
    assert everywhere_cut(text) == AnswerContents(text, "", ())


def test_it_may_follow_reasoning() -> None:
    found = everywhere_cut(f"why\n</think>\n\n{CALL}", is_reasoning=True)
    assert found == AnswerContents("", "why", CALLS[:1])


def test_nothing_is_shown_until_it_is_known() -> None:
    for text in (CALL, f"[{CALL}]"):
        maker = new_maker("qwen-json")
        assert all(maker.make(letter, is_last=False) == () for letter in text)
    for text in (' {"names', "[1, 2]", '{"name": "other",', '{"name": "run_it", "id'):
        maker = new_maker("qwen-json")
        shown = "".join(
            piece.text
            for letter in text
            for piece in maker.make(letter, is_last=False)
            if isinstance(piece, TextPiece)
        )
        assert shown == text


def test_calls_beyond_the_limit_are_text() -> None:
    found = read("qwen-json", f"[{CALL}, {OTHER}]", max_calls=1)
    assert found.calls == CALLS[:1] and json.loads(found.text) == json.loads(OTHER)


def test_without_leave_json_is_text() -> None:
    maker = AnswerPieces(calls=FORMATS["qwen-json"], schemas=SCHEMAS, reads_json=False)
    assert maker.make(CALL, is_last=True) == (TextPiece(CALL),)


def tool(strict: bool, **schema: object) -> ToolSchemas:
    function = {"name": TOOL, "strict": strict, "parameters": {"type": "object", **schema}}
    return ToolSchemas.of([{"type": "function", "function": function}])


CITY = {"properties": {"city": {"type": "string"}}, "required": ["city"]}
NUMBER = {"type": "number"}
CLOSED = CITY | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "arguments", "fits"),
    [
        (CITY, {"city": "Rome"}, True),
        (CITY, {"city": "Rome", "day": 1}, True),
        (CITY, {}, False),
        (CITY, {"city": None}, False),
        (CLOSED, {"city": "Rome", "day": 1}, False),
        ({"properties": {"n": {"type": "integer"}}}, {"n": 1.5}, False),
        ({"properties": {"n": {"type": ["integer", "null"]}}}, {"n": None}, True),
        ({"properties": {"n": {"enum": ["a", 1]}}}, {"n": True}, False),
        ({"properties": {"n": {"const": "a"}}}, {"n": "a"}, True),
        ({"properties": {"n": {"items": {"type": "number"}}}}, {"n": [1, "2"]}, False),
        ({"properties": {"n": {"anyOf": [NUMBER, CLOSED]}}}, {"n": {"city": "a"}}, True),
        ({"properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {"n": NUMBER}}, {"n": "1"}, False),
        ({"additionalProperties": {"type": "boolean"}}, {"a": True, "b": 0}, False),
    ],
)  # fmt: skip
def test_arguments_fit_the_schema(schema: dict, arguments: dict, fits: bool) -> None:
    assert tool(False, **schema).fits(TOOL, arguments) is fits
    assert tool(True, **schema).fits(TOOL, arguments) is fits


@pytest.mark.parametrize("keyword", ["pattern", "format", "minLength"])
def test_what_is_not_looked_at_counts_against_strict_tools(keyword: str) -> None:
    schema = {"properties": {"city": {"type": "string", keyword: "x"}}}
    assert tool(False, **schema).fits(TOOL, {"city": "Rome"})
    assert not tool(True, **schema).fits(TOOL, {"city": "Rome"})


def test_hundreds_of_calls_broken_at_random() -> None:
    rng = random.Random(9)
    for _ in range(200):
        call = a_call(rng)
        text = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(3))
        [(name, arguments)] = read("qwen-xml", text, cuts).calls
        assert (name, json.loads(arguments)) == (TOOL, call.arguments)
        place = rng.randrange(len(text))
        broken = rng.choice([text[:place], text + "x", "x" + text])
        found = read("qwen-xml", broken, [min(cut, len(broken)) for cut in cuts])
        assert found == AnswerContents(broken, "", ())
