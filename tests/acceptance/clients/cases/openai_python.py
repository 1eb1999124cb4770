"""OpenAI's own package: chat, responses, completions, models."""

from __future__ import annotations

import json

import openai
from told import AGAIN, FOUND, LONG, LOOK, MODEL, SCHEMA, URL, WORDS, covers, tell

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="k", max_retries=0)
FUNCTION = {"name": "look_up", "description": "Looks a name up.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]


def models():
    assert client.models.list().data[0].id == client.models.retrieve(MODEL).id == MODEL


def chat():
    messages = [{"role": "user", "content": LONG}]
    first = client.chat.completions.create(model=MODEL, messages=messages)
    assert first.choices[0].message.content == WORDS
    messages += [first.choices[0].message, {"role": "user", "content": "And json.loads?"}]
    second = client.chat.completions.create(model=MODEL, messages=messages)
    covers(second.usage.prompt_tokens_details.cached_tokens, first.usage.prompt_tokens)


def stream():
    options = {"include_usage": True}
    messages = [{"role": "user", "content": "Hello"}]
    with client.chat.completions.stream(
        model=MODEL, messages=messages, stream_options=options
    ) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == WORDS and final.usage.completion_tokens > 0


def tools():
    messages = [{"role": "user", "content": LOOK}]
    ask = {"model": MODEL, "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True}
    first = client.chat.completions.create(messages=messages, **ask)
    [call] = first.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"name": "json.dumps", "depth": 3}
    assert first.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": FOUND}
    messages += [first.choices[0].message, result]
    second = client.chat.completions.create(messages=messages, **ask)
    assert second.choices[0].message.content == "It writes JSON"
    covers(second.usage.prompt_tokens_details.cached_tokens, first.usage.prompt_tokens)
    messages += [second.choices[0].message, {"role": "user", "content": AGAIN}]
    third = client.chat.completions.create(messages=messages, **ask)
    assert third.choices[0].message.tool_calls[0].function.name == "look_up"
    covers(third.usage.prompt_tokens_details.cached_tokens, first.usage.prompt_tokens)


def responses():
    asked = [{"role": "user", "content": LOOK}]
    ask = {"model": MODEL, "tools": [{"type": "function", "strict": False, **FUNCTION}]}
    first = client.responses.create(input=asked, **ask)
    [call] = [item for item in first.output if item.type == "function_call"]
    asked += [item.model_dump() for item in first.output]
    asked += [{"type": "function_call_output", "call_id": call.call_id, "output": FOUND}]
    second = client.responses.create(input=asked, **ask)
    assert second.output_text == "It writes JSON"
    covers(second.usage.input_tokens_details.cached_tokens, first.usage.input_tokens)


def responses_stream():
    ask = {"model": MODEL, "instructions": "Be brief.", "text": {"verbosity": "low"}}
    with client.responses.stream(input="Hello", **ask) as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert final.output_text == WORDS


def completions():
    plain = client.completions.create(model=MODEL, prompt="The sky is", max_tokens=4)
    assert plain.choices[0].text
    scored = client.completions.create(
        model=MODEL, prompt=[[5, 6, 7, 8]], max_tokens=1, logprobs=1, echo=True
    )
    assert scored.choices[0].logprobs.token_logprobs[0] is None
    assert len(scored.choices[0].logprobs.tokens) == 5
    chunks = [*client.completions.create(model=MODEL, prompt="The sky is", stream=True)]
    assert chunks[-1].choices == [] or chunks[-1].choices[0].finish_reason


def errors():
    for wrong, kind in (
        ({"temperature": 9}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
    ):
        try:
            ask = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **wrong}
            client.chat.completions.create(**ask)
        except kind as error:
            assert error.body["message"]
        else:
            raise AssertionError(f"{wrong} was taken")


tell(models, chat, stream, tools, responses, responses_stream, completions, errors)
