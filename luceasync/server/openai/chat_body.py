"""The JSON body of a chat request: its types, its ranges, and the Request that follows from it.

Owns what is allowed and the words of each refusal. Knows nothing of HTTP, tokens or templates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import msgspec
from starlette.datastructures import Headers

from luceasync.errors import RequestError
from luceasync.request import ChatPrompt, ModelCard, Request
from luceasync.server.fields import (
    AskedPins,
    at_most,
    budget,
    check_arguments,
    conversation_of,
    decode,
    in_range,
    most_tokens,
    pins_of,
    refuse,
    template_words,
)
from luceasync.server.http.auth import Caller
from luceasync.server.openai.common import refuse_unserved, unknown_model
from luceasync.server.openai.sampling import (
    SamplingBody,
    constraint_of,
    min_tokens_of,
    num_choices_of,
    priority_of,
    sampling_of,
    stops_of,
)

# Which tools an answer must call, as OpenAI's endpoints say it. Owns the words. How calls are
# forced is for the engine.


ToolChoice = str | dict[str, Any] | None
EXPECTED = "'none', 'auto', 'required', or one of the tools: {'type': 'function', ...}"


def must_call(choice: ToolChoice, tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The names of the `tools` of which calls must come, none where none must. Raises RequestError
    for a choice that is none, and for a tool that is not there.
    """
    if choice in (None, "none", "auto"):
        return ()
    names = tuple(tool["function"]["name"] for tool in tools)
    if choice == "required":
        return names or refuse("tool_choice", choice, "'tools' beside it")
    if not isinstance(choice, dict) or choice.get("type") != "function":
        refuse("tool_choice", choice, EXPECTED)
    function = choice.get("function", choice)  # the Responses API has the name beside the type
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        refuse("tool_choice", choice, "one of 'tools' by its name")
    return (str(name),)


def max_calls(choice: ToolChoice, parallel: bool | None) -> int | None:
    """How many calls may come: one of a tool that is named, or where there may not be more."""
    return 1 if parallel is False or isinstance(choice, dict) else None


# The tools of a request and the calls of earlier turns, before a chat template is given them.
# Owns what a tool and a call must have. A template would write a malformed one into the prompt,
# or fail in words that name no field. Knows nothing of what a tool does.


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError, which names the field, unless all are functions with a name."""
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.get("type") != "function":
            _refuse(f"{where}.type", "'function' (no other kind is served)")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            _refuse(f"{where}.function", "an object")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            _refuse(f"{where}.function.name", "a name")
        if not isinstance(function.get("description", ""), str | None):
            _refuse(f"{where}.function.description", "text")
        if not isinstance(function.get("parameters"), Mapping | None):
            _refuse(f"{where}.function.parameters", "an object, which is a JSON schema")
        check_arguments(f"{where}.function.parameters", function.get("parameters") or {})
        if not isinstance(function.get("strict", False), bool | None):
            _refuse(f"{where}.function.strict", "true or false")


def check_calls(where: str, calls: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError, which names the field below `where`, unless all call something by name,
    with arguments as text or as an object.
    """
    for i, call in enumerate(calls):
        function = call.get("function")
        if function is None:
            function = call  # as some templates have it: the name stands in the call itself
        if not isinstance(function, Mapping):
            _refuse(f"{where}[{i}].function", "an object")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            _refuse(f"{where}[{i}].function.name", "a name")
        if not isinstance(function.get("arguments"), str | Mapping | None):
            _refuse(f"{where}[{i}].function.arguments", "text, or an object")


def _refuse(param: str, expected: str) -> NoReturn:
    """Without the value, which may be long."""
    raise RequestError(f"Invalid value for '{param}': expected {expected}.", param=param)


MAX_TOP_LOGPROBS = 20
JOIN = "\n"  # between the parts of one message
MAX_MESSAGES = 8192
MAX_PARTS = 8192  # of one message's content
MAX_TOOLS = 1024
MAX_TOOL_CALLS = 1024  # of one message

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ContentPart(msgspec.Struct):
    """One part of a message's content; only parts of type "text" are served. `cache_control`, as
    gateways know it, is a mark, whatever it holds.
    """

    type: str
    text: str | None = None
    cache_control: msgspec.Raw = msgspec.Raw()


class Message(msgspec.Struct, omit_defaults=True):
    """One message as clients send it; what the chat template may use is kept."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatBody(SamplingBody, kw_only=True):
    """The fields of `POST /v1/chat/completions` that are read; null is the same as absent."""

    messages: list[Message]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    ignore_eos: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    keep_prefix: bool | None = None
    kvflash_pin: AskedPins | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A checked body: what the engine gets, and how the answer is to be sent."""

    request: Request
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


_decoder = msgspec.json.Decoder(ChatBody)
_no_headers = Headers()


