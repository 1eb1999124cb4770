"""Tool calls are parsed as written, however they are split, and wherever they are cut off."""

from __future__ import annotations

import json
import random
from typing import get_args

import pytest

from luceasync.config import ToolFormat
from luceasync.text.answer.call_formats import FORMATS
from tests.text.answer.written import IN_CHANNELS, TOOL, WRITERS, a_call, read

NUM_CALLS = 60  # of each family; more find nothing else


@pytest.fixture(params=sorted(WRITERS))
def call_format(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_every_format_has_examples(call_format: str) -> None:
    assert set(WRITERS) == set(FORMATS)


def test_the_setting_offers_every_format() -> None:
    assert set(get_args(ToolFormat)) == {"auto", *FORMATS, "none"}


@pytest.mark.slow
def test_calls_are_parsed_alike_however_the_text_is_split(call_format: str) -> None:
    rng = random.Random(1)
    for _ in range(NUM_CALLS):
        call = a_call(rng)
        text = WRITERS[call_format](call)
        whole = read(call_format, text)
        assert whole.text == "" and [name for name, _ in whole.calls] == [TOOL], text
        assert json.loads(whole.calls[0][1]) == call.arguments, text
        one_by_one = read(call_format, text, range(1, len(text)))
        assert one_by_one == whole
        cuts = sorted(rng.sample(range(len(text)), 3))
        assert read(call_format, text, cuts) == whole


def test_json_arguments_keep_the_models_spelling() -> None:
    text = '<tool_call>{"name": "run_it", "arguments": { "a" :1,"b":  [ 2 ] } }</tool_call>'
    assert read("qwen-json", text).calls == ((TOOL, '{ "a" :1,"b":  [ 2 ] }'),)


def test_several_calls_and_the_text_before(call_format: str) -> None:
    rng = random.Random(2)
    calls = [a_call(rng), a_call(rng)]
    lead = "" if FORMATS[call_format].only_first else "I will look.\n\n"
    between = "; " if call_format == "llama-json" else "\n"
    text = lead + between.join(map(WRITERS[call_format], calls)) + "\n"
    found = read(call_format, text)
    assert found.text == lead.strip()
    assert [json.loads(arguments) for _, arguments in found.calls] == [c.arguments for c in calls]
    assert read(call_format, text, range(1, len(text))) == found


@pytest.mark.slow
def test_a_call_cut_off_anywhere_is_text_unless_it_is_whole(call_format: str) -> None:
    call = a_call(random.Random(3))
    text = WRITERS[call_format](call)
    for end in range(len(text)):
        part = text[:end]
        found = read(call_format, part)
        assert found == read(call_format, part, range(1, end))
        if found.calls:
            [(name, arguments)] = found.calls
            assert (name, json.loads(arguments), found.text) == (TOOL, call.arguments, "")
        elif call_format not in IN_CHANNELS:  # there a header that is cut is dropped
            assert found.text == part


def test_a_malformed_call_is_text_and_the_next_one_a_call() -> None:
    good = '<tool_call>\n{"name": "run_it", "arguments": {}}\n</tool_call>'
    for bad in (
        "<tool_call> not JSON </tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "run_it", "arguments": 5}</tool_call>'.replace("name", "nome"),
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "run_it", "arguments": [5]}</tool_call>',
        '<tool_call>{"name": "run_it", "arguments": "[5]"}</tool_call>',
        '<tool_call>{"name": "run_it", "arguments": {"num": NaN}}</tool_call>',
        '<tool_call>{"name": "run_it", "arguments": {"num": 1, "flag": True}}</tool_call>',
        '<tool_call>{"name": "run_it", "arguments": {"num": 01}}</tool_call>',
        '<tool_call>{"name": "run_it", "arguments": {"num": 1,}}</tool_call>',
        '<tool_call>{"name": "run_it", "arguments": {"text": "C:\\dir"}}</tool_call>',
        "<tool_call>{'name': 'run_it'}</tool_call>",
    ):
        found = read("qwen-json", bad + good)
        assert (found.text, found.calls) == (bad, ((TOOL, "{}"),)), bad


def test_omissions_of_models_are_tolerated() -> None:
    cases = {
        "qwen-xml": [
            "<function=run_it>\n<parameter=num>\n5\n</parameter>\n</function>",
            "<tool_call>\n<function=run_it>\n<parameter=num>\n5\n</parameter>\n</tool_call>",
            "<tool_call><function=run_it><parameter=num>5</parameter></function></tool_call>",
        ],
        "qwen-json": [
            '<tool_call>{"name": "run_it", "arguments": {"num": 5}</tool_call>',
            '<tool_call>{"arguments": {"num": 5}, "name": "run_it"}</tool_call>',
            '<tool_call>{"name": "run_it", "arguments": "{\\"num\\": 5}"}</tool_call>',
            '<tool_call>{"id": 1, "name": "run_it", "arguments": {"num": 5}}',
        ],
        "mistral-id": ['[TOOL_CALLS]run_it[ARGS]{"num": 5}'],
        "solar": ['<|tool_call:begin|>run_it<|tool_call:args|>{"num": 5}'],
        "gigachat3": ['function call<|role_sep|>\n{"name": "run_it", "arguments": {"num": 5}}'],
        "command-json": ['<|START_ACTION|>[{"tool_name": "run_it", "parameters": {"num": 5}}]'],
        "functools-json": [
            'functools[{"name": "run_it", "arguments": {"num": 5}}]',
            '{"name": "run_it", "arguments": {"num": 5}}',
        ],
        "llama-json": [
            '<|python_start|>{"name": "run_it", "parameters": {"num": 5}}<|python_end|>',
            '<|python_start|><|python_end|>{"name": "run_it", "parameters": {"num": 5}}',
        ],
        "pythonic": ["<|python_start|>[run_it(num=5)]<|python_end|>"],
    }
    for call_format, texts in cases.items():
        for text in texts:
            found = read(call_format, text)
            assert found.text == "" and [json.loads(a) for _, a in found.calls] == [{"num": 5}], (
                text
            )


def test_a_call_whose_id_is_none_is_text() -> None:
    for text in (
        '[TOOL_CALLS]run_it[CALL_ID]a b[ARGS]{"num": 5}',
        '[TOOL_CALLS]run_it[CALL_ID][CALL_ID]a[ARGS]{"num": 5}',
    ):
        assert read("mistral-id", text).text == text


def test_a_line_end_within_a_string_is_escaped() -> None:
    text = '<tool_call>{"name": "run_it", "arguments": {"text": "a\nb"}}</tool_call>'
    assert read("qwen-json", text).calls == ((TOOL, '{"text": "a\\nb"}'),)


def test_an_answer_in_json_is_not_a_call_of_an_unknown_tool() -> None:
    text = '{"name": "Ada", "parameters": {}}'
    assert read("llama-json", text).text == text
    assert read("llama-json", "See: " + text.replace("Ada", TOOL)).calls == ()


def test_calls_beyond_the_limit_are_text(call_format: str) -> None:
    rng = random.Random(9)
    calls = [a_call(rng) for _ in range(3)]
    between = "; " if call_format == "llama-json" else "\n"
    text = between.join(map(WRITERS[call_format], calls))
    found = read(call_format, text, max_calls=1)
    assert [json.loads(arguments) for _, arguments in found.calls] == [calls[0].arguments]
    told = [json.loads(line) for line in found.text.split("\n") if line]
    assert told == [{"name": TOOL, "arguments": call.arguments} for call in calls[1:]]
    assert read(call_format, text, range(1, len(text)), max_calls=1) == found
