"""The format of answers is detected from the template."""
# ruff: noqa: RUF001 - DeepSeek's tags contain such characters

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import ANY

import pytest

from luceasync.request import CallPiece, ReasoningPiece, TextPiece
from luceasync.text.answer.answer_format import AnswerFormat
from luceasync.text.detokenizer import Detokenizer
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer
from tests.text.conftest import BACKENDS

TEMPLATES = Path(__file__).parents[2] / "acceptance" / "turns"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture
def template() -> ChatTemplate:
    return ChatTemplate((TEMPLATES / "qwen3.5.jinja").read_text())


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_dir)


@pytest.mark.parametrize(("file", "name"), [("qwen3", "qwen-json"), ("qwen3.5", "qwen-xml")])
def test_formats_of_real_templates(file: str, name: str, tokenizer: Tokenizer) -> None:
    answer_format = AnswerFormat.of(
        ChatTemplate((TEMPLATES / f"{file}.jinja").read_text()), tokenizer
    )
    assert answer_format.calls is not None and answer_format.calls.name == name


def test_a_template_without_tools_has_plain_answers(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert AnswerFormat.of(template, tokenizer).calls is None


def test_a_template_that_refuses_the_example_has_plain_answers(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ raise_exception('no tools') }}")
    assert AnswerFormat.of(template, tokenizer).calls is None


def template_of(call: str, answer: str = "") -> ChatTemplate:
    """A template that writes a call `c` as `call`, and opens an answer with `answer`."""
    return ChatTemplate(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{% set c = c.function %}"
        "{% set args = c.arguments | tojson %}" + call + "{% endfor %}\n"
        "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% if add_generation_prompt %}<|assistant|>" + answer + "{% endif %}"
    )


SHOWN = {
    "qwen-json": '<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ args }}}\n</tool_call>',
    "function-json": "<function={{ c.name }}>{{ args }}</function>",
    "mistral": "[TOOL_CALLS]{{ c.name }}[ARGS]{{ args }}",
    "mistral-id": "[TOOL_CALLS]{{ c.name }}[CALL_ID]callcall0[ARGS]{{ args }}",
    "solar": "<|tool_calls|><|tool_call:begin|>callcall0<|tool_call:name|>{{ c.name }}"
    "<|tool_call:args|>{{ args }}<|tool_call:end|><|calls|>",
    "command-json": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "{{ c.name }}", '
    '"parameters": {{ args }}}\n]<|END_ACTION|>',
    "apertus": '<|tools_prefix|>[{"{{ c.name }}": {{ args }}}]<|tools_suffix|>',
    "gigachat3": "<|message_sep|>\n\nfunction call<|role_sep|>\n"
    '{"name": "{{ c.name }}", "arguments": {{ args }}}',
    "gigachat3.1": '<|function_call|>{"name": "{{ c.name }}", "arguments": {{ args }}}',
    "internlm2": '<|action_start|><|plugin|>\n{"name": "{{ c.name }}", "arguments": {{ args }}}'
    "<|action_end|>",
    "function-call-json": '<function_call> {"name": "{{ c.name }}", "arguments": {{ args }}}',
    "minicpm3": "<|tool_call_start|>\n```python\n{{ c.name }}("
    "{% for k, v in c.arguments | items %}{{ k }}={{ v | tojson }}{% endfor %})\n```\n"
    "<|tool_call_end|>",
    "mistral-json": '[TOOL_CALLS][{"name": "{{ c.name }}", "arguments": {{ args }}}]',
    "kimi-k2": "<|tool_call_begin|>functions.{{ c.name }}:0<|tool_call_argument_begin|>{{ args }}"
    "<|tool_call_end|>",
    "granite-json": '<|tool_call|>[{"name": "{{ c.name }}", "arguments": {{ args }}}]',
    "nemotron-json": '<TOOLCALL>[{"name": "{{ c.name }}", "arguments": {{ args }}}]</TOOLCALL>',
    "llama-json": '{"name": "{{ c.name }}", "parameters": {{ args }}}',
    "json-list": '[{"name": "{{ c.name }}", "arguments": {{ args }}}]',
    "pythonic": "[{{ c.name }}({% for k, v in c.arguments | items %}{{ k }}={{ v | tojson }}"
    "{% endfor %})]",
    "minicpm-xml": '<function name="{{ c.name }}">{% for k, v in c.arguments | items %}'
    '<param name="{{ k }}">{{ v }}</param>{% endfor %}</function>',
    "lfm2-json": '<|tool_call_start|>[{"name": "{{ c.name }}", "arguments": {{ args }}}]'
    "<|tool_call_end|>",
    "lfm2": "<|tool_call_start|>[{{ c.name }}({% for k, v in c.arguments | items %}{{ k }}="
    "{{ v | tojson }}{% endfor %})]<|tool_call_end|>",
    "olmo3": "<function_calls>\n{{ c.name }}({% for k, v in c.arguments | items %}{{ k }}='{{ v }}'"
    "{% endfor %})\n</function_calls>",
    "tool-calls-json": '<tool_calls>[{"name": "{{ c.name }}", "arguments": {{ args }}}]'
    "</tool_calls>",
    "minimax-m2": '\n<minimax:tool_call>\n<invoke name="{{ c.name }}">\n'
    '{% for k, v in c.arguments | items %}<parameter name="{{ k }}">{{ v }}</parameter>\n'
    "{% endfor %}</invoke>\n</minimax:tool_call>",
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n"
    "```json\n{{ args }}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>"
    "{{ args }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gemma4": "<|tool_call>call:{{ c.name }}{{ '{' }}{% for k, v in c.arguments | items %}{{ k }}:"
    "<|\"|>{{ v }}<|\"|>{% endfor %}{{ '}' }}<tool_call|>",
    "seed-xml": "<seed:tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments | items %}"
    "<parameter={{ k }}>{{ v }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>",
}