def parse_chat(
    body: bytes, card: ModelCard, caller: Caller, headers: Headers = _no_headers
) -> ChatCall:
    """Check a JSON body and turn it into a ChatCall of the tenant that `caller` is.

    Raises RequestError with the field's path as `param`: status 400, or 404 for a model that is not
    the one served.
    """
    chat = decode(_decoder, body)
    if chat.model is not None and not card.serves(chat.model):
        raise unknown_model(chat.model, card)
    options = chat.stream_options or StreamOptions()
    _refuse_unserved(chat)
    return ChatCall(
        request=Request(
            ChatPrompt(
                messages=messages_of(_messages(chat)),
                tools=None if chat.tool_choice == "none" else chat.tools or None,
                template_kwargs=template_words(chat.reasoning_effort, chat.chat_template_kwargs),
                max_calls=max_calls(chat.tool_choice, chat.parallel_tool_calls),
                must_call=must_call(chat.tool_choice, chat.tools or ()),
                marks=tuple(_marks(chat.messages)),
            ),
            sampling=sampling_of(chat),
            max_tokens=_max_tokens(chat),
            min_tokens=min_tokens_of(chat, _max_tokens(chat)),
            stop=stops_of(chat),
            ignore_eos=bool(chat.ignore_eos),
            num_choices=num_choices_of(chat),
            top_logprobs=_top_logprobs(chat),
            tenant=caller.tenant(chat.cache_salt),
            client=caller.client,
            keep_prefix=bool(chat.keep_prefix),
            pins=pins_of(chat.kvflash_pin),
            constraint=constraint_of(chat),
            most_reasoning_tokens=_most_reasoning(chat),
            priority=priority_of(chat.priority),
            conversation=conversation_of(headers, chat.prompt_cache_key),
        ),
        stream=bool(chat.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
    )


def _most_reasoning(chat: ChatBody) -> int | None:
    """By the effort, or a budget of tokens as Qwen's servers or vLLM name it."""
    most = most_tokens("reasoning_effort", chat.reasoning_effort)
    most = budget("thinking_budget", chat.thinking_budget, most)
    return budget("thinking_token_budget", chat.thinking_token_budget, most)


def _refuse_unserved(chat: ChatBody) -> None:
    """Options that change the answer are refused rather than dropped when nobody honours them."""
    refuse_unserved(chat)
    at_most("tools", chat.tools or (), MAX_TOOLS, "tools")
    check_tools(chat.tools or ())


def _messages(chat: ChatBody) -> list[Message]:
    """None are enough where only the tools of later requests are to be kept."""
    if not chat.messages and not (chat.tools and chat.keep_prefix and _max_tokens(chat) == 0):
        refuse("messages", [], "at least one message")
    at_most("messages", chat.messages, MAX_MESSAGES, "messages")
    return chat.messages


def messages_of(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as a chat template gets them. Raises RequestError, which names the field."""
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(index: int, message: Message) -> dict[str, Any]:
    """The message as the chat template gets it; `developer` is what templates call `system`."""
    where = f"messages[{index}].content"
    if message.content is None and message.role != "assistant":
        refuse(where, None, f"text for the role {message.role!r}")
    at_most(f"messages[{index}].tool_calls", message.tool_calls or (), MAX_TOOL_CALLS, "calls")
    check_calls(f"messages[{index}].tool_calls", message.tool_calls or ())
    fields = {name: value for name, value in _fields(message) if value is not None}
    fields["role"] = "system" if message.role == "developer" else message.role
    fields["content"] = _content(where, message.content)
    return fields


def _fields(message: Message) -> list[tuple[str, Any]]:
    return [(name, getattr(message, name)) for name in Message.__struct_fields__]


def _content(where: str, content: str | list[ContentPart] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    at_most(where, content, MAX_PARTS, "parts")
    texts = []
    for i, part in enumerate(content):
        if part.type != "text":
            refuse(f"{where}[{i}].type", part.type, "'text' (this model reads text only)")
        if part.text is None:
            refuse(f"{where}[{i}].text", None, "text")
        texts.append(part.text)
    return JOIN.join(texts)


def _marks(messages: list[Message]) -> Iterator[tuple[int, int]]:
    """Messages, and after how many characters of them a part ends that has a mark and is not the
    last: turns are kept anyway.
    """
    for i, message in enumerate(messages):
        num_chars = -len(JOIN)
        for part in message.content[:-1] if isinstance(message.content, list) else ():
            num_chars += len(JOIN) + len(part.text or "")
            if bytes(part.cache_control) not in (b"", b"null"):
                yield i, num_chars


def _max_tokens(chat: ChatBody) -> int | None:
    """`max_completion_tokens` is the newer name and wins over `max_tokens`.

    None at all are enough where the prompt is to be kept: then it is computed, and that is all.
    """
    least = 0 if chat.keep_prefix else 1
    for param, value in (
        ("max_completion_tokens", chat.max_completion_tokens),
        ("max_tokens", chat.max_tokens),
    ):
        if value is not None:
            return in_range(param, value, least, 2**31 - 1)
    return None


def _top_logprobs(chat: ChatBody) -> int | None:
    if chat.top_logprobs is not None:
        if not chat.logprobs:
            refuse("top_logprobs", chat.top_logprobs, "'logprobs' to be true with it")
        return in_range("top_logprobs", chat.top_logprobs, 0, MAX_TOP_LOGPROBS)
    return 0 if chat.logprobs else None
