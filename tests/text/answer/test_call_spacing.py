"""Calls are written as the model's template renders them, down to the whitespace."""
# ruff: noqa: RUF001 - DeepSeek's tags contain such characters

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from luceasync.grammar.compiler import Compiler, GrammarVocabulary
from luceasync.grammar.program import compose
from luceasync.text.answer.answer_format import AnswerFormat
from luceasync.text.answer.call_formats import FORMATS
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer
from tests import tiny
from tests.text.answer.test_call_grammar import written

TEMPLATES = Path(__file__).parents[2] / "acceptance" / "turns"
USER = {"role": "user", "content": "x"}
NAME, ARGUMENTS = "{{ c.name }}", "{{ c.arguments | tojson }}"
JSON = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
LLAMA = JSON.replace("arguments", "parameters", 1)
QWEN = f"<tool_call>\n{JSON}\n</tool_call>"
CLOSE = f"<tool_call>{JSON}</tool_call>"
FUNCTION = (
    "<function={{ c.name }}>\n{% for k, v in c.arguments | items %}<parameter={{ k }}>{{ v }}"
    "</parameter>\n{% endfor %}</function>"
)
SEED = f"<seed:tool_call>\n{FUNCTION}\n</seed:tool_call>"
GLM = (
    "<tool_call>{{ c.name }}{% for k, v in c.arguments | items %}<arg_key>{{ k }}</arg_key>"
    "<arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>"
)
KIMI = (
    f"<|tool_call_begin|>{{{{ call.id }}}}<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
)
SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
DEEPSEEK = (
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{ARGUMENTS}\n```"
    "<｜tool▁call▁end｜>"
)
CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
LIST = ("<tool_calls>[ ", " ]</tool_calls>")
GEMMA = (
    "<|tool_call>call:{{ c.name ~ '{' }}{% for k, v in c.arguments | dictsort %}{{ k }}:"
    '{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v }}{% endif %}'
    "{{ ',' if not loop.last }}{% endfor %}}<tool_call|>"
)
LFM2 = (
    "{{ c.name ~ '(' }}{% for k, v in c.arguments | items %}{{ ', ' if not loop.first }}{{ k }}="
    '{% if v is string %}{{ "\'" ~ v ~ "\'" }}{% else %}{{ v }}{% endif %}{% endfor %})'
)
LFM2_LIST = ("<|tool_call_start|>[", "]<|tool_call_end|>")
MISTRAL = ("[TOOL_CALLS][", "]")
WITH_ID = f'{JSON[:-1]}, "id": "{{{{ call.id[-9:] }}}}"}}'
PLUGIN = f"<|action_start|><|plugin|>\n{JSON}<|action_end|>"
MINICPM = FUNCTION.replace("<function={{ c.name }}>", '<function name="{{ c.name }}">').replace(
    "<parameter={{ k }}>{{ v }}</parameter>", '<param name="{{ k }}">{{ v }}</param>'
)
# The format, how a template renders one call, what it puts between two, before and after all of
# them, and what is learned: between, begin and end.
RENDERED = [
    ("qwen-json", QWEN, "\n", "", "", ("\n", "", "")),
    ("qwen-json", QWEN, "", "", "", ("", "", "")),
    ("qwen-json", CLOSE, "\n\n", "", "", ("\n\n", "", "")),
    ("glm-xml", GLM, "", "", "", ("", "", "")),
    ("seed-xml", SEED, "\n", "", "", ("\n</seed:tool_call>\n<seed:tool_call>\n",)),
    ("deepseek-v3", DEEPSEEK, "\n", *CALLS, ("\n", *CALLS)),
    ("kimi-k2", KIMI, "", *SECTION, ("", *SECTION)),
    ("internlm2", PLUGIN, "", "", "", ("", "", "")),
    ("minicpm-xml", MINICPM, "", "", "", ("", "", "")),
    ("llama-json", LLAMA, "; ", "", "", ("; ", "", "")),
    ("llama-json", LLAMA, "", "", "", ("", "", "")),
    ("json-list", JSON, ",\n  ", "[\n  ", "\n]", (",\n  ", "[\n  ", "\n]")),
    ("tool-calls-json", JSON, ",", *LIST, (",", *LIST)),
    ("tool-calls-json", JSON, "\n", "<tool_calls>\n", "\n</tool_calls>",
     ("\n", "<tool_calls>\n", "\n</tool_calls>")),
    ("lfm2", LFM2, ", ", *LFM2_LIST, (", ", *LFM2_LIST)),
    ("gemma4", GEMMA, "", "", "", ("", "", "")),
    ("mistral-json", WITH_ID, ", ", *MISTRAL, (", ", *MISTRAL)),
]  # fmt: skip


def template_of(call: str, between: str, begin: str = "", end: str = "") -> ChatTemplate:
    """A template that renders a call `c`, which is the function of `call`, as `call`."""
    before, separator, after = (f"{{{{ {json.dumps(each)} }}}}" for each in (begin, between, end))
    return ChatTemplate(
        "{{ tools | tojson if tools }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        f"{{% if m.tool_calls %}}{before}"
        f"{{% for call in m.tool_calls %}}{{% set c = call.function %}}{call}"
        f"{{% if not loop.last %}}{separator}{{% endif %}}{{% endfor %}}{after}{{% endif %}}"
        "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tiny.save(tiny.build("qwen3", 1), tmp_path_factory.mktemp("calls")))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(GrammarVocabulary(tokenizer, tiny.VOCAB_SIZE))


def two_calls(found: AnswerFormat, tokenizer: Tokenizer, compiler: Compiler) -> str:
    """Two calls that `found` forces; there is one way to write them."""
    value = {"type": "integer", "const": 7}
    schema = {"type": "object", "properties": {"n": value}, "required": ["n"]}
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": schema}}]
    assert found.calls is not None
    grammar = found.calls.must_call(tools, ["look_up"], None)
    [start] = [i for i, rule in enumerate(grammar.rules) if rule.startswith("start: ")]
    grammar.rules[start] = grammar.rules[start].replace(")*", ")")
    return written(tokenizer, compiler._compile(compose(calls=grammar)), random.Random(0))


def rendered(template: ChatTemplate) -> str:
    calls = [
        {
            "id": f"functions.look_up:{i}",
            "type": "function",
            "function": {"name": "look_up", "arguments": {"n": 7}},
        }
        for i in range(2)
    ]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    return template.render([USER, said], add_generation_prompt=False)


@pytest.mark.parametrize("row", RENDERED, ids=[f"{row[0]}-{i}" for i, row in enumerate(RENDERED)])
def test_two_calls_are_written_as_the_template_renders_them(
    row: tuple[str, str, str, str, str, tuple[str, ...]], tokenizer: Tokenizer, compiler: Compiler
) -> None:
    name, call, between, begin, end, learned = row
    template = template_of(call, between, begin, end)
    found = AnswerFormat.of(template, tokenizer)
    assert found.calls is not None and found.calls.name == name
    assert (found.calls.between, found.calls.begin, found.calls.end)[: len(learned)] == learned
    text = two_calls(found, tokenizer, compiler)
    if name == "mistral-json":  # the model makes up their ids
        text = re.sub('"id": "[A-Za-z0-9]{9}"', '"id": "look_up:0"', text, count=1)
        text = re.sub('"id": "[A-Za-z0-9]{9}"', '"id": "look_up:1"', text, count=1)
    if name == "kimi-k2":  # the model counts its calls itself
        first, second = text.split("<|tool_call_argument_begin|>", 1)
        text = f"{first.rpartition(':')[0]}:0<|tool_call_argument_begin|>{second}"
        first, _, second = text.rpartition("<|tool_call_argument_begin|>")
        text = f"{first.rpartition(':')[0]}:1<|tool_call_argument_begin|>{second}"
    assert text in rendered(template)


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
def test_two_calls_are_written_as_real_templates_render_them(
    name: str, tokenizer: Tokenizer, compiler: Compiler
) -> None:
    template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text())
    found = AnswerFormat.of(template, tokenizer)
    assert two_calls(found, tokenizer, compiler) in rendered(template)


@pytest.mark.parametrize(
    ("call", "between"),
    [
        (QWEN, "<|im_end|>\n<|im_start|>assistant\n"),  # calls in messages of their own
        (QWEN, " and "),
        ("<tool_call>\n{{ c | tojson(indent=2) }}\n</tool_call>", "\n"),
    ],
)
def test_what_cannot_be_told_stays(call: str, between: str, tokenizer: Tokenizer) -> None:
    assert AnswerFormat.of(template_of(call, between), tokenizer).calls is FORMATS["qwen-json"]


def test_one_call_is_enough_for_its_own_spelling(tokenizer: Tokenizer) -> None:
    """If the template takes no second one, what separates them does not matter."""
    refusal = "{{ raise_exception('one call') if m.tool_calls | length > 1 }}"
    found = AnswerFormat.of(template_of(refusal + CLOSE, ""), tokenizer)
    assert found.max_calls == 1 and found.calls is not None
    tool = {"type": "function", "function": {"name": "f"}}
    assert "<tool_call>{" in found.calls.must_call([tool], ["f"], 1).lark.replace("\\", "")


def test_whitespace_before_the_calls_is_that_of_the_template(
    tokenizer: Tokenizer, compiler: Compiler
) -> None:
    """Reka's and Jamba's begin with a space."""
    template = template_of(f"{{{{ ' ' if loop.first }}}}{QWEN}", "")
    text = two_calls(AnswerFormat.of(template, tokenizer), tokenizer, compiler)
    assert text.startswith(" <tool_call>") and f"<|assistant|>{text}" in rendered(template)
    # An answer that may reason first separates the two as it likes.
    thinking = ChatTemplate(template.source + "{{ '<think>' if enable_thinking }}")
    reasoning = AnswerFormat.of(thinking, tokenizer)
    assert reasoning.reasons and reasoning.calls is not None and reasoning.calls.lead == ""


def test_strings_of_gemma_stand_between_its_quotes_and_arguments_are_sorted(
    tokenizer: Tokenizer, compiler: Compiler
) -> None:
    """As its template writes them, whatever the order of the schema."""
    found = AnswerFormat.of(template_of(GEMMA, ""), tokenizer)
    values = {"old": 'say "so"', "New": 7, "all": "\n}"}
    properties = {name: {"enum": [value]} for name, value in values.items()}
    properties["old"]["type"] = properties["all"]["type"] = "string"
    schema = {"type": "object", "properties": properties, "required": [*values]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert found.calls is not None
    grammar = compose(calls=found.calls.must_call([tool], ["f"], 1))
    text = written(tokenizer, compiler._compile(grammar), random.Random(0))
    call = {"id": "callcall0", "function": {"name": "f", "arguments": values}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert text in template_of(GEMMA, "").render([USER, said], add_generation_prompt=False)
    pieces = found.maker("", [tool]).make(text, is_last=True)
    assert json.loads(pieces[1].text) == values


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["left 'or' right", "a\\b", "plain", "\n"]},
        {"const": "it's"},
        {},
        {"minLength": 2, "maxLength": 3},
    ],
)
def test_strings_of_lfm2_stand_between_apostrophes_if_nothing_in_them_is_escaped(
    schema: dict[str, Any], tokenizer: Tokenizer, compiler: Compiler
) -> None:
    """Any other string is JSON, which its parser reads too."""
    found = AnswerFormat.of(template_of(LFM2, ", ", *LFM2_LIST), tokenizer)
    properties = {"a": {"type": "string", "description": "d", **schema}}
    parameters = {"type": "object", "properties": properties, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert found.calls is not None
    grammar = compiler._compile(compose(calls=found.calls.must_call([tool], ["f"], 1)))
    for seed in range(6):
        text = written(tokenizer, grammar, random.Random(seed))
        _, arguments = found.maker("", [tool]).make(text, is_last=True)
        value = json.loads(arguments.text)["a"]
        assert value in schema.get("enum", [schema.get("const", value)])
        assert 2 <= len(value) <= 3 or "minLength" not in schema
        is_plain = not re.search(r"['\\\\\x00-\x1f]", value) and "minLength" not in schema
        assert text[len("<|tool_call_start|>[f(a=")] == ("'" if is_plain else '"'), text
