"""A client that openapi-python-client has generated from the server's document."""

from __future__ import annotations

from luceasync_client import Client
from luceasync_client.api.anthropic import post_v1_messages
from luceasync_client.api.ollama import get_api_tags, post_api_generate
from luceasync_client.api.open_ai import get_v1_models, post_tokenize, post_v1_chat_completions
from luceasync_client.api.server import get_status
from luceasync_client.models import (
    AnthropicMessage,
    AnthropicMessageRole,
    ChatBody,
    ChatMessage,
    ChatMessageRole,
    MessagesBody,
    OllamaGenerateBody,
    OpenAiError,
    TokenizeBody,
)
from told import MODEL, URL, WORDS, tell

client = Client(base_url=URL)


def chat():
    hello = ChatMessage(role=ChatMessageRole.USER, content="Hello")
    body = ChatBody(model=MODEL, messages=[hello], max_tokens=20)
    told = post_v1_chat_completions.sync(client=client, body=body)
    [choice] = told.choices
    assert choice.message.content == WORDS and choice.finish_reason == "stop"
    assert told.usage.completion_tokens > 0 and told.timings.prompt_n > 0


def error():
    body = ChatBody(messages=[ChatMessage(role=ChatMessageRole.USER, content="x")], temperature=9)
    told = post_v1_chat_completions.sync_detailed(client=client, body=body)
    assert told.status_code == 400 and isinstance(told.parsed, OpenAiError)
    assert told.parsed.error.param == "temperature"


def messages():
    asked = AnthropicMessage(role=AnthropicMessageRole.USER, content="Hello")
    body = MessagesBody(model=MODEL, max_tokens=20, messages=[asked])
    told = post_v1_messages.sync(client=client, body=body)
    assert told.content[0].text == WORDS


def generate():
    body = OllamaGenerateBody(model=MODEL, prompt="Hello", stream=False)
    assert post_api_generate.sync(client=client, body=body).response == WORDS


def pages():
    assert get_v1_models.sync(client=client).data[0].id == MODEL
    assert get_api_tags.sync(client=client).models[0].name == MODEL
    status = get_status.sync(client=client)
    assert status.ready and status.cache.num_nodes is not None
    assert post_tokenize.sync(client=client, body=TokenizeBody(prompt="Hello")).count > 0


tell(chat, error, messages, generate, pages)
