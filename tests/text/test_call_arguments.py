"""Arguments of tool calls arrive as text and reach templates as objects."""

from __future__ import annotations

import copy

import pytest

from luceasync.text.history import History
from luceasync.text.past_calls import Arguments, with_parsed_arguments
from luceasync.text.template import ChatTemplate

TEXT = '{"path":"a b",  "line": 1.50}'  # spaced as no serialiser would
ASKED = {"role": "user", "content": "Hi"}
# As Qwen3.5's: arguments one by one, which text cannot give.
BY_NAME = """\
{%- for m in messages %}<|im_start|>{{ m.content }}
{%- for call in m.tool_calls or [] %}
{%- for name, value in call.function.arguments | items %}<{{ name }}>{{ value }}{% endfor %}
{%- endfor %}<|im_end|>{% endfor %}"""
# As Qwen3's: the JSON of them.
AS_JSON = BY_NAME.replace(
    "{%- for name, value in call.function.arguments | items %}<{{ name }}>{{ value }}{% endfor %}",
    "{{ call.function.arguments | tojson }}",
)

# As DeepSeek's and others: text among texts.
AS_TEXT = """\
{%- for m in messages %}<|im_start|>{{ m.content }}
{%- for tool in m['tool_calls'] or [] %}
{{- '```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```' }}
{%- endfor %}<|im_end|>{% endfor %}"""
WAYS_TO_WRITE = {
    "plus": AS_TEXT,
    "tilde": AS_TEXT.replace(" + ", " ~ "),
    "print": AS_TEXT.replace("' + tool", "' }}{{ tool").replace("] + '", "] }}{{ '"),
    "filter": AS_TEXT.replace("'arguments']", "'arguments'] | string"),
    "first": AS_TEXT.replace("'```json' + '\\n' + ", "").replace("+ '```'", ""),
}


def calling(arguments) -> dict:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


def arguments_of(message) -> object:
    return message["tool_calls"][0]["function"]["arguments"]


def test_a_template_gets_the_parsed_object():
    text = ChatTemplate(BY_NAME).render([ASKED, calling(TEXT)])
    assert text == ChatTemplate(BY_NAME).render([ASKED, calling({"path": "a b", "line": 1.5})])
    assert "<path>a b<line>1.5" in text


@pytest.mark.parametrize("text", ["", "{", "[1]", '"a"', "7", "null", "[" * 100_000])
def test_anything_but_an_object_stays_text(text: str):
    (message,) = with_parsed_arguments([calling(text)])
    assert arguments_of(message) == text


@pytest.mark.parametrize(
    "message",
    [
        ASKED,
        {"role": "assistant", "tool_calls": None},
        {"role": "assistant", "tool_calls": [None, {"function": None}, {"function": {}}]},
        calling(Arguments({"path": "a"}, '{"path":  "a"}')),
    ],
)
def test_a_message_without_such_text_is_passed_on(message):
    assert with_parsed_arguments([message])[0] is message


@pytest.mark.parametrize("source", WAYS_TO_WRITE.values(), ids=WAYS_TO_WRITE)
def test_a_template_that_writes_arguments_as_text_gets_the_original_text(source: str):
    text = ChatTemplate(source).render([ASKED, calling(TEXT)])
    assert f"\n{TEXT}\n" in text or f"|>{TEXT}\n" in text


def test_an_object_from_a_client_is_written_as_json():
    text = ChatTemplate(AS_TEXT).render([ASKED, calling({"path": "\u00e4", "all": True})])
    assert '\n{"path": "\u00e4", "all": true}\n' in text


def test_a_whole_call_is_written_as_one_object():
    source = AS_TEXT.replace("tool['function']['arguments']", "(tool.function | tojson)")
    text = ChatTemplate(source).render([ASKED, calling(TEXT)])
    assert '{"name": "f", "arguments": {"path": "a b", "line": 1.5}}' in text


def test_arguments_that_cannot_be_json_are_passed_on():
    call = calling({"path": object()})
    assert with_parsed_arguments([call])[0] is call


def test_the_clients_messages_are_not_changed():
    messages = [ASKED, calling(TEXT)]
    before = copy.deepcopy(messages)
    ChatTemplate(BY_NAME).render(messages)
    assert messages == before


def test_an_unchanged_call_has_the_tokens_that_the_model_wrote(byte_level):
    template, history = ChatTemplate(AS_JSON), History(byte_level)
    prompt = template.render([ASKED]) + "<|im_start|>"
    ids, said = byte_level.encode(prompt), [t for c in TEXT for t in byte_level.encode(c)]
    history.remember(prompt, ids, said)
    whole = template.render([ASKED, calling(TEXT)])
    assert history.recall(whole)[: len(ids + said)].tolist() == ids + said
    assert byte_level.encode(whole)[: len(ids + said)] != ids + said