@pytest.mark.parametrize("name", SHOWN)
def test_the_format_is_that_of_the_call_that_the_template_renders(
    name: str, tokenizer: Tokenizer
) -> None:
    found = AnswerFormat.of(template_of(SHOWN[name]), tokenizer)
    assert found.calls is not None and found.calls.name == name


def called_by(template: ChatTemplate, tokenizer: Tokenizer) -> str | None:
    found = AnswerFormat.of(template, tokenizer).calls
    return found.name if found else None


def test_empty_reasoning_before_a_call_is_no_part_of_it(tokenizer: Tokenizer) -> None:
    for lead in ("<think></think>", "<think>\n\n</think>\n", "</think>   "):
        call = "{{ '<think>' if thinking }}" + lead + SHOWN["deepseek-v3.1"]
        assert called_by(template_of(call), tokenizer) == "deepseek-v3.1"


def test_a_call_may_stand_in_a_message_that_other_answers_begin_otherwise(
    tokenizer: Tokenizer,
) -> None:
    """Here a line end precedes it. Then the prompt that opens an answer shows where it begins."""
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{{ '\n' }}<|begin|>assistant<|end|>"
        "{% for c in m.tool_calls %}{% set c = c.function %}{% set args = c.arguments | tojson %}"
        + SHOWN["llama-json"]
        + "{% endfor %}{% else %}<|begin|>{{ m.role }}<|end|>{{ m.content }}{% endif %}{% endfor %}"
    )
    opening = "{% if add_generation_prompt %}{{ '\n' }}<|begin|>assistant<|end|>{% endif %}"
    assert called_by(ChatTemplate(source), tokenizer) is None
    assert called_by(ChatTemplate(source + opening), tokenizer) == "llama-json"


def test_a_template_may_refuse_a_call_without_content(tokenizer: Tokenizer) -> None:
    """Command A's looks at the first part of it."""
    refusal = "{{ raise_exception('no content') if m.tool_calls and not m.content }}"
    assert called_by(template_of(refusal + SHOWN["command-json"]), tokenizer) == "command-json"


def test_calls_as_in_python_are_known_by_a_number_if_texts_stand_without_quotes(
    tokenizer: Tokenizer,
) -> None:
    call = "[{{ c.name }}({% for k, v in c.arguments | items %}{{ k }}={{ v }}{% endfor %})]"
    assert called_by(template_of(call), tokenizer) == "pythonic"


def test_a_marker_that_the_template_tells_names_the_format_of_bare_json(
    tokenizer: Tokenizer,
) -> None:
    """Phi-4-mini's template repeats calls without it."""
    call = '{"name": "{{ c.name }}", "arguments": {{ args }}}'
    told = ChatTemplate(
        "Write functools[...].{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{% set c = c.function %}"
        "{% set args = c.arguments | tojson %}" + call + "{% endfor %}{% endfor %}"
    )
    assert called_by(told, tokenizer) == "functools-json"
    assert called_by(template_of(call), tokenizer) is None


def test_a_call_may_follow_the_end_of_python_that_is_empty(tokenizer: Tokenizer) -> None:
    """Llama 4's template puts the content of a message with calls between two tags."""
    call = "<|python_start|><|python_end|>" + SHOWN["llama-json"]
    assert called_by(template_of(call), tokenizer) == "llama-json"


@pytest.mark.parametrize(
    "call",
    [
        "<call {{ c.name }} with {{ args }}>",
        '<odd>{"name": "{{ c.name }}", "parameters": {{ args }}}</odd>',
        "<odd><tool_call>{{ c.name }}</tool_call></odd>",
        '<tool_call>{"name": "{{ c.name }}", "arguments": {}}</tool_call>',
        "",
    ],
)
def test_a_call_that_no_format_reads_back_is_of_no_format(call: str, tokenizer: Tokenizer) -> None:
    assert AnswerFormat.of(template_of(call), tokenizer).calls is None


