"""Libraries that speak Ollama's API: langchain-ollama and litellm."""

from __future__ import annotations

import litellm
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaLLM
from told import FOUND, LONG, LOOK, MODEL, SCHEMA, URL, WORDS, tell

chat_model = ChatOllama(model=MODEL, base_url=URL, num_ctx=8192, validate_model_on_init=True)
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "", "parameters": SCHEMA},
}
ASK = {"model": f"ollama_chat/{MODEL}", "api_base": URL}


def langchain():
    messages = [HumanMessage(LONG)]
    first = chat_model.invoke(messages)
    assert first.content == WORDS and first.usage_metadata["output_tokens"] > 0
    second = chat_model.invoke([*messages, first, HumanMessage("And json.loads?")])
    assert second.content == WORDS
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


def langchain_stream():
    parts = [*chat_model.stream("Hello")]
    assert "".join(part.content for part in parts) == WORDS and len(parts) > 3


def langchain_reasoning():
    thinking = ChatOllama(model=MODEL, base_url=URL, reasoning=True)
    told = thinking.invoke("Hello")
    assert told.content == WORDS and "Let me see" in told.additional_kwargs["reasoning_content"]


def langchain_tools():
    bound = chat_model.bind_tools([TOOL])
    messages = [HumanMessage(LOOK)]
    first = bound.invoke(messages)
    [call] = first.tool_calls
    assert call["args"] == {"name": "json.dumps", "depth": 3}
    second = bound.invoke([*messages, first, ToolMessage(FOUND, tool_call_id=call["id"])])
    assert second.content == "It writes JSON"


def langchain_text():
    assert OllamaLLM(model=MODEL, base_url=URL).invoke("Hello") == WORDS


def litellm_chat():
    told = litellm.completion(messages=[{"role": "user", "content": "Hello"}], **ASK)
    assert told.choices[0].message.content == WORDS


def litellm_stream():
    parts = litellm.completion(messages=[{"role": "user", "content": "Hello"}], stream=True, **ASK)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == WORDS


def litellm_tools():
    messages = [{"role": "user", "content": LOOK}]
    told = litellm.completion(messages=messages, tools=[TOOL], **ASK)
    [call] = told.choices[0].message.tool_calls
    assert call.function.name == "look_up"
    result = {"role": "tool", "tool_call_id": call.id, "content": FOUND}
    messages += [told.choices[0].message.model_dump(), result]
    second = litellm.completion(messages=messages, tools=[TOOL], **ASK)
    assert second.choices[0].message.content == "It writes JSON"


tell(
    langchain,
    langchain_stream,
    langchain_reasoning,
    langchain_tools,
    langchain_text,
    litellm_chat,
    litellm_stream,
    litellm_tools,
)
