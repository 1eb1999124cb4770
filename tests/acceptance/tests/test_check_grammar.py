"""Random schemas have answers, and those are valid as a plain reading of the words says."""

from __future__ import annotations

import json

import pytest

from luceasync.grammar.trial import GrammarTrial
from tests.acceptance.check_grammar import WRONG, check, parser
from tests.acceptance.grammar import judging
from tests.acceptance.grammar.cases import made_up
from tests.acceptance.grammar.schemas import schema_of
from tests.acceptance.grammar.validity import is_valid


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "integer", "minimum": 3}, [3, 4.0], [2, 3.5, "3", True]),
        ({"exclusiveMaximum": 3, "multipleOf": 2}, [2, "x"], [3, 4, 1]),
        ({"enum": [1, "a", None]}, [1, "a", None], [True, "b"]),
        ({"type": "string", "pattern": "^a", "maxLength": 2}, ["a", "ab"], ["b", "abc", 1]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "x"]),
        ({"type": "string", "format": "time"}, ["10:00:00Z"], ["25:00:00Z", "10:00:00"]),
        (
            {"properties": {"a": {"type": "null"}}, "required": ["a"]},
            [{"a": None}, 5],
            [{}, {"a": 1}],
        ),
        (
            {"patternProperties": {"^k": {"const": 1}}, "additionalProperties": False},
            [{"k": 1}, {}],
            [{"k": 2}, {"z": 1}],
        ),
        ({"prefixItems": [{"const": 1}], "items": False}, [[1], []], [[2], [1, 1]]),
        ({"oneOf": [{"const": 1}, {"type": "integer"}]}, [2], [1, "x"]),
        ({"$ref": "#/$defs/d", "$defs": {"d": {"type": "array", "maxItems": 1}}}, [[]], [[1, 2]]),
    ],
)
def test_the_words_of_a_schema(schema, valid, invalid):
    assert all(is_valid(value, schema) for value in valid)
    assert not any(is_valid(value, schema) for value in invalid)


def test_schemas_are_of_many_kinds_and_compile():
    words: set[str] = set()
    for seed in range(60):
        text = json.dumps(schema_of(seed))
        words |= {word for word in WORDS if f'"{word}"' in text}
        program = json.dumps({"grammars": [{"json_schema": {**schema_of(seed), **LENIENT}}]})
        assert not GrammarTrial().answer({"program": program, "limits": {}})["error"], text
    assert words == set(WORDS)


WORDS = "anyOf oneOf allOf $ref enum const pattern format prefixItems patternProperties".split()
LENIENT = {"x-guidance": {"whitespace_flexible": False}}


@pytest.mark.slow
async def test_a_few_of_them():
    options = parser().parse_args(["--drafts", "none,tree", "--schemas", "8"])
    ends = [end for found in await check("qwen3_5", made_up(range(8)), options) for end in found]
    assert ends.count(judging.VALID) >= 6
    assert not WRONG & set(ends)


def test_the_beginning_of_json_is_told_from_what_is_none():
    whole = json.dumps([1, -2.5e3, True, None, 'a\u00e9\n"', {"a": {}, "b": [[], "x"]}])
    assert all(judging.is_beginning(whole[:end]) for end in range(len(whole) + 1))
    wrong = ["{]", '{"a" 1', "[1 2", "{,", '"a" "b"', "nul1", "01", "[1,,", "]", "x", '{"a":1}}']
    assert not any(map(judging.is_beginning, wrong))