# By row: how a template shows it, what a model then writes, and its reasoning and text.
REASONING = {
    "harmony": (
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.thinking %}<|channel|>analysis"
        "<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}<|message|>{{ m.content }}"
        "{% endfor %}<|start|>assistant",
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>so",
    ),
    "magistral": ("Write [THINK]thoughts[/THINK] first.", "[THINK]why[/THINK]so"),
    "seed": (
        "{% for m in messages %}{{ '<seed:think>' + m.reasoning_content + '</seed:think>' "
        "if m.reasoning_content }}{% endfor %}",
        "<seed:think>\nwhy\n</seed:think>\nso",
    ),
    "gemma": (
        "{{ '<|channel>thought\n<channel|>' if not enable_thinking | default(false) }}",
        "<|channel>thought\nwhy<channel|>so",
    ),
    "cohere": (
        "{% for m in messages %}{{ '<|START_THINKING|>' ~ m.reasoning if m.reasoning }}"
        "{% endfor %}",
        "<|START_THINKING|>why<|END_THINKING|>so",
    ),
    "reka": ("{{ '<reasoning>' if thinking }}", "<reasoning>why</reasoning>so"),
    "granite": (
        "{{ 'Use <think></think> and <response></response>' if thinking }}",
        "<think>why</think><response>so</response>",
    ),
    "hunyuan": (
        "{{ '<think>' ~ '</think><answer>' if messages | length > 1 }}",
        "<think>\nwhy\n</think>\n<answer>\nso\n</answer>",
    ),
    "opened": ("{{ '[THINK]' if add_generation_prompt }}", "why[/THINK]so"),
    "apriel": (
        "Here are my reasoning steps:\n",
        "why\n[BEGIN FINAL RESPONSE]\nso\n[END FINAL RESPONSE]\n",
    ),
}


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_is_found_between_the_words_of_the_template(
    name: str, tokenizer: Tokenizer
) -> None:
    source, answer = REASONING[name]
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}" + source)
    found = AnswerFormat.of(template, tokenizer)
    prompt = template.render([{"role": "user", "content": "x"}], enable_thinking=True)
    whole = found.maker(prompt, None).make(answer, is_last=True)
    assert [type(piece) for piece in whole] == [ReasoningPiece, TextPiece]
    assert [piece.text.strip() for piece in whole] == ["why", "so"]
    maker, texts = found.maker(prompt, None), {ReasoningPiece: "", TextPiece: ""}
    for char in answer:
        for piece in maker.make(char, is_last=False):
            texts[type(piece)] += piece.text
    for piece in maker.make("", is_last=True):
        texts[type(piece)] += piece.text
    assert [text.strip() for text in texts.values()] == ["why", "so"]


def test_a_call_whose_channel_comes_before_its_recipient_is_of_harmony(
    tokenizer: Tokenizer,
) -> None:
    """What all messages begin with is not cut from the call."""
    template = ChatTemplate(
        "{% for m in messages %}<|start|>{{ m.role }}<|channel|>{% for c in m.tool_calls or [] %}"
        "commentary to=functions.{{ c.function.name }} <|constrain|>json<|message|>"
        "{{ c.function.arguments | tojson }}<|call|>{% else %}final<|message|>{{ m.content }}"
        "<|end|>{% endfor %}{% endfor %}{{ tools | tojson if tools }}<|start|>assistant"
    )
    found = AnswerFormat.of(template, tokenizer)
    assert found.calls is not None and found.calls.name == "harmony" and found.words.has_channels


def test_a_token_alone_says_how_a_model_reasons() -> None:
    backend = BACKENDS["fallback"]()
    backend.add_special_tokens(["[THINK]", "[/THINK]"])
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    found = AnswerFormat.of(template, Tokenizer(backend.to_str()))
    assert found.words.begin == "[THINK]" and found.shown == {"[THINK]", "[/THINK]"}


def test_an_answers_own_tags_do_not_cut_those_of_a_call(tokenizer: Tokenizer) -> None:
    """Here both begin alike."""
    template = ChatTemplate(
        "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}"
        "{% for c in m.tool_calls %}{% set c = c.function %}<|START_ACTION|>"
        '[{"tool_name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}]<|END_ACTION|>'
        "{% endfor %}{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}"
        "{% endfor %}"
    )
    found = AnswerFormat.of(template, tokenizer).calls
    assert found is not None and found.name == "command-json"


