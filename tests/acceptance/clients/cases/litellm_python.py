"""litellm, by each of the providers that people name for a server of their own."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its prices are not fetched

import litellm
from told import FOUND, LONG, LOOK, MODEL, SCHEMA, URL, WORDS, covers, tell

litellm.telemetry = False
OPEN = {"api_base": f"{URL}/v1", "api_key": "k"}
FUNCTION = {"name": "look_up", "description": "Looks a name up.", "parameters": SCHEMA}


def openai():
    messages = [{"role": "user", "content": LONG}]
    first = litellm.completion(f"openai/{MODEL}", messages, **OPEN)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    again = [*messages, said, {"role": "user", "content": "And json.loads?"}]
    second = litellm.completion(f"openai/{MODEL}", again, **OPEN)
    covers(second.usage.prompt_tokens_details.cached_tokens, first.usage.prompt_tokens)


def hosted_vllm_stream():
    messages = [{"role": "user", "content": "Hello"}]
    chunks = litellm.completion(f"hosted_vllm/{MODEL}", messages, stream=True, **OPEN)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == WORDS


def tools():
    messages = [{"role": "user", "content": LOOK}]
    ask = {"tools": [{"type": "function", "function": FUNCTION}], **OPEN}
    first = litellm.completion(f"openai/{MODEL}", messages, **ask)
    [call] = first.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": FOUND}
    second = litellm.completion(
        f"openai/{MODEL}", [*messages, first.choices[0].message.model_dump(), result], **ask
    )
    assert second.choices[0].message.content == "It writes JSON"
    covers(second.usage.prompt_tokens_details.cached_tokens, first.usage.prompt_tokens)


def anthropic():
    messages = [{"role": "user", "content": LONG}]
    ask = {"api_base": URL, "api_key": "k", "max_tokens": 50}
    first = litellm.completion(f"anthropic/{MODEL}", messages, **ask)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    again = [*messages, said, {"role": "user", "content": "And json.loads?"}]
    second = litellm.completion(f"anthropic/{MODEL}", again, **ask)
    covers(second.usage.prompt_tokens_details.cached_tokens, first.usage.prompt_tokens)


def text():
    answer = litellm.text_completion(
        "The sky is", f"text-completion-openai/{MODEL}", max_tokens=4, **OPEN
    )
    assert answer.choices[0].text


def responses():
    answer = litellm.responses(model=f"openai/{MODEL}", input="Hello", **OPEN)
    assert answer.output[-1].content[0].text == WORDS


tell(openai, hosted_vllm_stream, tools, anthropic, text, responses)
