"""Anthropic's own package: messages, streams, tools, counts, models."""

from __future__ import annotations

import anthropic
from told import FOUND, LONG, LOOK, MODEL, SCHEMA, URL, WORDS, covers, tell

client = anthropic.Anthropic(base_url=URL, api_key="k", max_retries=0)
TOOLS = [{"name": "look_up", "description": "Looks a name up.", "input_schema": SCHEMA}]
MARK = {"type": "ephemeral"}


def prompt_tokens(usage):
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


def models():
    assert client.models.list().data[0].id == client.models.retrieve(MODEL).id == MODEL
    assert client.models.list().data[0].display_name


def messages():
    block = {"type": "text", "text": LONG, "cache_control": MARK}
    first = client.messages.create(
        model=MODEL, max_tokens=100, messages=[{"role": "user", "content": [block]}]
    )
    assert first.content[0].text == WORDS
    said = [
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "And json.loads?"},
    ]
    second = client.messages.create(model=MODEL, max_tokens=100, messages=said)
    covers(second.usage.cache_read_input_tokens, prompt_tokens(first.usage))


def stream():
    said = [{"role": "user", "content": "Hello"}]
    with client.messages.stream(model=MODEL, max_tokens=100, messages=said) as events:
        text = "".join(events.text_stream)
    assert text == WORDS


def tools():
    ask = {
        "model": MODEL,
        "max_tokens": 500,
        "tools": TOOLS,
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "adaptive"},
        "system": [{"type": "text", "text": "You look names up.", "cache_control": MARK}],
    }
    said = [{"role": "user", "content": LOOK}]
    with client.messages.stream(messages=said, **ask) as events:
        first = events.get_final_message()
    [call] = [block for block in first.content if block.type == "tool_use"]
    assert call.input == {"name": "json.dumps", "depth": 3} and first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": FOUND}
    said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(messages=said, **ask)
    assert second.content[-1].text == "It writes JSON"
    covers(second.usage.cache_read_input_tokens, prompt_tokens(first.usage))


def count_tokens():
    said = [{"role": "user", "content": LONG}]
    counted = client.messages.count_tokens(model=MODEL, messages=said)
    first = client.messages.create(model=MODEL, max_tokens=1, messages=said)
    assert counted.input_tokens == prompt_tokens(first.usage)


def errors():
    try:
        client.messages.create(model="other", max_tokens=1, messages=[])
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error"
    else:
        raise AssertionError("another model was served")


tell(models, messages, stream, tools, count_tokens, errors)