def test_a_template_that_takes_one_call_allows_one(tokenizer: Tokenizer) -> None:
    one = SHOWN["llama-json"]
    refuses = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    drops = "{% if loop.first %}" + one + "{% endif %}"
    for call in (refuses + one, drops):
        found = AnswerFormat.of(template_of(call), tokenizer)
        assert (found.max_calls, found.most_calls(None), found.most_calls(3)) == (1, 1, 1)
    telling = AnswerFormat.of(ChatTemplate("any other text" + template_of(drops).source), tokenizer)
    assert telling.max_calls == 1
    closed = "{% if not add_generation_prompt %}" + one + "{% endif %}"
    assert AnswerFormat.of(template_of(closed), tokenizer).max_calls is None
    several = AnswerFormat.of(template_of(one), tokenizer)
    assert (several.most_calls(None), several.most_calls(3)) == (None, 3)


def test_special_tokens_of_calls_are_shown(tiny_dir: Path) -> None:
    """All but those that end a text."""
    definition = json.loads((tiny_dir / "tokenizer.json").read_text())
    marks = ["[TOOL_CALLS]", "[ARGS]", "<|end|>", "<|other|>"]
    for token_id, mark in enumerate(marks, 10_000):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        token = {"id": token_id, "content": mark, "special": True, **flags}
        definition["added_tokens"].append(token)
    tokenizer = Tokenizer(json.dumps(definition))
    end = tokenizer.token_id("<|end|>")
    assert end is not None
    tokenizer.eos_ids = frozenset([end])
    found = AnswerFormat.of(template_of(SHOWN["mistral"] + "<|end|>"), tokenizer)
    assert found.calls is not None and found.calls.name == "mistral"
    assert found.shown == {"[TOOL_CALLS]", "[ARGS]"}
    detokenizer = Detokenizer(tokenizer, shown=found.shown)
    ids = tokenizer.encode('[TOOL_CALLS]f[ARGS]{"a": "b"}<|other|>')
    text = "".join(detokenizer.push(token).text for token in ids) + detokenizer.flush()
    assert text == '[TOOL_CALLS]f[ARGS]{"a": "b"}'
    assert found.maker("", TOOLS).make(text, is_last=True)[0] == CallPiece(0, ANY, "f")


def test_the_prompt_that_opens_reasoning_decides(tokenizer: Tokenizer) -> None:
    """Here after a user's message alone, with a tokenizer that has no such token."""
    opening = "{% if messages[-1].role == 'user' %}<think>\n{% endif %}"
    template = template_of("", opening)
    found = AnswerFormat.of(template, tokenizer)
    assert found.reasons
    prompt = template.render([{"role": "user", "content": "x"}])
    assert found.before(prompt) == "open"
    assert found.maker(prompt, None).make("a</think>b", is_last=True) == (
        ReasoningPiece("a"),
        TextPiece("b"),
    )
    kept = AnswerFormat.of(template, tokenizer, reasoning_format="none")
    assert kept.before(prompt) == "nothing"


@pytest.mark.parametrize("name", ["mistral-id", "solar"])
def test_the_words_around_an_id_are_shown_in_a_named_format_too(name: str) -> None:
    """Without them a name and its id are one word."""
    backend = BACKENDS["fallback"]()
    words = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|tool_calls|>", "<|tool_call:begin|>"]
    words += ["<|tool_call:name|>", "<|tool_call:args|>"]
    backend.add_special_tokens(words)
    found = AnswerFormat.of(template_of(""), Tokenizer(backend.to_str()), tool_format=name)
    assert found.shown == {word for word in words if word.startswith("[") == (name != "solar")}


@pytest.mark.slow
def test_a_named_format_wins(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    answer_format = AnswerFormat.of(
        template, tokenizer, reasoning_format="none", tool_format="llama-json"
    )
    assert answer_format.calls is not None and answer_format.calls.name == "llama-json"
    assert not answer_format.reasons
    assert AnswerFormat.of(template, tokenizer, tool_format="none").calls is None


def test_reasoning_may_be_opened_by_the_prompt() -> None:
    answer_format = AnswerFormat(reasons=True)
    opened = answer_format.maker("<assistant>\n<think>\n", None)
    assert opened.make("a\n</think>\n\nb", is_last=True) == (ReasoningPiece("a"), TextPiece("b"))
    closed = answer_format.maker("<assistant>\n<think>\n\n</think>\n\n", None)
    assert closed.make("b", is_last=True) == (TextPiece("b"),)


def test_calls_are_parsed_only_if_there_are_tools(
    template: ChatTemplate, tokenizer: Tokenizer
) -> None:
    answer_format = AnswerFormat.of(template, tokenizer)
    said = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    with_tools = answer_format.maker("", TOOLS, call_id=lambda: "id").make(said, is_last=True)
    assert with_tools[0] == CallPiece(0, "id", "f")
    assert answer_format.maker("", None).make(said, is_last=True) == (TextPiece(said),)
