"""The JSON body of a chat request: its types, its ranges, and the Request that follows from it.

Owns what is allowed in messages and tools. Knows nothing of tokens or templates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import msgspec
from starlette.datastructures import Headers

from luceasync.errors import RequestError
from luceasync.request import ChatPrompt, ModelCard, Request
from luceasync.server.fields import (
    at_most,
    budget_or,
    check_arguments_schema,
    decode,
    effort_tokens,
    in_range,
    refuse,
    template_kwargs_of,
    tool_function,
)
from luceasync.server.http.auth import Caller
from luceasync.server.openai.common import check_model
from luceasync.server.openai.custom_tools import custom_function, input_arguments
from luceasync.server.openai.request_body import (
    SamplingBody,
    StreamOptions,
    ToolChoice,
    allowed_tools,
    max_calls,
    max_tokens_of,
    must_call,
    name_of,
    request_of,
)
from luceasync.server.unserved import refuse_unserved

THINKING_TYPES = {"enabled": True, "adaptive": True, "auto": None, "disabled": False}


class ThinkingSwitch(msgspec.Struct):
    """The field of Z.ai and DeepSeek, in the form of Anthropic's."""

    type: str | None = None
    budget_tokens: int | None = None


class ChatReasoning(msgspec.Struct):
    """OpenRouter's field."""

    effort: str | None = None
    max_tokens: int | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ReasoningBody(SamplingBody, kw_only=True):
    """The fields that control reasoning."""

    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    enable_thinking: bool | None = None
    think: bool | str | None = None
    thinking: ThinkingSwitch | bool | None = None
    reasoning: ChatReasoning | None = None
    include_reasoning: bool | None = None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The chat template's variables, the maximum number of reasoning tokens (None: unlimited), and
    whether the reasoning is sent to the client.
    """

    template_kwargs: dict[str, Any]
    most_tokens: int | None
    is_shown: bool


def reasoning_of(body: ReasoningBody) -> Reasoning:
    """The reasoning that the fields request. Raises RequestError, which names the invalid field."""
    router = body.reasoning or ChatReasoning()
    where, effort = _effort(body, router)
    most = effort_tokens(where, effort)
    kwargs = template_kwargs_of(effort, None)
    thinks = _switch(body, router)
    if thinks is not None:
        kwargs["enable_thinking"] = thinks
        most = most if thinks else 0
    for param, tokens in (
        ("reasoning.max_tokens", router.max_tokens),
        ("thinking.budget_tokens", _switched(body).budget_tokens),
        ("thinking_budget", body.thinking_budget),
        ("thinking_token_budget", body.thinking_token_budget),
    ):
        most = budget_or(most, param, tokens)
    is_shown = body.include_reasoning is not False and not router.exclude
    return Reasoning({**kwargs, **(body.chat_template_kwargs or {})}, most, is_shown)


def _effort(body: ReasoningBody, router: ChatReasoning) -> tuple[str, str | None]:
    """The name of the field that states the effort, and the effort."""
    if body.reasoning_effort is not None:
        return "reasoning_effort", body.reasoning_effort
    if router.effort is not None:
        return "reasoning.effort", router.effort
    return "think", body.think if isinstance(body.think, str) else None


def _switch(body: ReasoningBody, router: ChatReasoning) -> bool | None:
    """Whether the model thinks; None: the model's default."""
    switched = _switched(body)
    if switched.type is not None and switched.type not in THINKING_TYPES:
        refuse("thinking.type", switched.type, f"one of {', '.join(THINKING_TYPES)}")
    asked = (
        body.enable_thinking,
        body.think if isinstance(body.think, bool) else None,
        THINKING_TYPES.get(switched.type or "auto"),
        router.enabled,
    )
    return next((one for one in asked if one is not None), None)


def _switched(body: ReasoningBody) -> ThinkingSwitch:
    match body.thinking:
        case None:
            return ThinkingSwitch()
        case bool(thinks):
            return ThinkingSwitch("enabled" if thinks else "disabled")
        case switch:
            return switch


MAX_TOP_LOGPROBS = 20
JOIN = "\n"  # between the parts of one message
MAX_MESSAGES = 8192
MAX_PARTS = 8192  # of one message's content
MAX_TOOLS = 1024
OWN_NAME = "a name that no other tool has"
MAX_TOOL_CALLS = 1024  # of one message
REASONING = ("reasoning_content", "reasoning", "thinking")  # of a message, under any name

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ContentPart(msgspec.Struct):
    """One part of a message's content; only parts of type "text" are supported. `cache_control`,
    which gateways pass on, marks the end of a prefix worth keeping, whatever its value.
    """

    type: str
    text: str | None = None
    cache_control: msgspec.Raw = msgspec.Raw()


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One message, with the fields that a chat template may use. Reasoning has three names."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None


class ChatBody(ReasoningBody, kw_only=True):
    """The fields of `POST /v1/chat/completions` that are read; null is the same as absent."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    keep_prefix: bool | None = None


@dataclass(frozen=True, slots=True)
class ParsedChat:
    """A checked body: the engine's request, and how to send the answer. `custom_tools` are the
    names of tools whose calls have a single text argument.
    """

    request: Request
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    shows_reasoning: bool = True
    shows_stop: bool = False
    custom_tools: frozenset[str] = frozenset()


_decoder = msgspec.json.Decoder(ChatBody)
_no_headers = Headers()


def parse_chat(
    body: bytes, card: ModelCard, caller: Caller, headers: Headers = _no_headers
) -> ParsedChat:
    """Check a JSON body and make the request of `caller`.

    Raises RequestError with the field's path as `param`: status 400, or 404 for a model that is not
    served.
    """
    chat = decode(_decoder, body)
    check_model(chat.model, card)
    refuse_unserved(chat)
    at_most("tools", chat.tools or (), MAX_TOOLS, "tools")
    check_tools(chat.tools or ())
    options = chat.stream_options or StreamOptions()
    reasoning = reasoning_of(chat)
    prompt = _prompt(chat, reasoning.template_kwargs)
    request = request_of(chat, prompt, _max_tokens(chat), caller, headers)
    return ParsedChat(
        replace(
            request,
            top_logprobs=_top_logprobs(chat),
            keep_prefix=bool(chat.keep_prefix),
            most_reasoning_tokens=reasoning.most_tokens,
        ),
        stream=bool(chat.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        shows_reasoning=reasoning.is_shown,
        shows_stop=bool(chat.include_stop_str_in_output),
        custom_tools=frozenset(
            tool["custom"]["name"] for tool in chat.tools or () if tool["type"] == "custom"
        ),
    )


def _prompt(chat: ChatBody, template_kwargs: dict[str, Any]) -> ChatPrompt:
    choice, allowed = allowed_tools(chat.tool_choice)
    if isinstance(choice, dict) and choice.get("type") == "custom":
        choice = {"type": "function", "function": choice.get("custom", choice)}
    names = None if allowed is None else [name_of(each) for each in allowed]
    offered = [
        (_schema_place(i, sent), tool)
        for i, (sent, tool) in enumerate(
            zip(chat.tools or (), described_tools(chat.tools or ()), strict=True)
        )
        if choice != "none" and (names is None or tool["function"]["name"] in names)
    ]
    tools = [tool for _, tool in offered]
    return ChatPrompt(
        messages=messages_of(_messages(chat)),
        tools=tools or None,
        template_kwargs=template_kwargs,
        max_calls=max_calls(choice, chat.parallel_tool_calls),
        must_call=must_call(choice, tools),
        schema_places=tuple(place for place, _ in offered),
        marks=tuple(_marks(chat.messages)),
        is_begun=_is_begun(chat),
    )


def _schema_place(index: int, tool: Mapping[str, Any]) -> str:
    """The path of the field with the schema of a tool's arguments."""
    place = "custom.format" if tool["type"] == "custom" else "function.parameters"
    return f"tools[{index}].{place}"


def _is_begun(chat: ChatBody) -> bool:
    """Whether the last message is the beginning of the answer."""
    if not chat.continue_final_message:
        if chat.add_generation_prompt is False:
            refuse("add_generation_prompt", False, "true, or 'continue_final_message' with it")
        return False
    last = chat.messages[-1] if chat.messages else None
    if last is None or last.role != "assistant" or not last.content or last.tool_calls:
        refuse("continue_final_message", True, "the last message to be an assistant's text")
    return True


def _max_tokens(chat: ChatBody) -> int | None:
    """The maximum number of tokens; `max_completion_tokens`, the newer name, takes precedence over
    `max_tokens`.

    0 is allowed with `keep_prefix`: the prompt is prefilled and kept, without an answer.
    """
    return max_tokens_of(chat, "max_completion_tokens", least=0 if chat.keep_prefix else 1)


def _top_logprobs(chat: ChatBody) -> int | None:
    if chat.top_logprobs is not None:
        if not chat.logprobs:
            refuse("top_logprobs", chat.top_logprobs, "'logprobs' to be true with it")
        return in_range("top_logprobs", chat.top_logprobs, 0, MAX_TOP_LOGPROBS)
    return 0 if chat.logprobs else None


# Messages


def _messages(chat: ChatBody) -> list[ChatMessage]:
    """The messages: at least one, unless only tools are to be kept for later requests."""
    if not chat.messages and not (chat.tools and chat.keep_prefix and _max_tokens(chat) == 0):
        refuse("messages", [], "at least one message")
    at_most("messages", chat.messages, MAX_MESSAGES, "messages")
    return chat.messages


def messages_of(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """The messages in the form of chat templates. Raises RequestError, which names the field."""
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(index: int, message: ChatMessage) -> dict[str, Any]:
    """One message for the template; the role `developer` becomes `system`."""
    where = f"messages[{index}].content"
    if message.content is None and message.role not in ("assistant", "tool"):
        refuse(where, None, f"text for the role {message.role!r}")
    at_most(f"messages[{index}].tool_calls", message.tool_calls or (), MAX_TOOL_CALLS, "calls")
    check_calls(f"messages[{index}].tool_calls", message.tool_calls or ())
    fields = {name: value for name, value in _fields(message) if value is not None}
    if message.tool_calls:
        fields["tool_calls"] = [_as_function(call) for call in message.tool_calls]
    if thought := next(filter(None, [fields.pop(name, None) for name in REASONING]), None):
        fields[REASONING[0]] = thought
    fields["role"] = "system" if message.role == "developer" else message.role
    fields["content"] = _content(where, message.content)
    return fields


def _as_function(call: dict[str, Any]) -> dict[str, Any]:
    """A call in function form; a call of a custom tool becomes one of the function that replaces
    it.
    """
    if call.get("type") != "custom":
        return call
    custom = call["custom"]
    arguments = input_arguments(custom.get("input") or "")
    function = {"name": custom["name"], "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


def _fields(message: ChatMessage) -> list[tuple[str, Any]]:
    return [(name, getattr(message, name)) for name in ChatMessage.__struct_fields__]


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


def _marks(messages: list[ChatMessage]) -> Iterator[tuple[int, int]]:
    """(message, character) pairs after which a marked part ends. The end of a message needs no
    mark: whole turns are kept anyway.
    """
    for i, message in enumerate(messages):
        num_chars = -len(JOIN)
        for part in message.content[:-1] if isinstance(message.content, list) else ():
            num_chars += len(JOIN) + len(part.text or "")
            if bytes(part.cache_control) not in (b"", b"null"):
                yield i, num_chars


# Tools. A template would write a malformed tool into the prompt, or fail without naming the field.


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError, which names the field, unless all tools are functions or custom tools
    with a name, and no two differ under the same one.
    """
    named: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.get("type") == "custom":
            _check_custom(f"{where}.custom", tool.get("custom"))
            if named.setdefault(tool["custom"]["name"], tool) != tool:
                _refuse(f"{where}.custom.name", OWN_NAME)
            continue
        if tool.get("type") != "function":
            _refuse(f"{where}.type", "'function' or 'custom' (no other kind is served)")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            _refuse(f"{where}.function", "an object")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            _refuse(f"{where}.function.name", "a name")
        if not isinstance(function.get("description", ""), str | None):
            _refuse(f"{where}.function.description", "text")
        if not isinstance(function.get("parameters"), Mapping | None):
            _refuse(f"{where}.function.parameters", "a JSON schema, which is an object")
        check_arguments_schema(f"{where}.function.parameters", function.get("parameters") or {})
        if not isinstance(function.get("strict", False), bool | None):
            _refuse(f"{where}.function.strict", "true or false")
        if named.setdefault(name, tool) != tool:
            _refuse(f"{where}.function.name", OWN_NAME)


def _check_custom(where: str, custom: object) -> None:
    if not isinstance(custom, Mapping):
        _refuse(where, "an object")
    if not isinstance(custom.get("name"), str) or not custom["name"]:
        _refuse(f"{where}.name", "a name")
    if not isinstance(custom.get("description"), str | None):
        _refuse(f"{where}.description", "text")
    described = custom.get("format")
    if not isinstance(described, Mapping | None):
        _refuse(f"{where}.format", "an object")
    if described is None or described.get("type") == "text":
        return
    grammar = described.get("grammar")
    if described.get("type") != "grammar" or not isinstance(grammar, Mapping):
        _refuse(f"{where}.format", "the type 'text', or 'grammar' and the object of that name")
    if not isinstance(grammar.get("definition"), str) or not grammar["definition"]:
        _refuse(f"{where}.format.grammar.definition", "text")
    custom_function(
        f"{where}.format.grammar", "", None, grammar.get("syntax"), grammar["definition"]
    )


def described_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked tools as functions, with the fields that chat templates read."""
    return [_described(tool) for tool in tools]


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool["type"] == "function":
        return {**tool, "function": tool_function(tool["function"])}
    custom = tool["custom"]
    grammar = (custom.get("format") or {}).get("grammar") or {}
    syntax, definition = grammar.get("syntax"), grammar.get("definition")
    about = custom["name"], custom.get("description")
    return {"type": "function", "function": custom_function("tools", *about, syntax, definition)}


def check_calls(where: str, calls: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError, which names the field below `where`, unless each call names a function
    and has its arguments as text or as an object.
    """
    for i, call in enumerate(calls):
        if call.get("type") == "custom":
            _check_custom_call(f"{where}[{i}].custom", call.get("custom"))
            continue
        function = call.get("function")
        if function is None:
            function = call  # some clients put the name into the call itself
        if not isinstance(function, Mapping):
            _refuse(f"{where}[{i}].function", "an object")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            _refuse(f"{where}[{i}].function.name", "a name")
        if not isinstance(function.get("arguments"), str | Mapping | None):
            _refuse(f"{where}[{i}].function.arguments", "text or an object")


def _check_custom_call(where: str, custom: object) -> None:
    if not isinstance(custom, Mapping):
        _refuse(where, "an object")
    if not isinstance(custom.get("name"), str) or not custom["name"]:
        _refuse(f"{where}.name", "a name")
    if not isinstance(custom.get("input"), str | None):
        _refuse(f"{where}.input", "text")


def _refuse(param: str, expected: str) -> NoReturn:
    """Raise RequestError without repeating the value, which may be long."""
    raise RequestError(f"Invalid value for '{param}': expected {expected}.", param=param)
