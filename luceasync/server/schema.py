"""The JSON body of a chat request: its types, its ranges, and the Request that follows from it.

Owns what is allowed and the words of each refusal. Knows nothing of HTTP, tokens or templates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import msgspec

from luceasync.errors import RequestError
from luceasync.request import ChatPrompt, Request, Sampling
from luceasync.server.tenant import Caller

MAX_CHOICES = 16
MAX_STOPS = 4
MAX_TOP_LOGPROBS = 20

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ContentPart(msgspec.Struct):
    """One part of a message's content; only parts of type "text" are served."""

    type: str
    text: str | None = None


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


class ResponseFormat(msgspec.Struct):
    type: str


class ChatBody(msgspec.Struct):
    """The fields of `POST /v1/chat/completions` that are read; null is the same as absent."""

    messages: list[Message]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    keep_prefix: bool | None = None


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A checked body: what the engine gets, and how the answer is to be sent."""

    request: Request
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


_decoder = msgspec.json.Decoder(ChatBody)


def parse_chat(body: bytes, model_name: str, caller: Caller) -> ChatCall:
    """Check a JSON body and turn it into a ChatCall of the tenant that `caller` is.

    Raises RequestError with the field's path as `param`: status 400, or 404 for a model that is not
    the one served.
    """
    chat = _decode(body)
    if chat.model is not None and chat.model != model_name:
        raise unknown_model(chat.model)
    options = chat.stream_options or StreamOptions()
    _refuse_unserved(chat)
    return ChatCall(
        request=Request(
            ChatPrompt(
                messages=[_message(i, message) for i, message in enumerate(_messages(chat))],
                tools=None if chat.tool_choice == "none" else chat.tools or None,
                template_kwargs=chat.chat_template_kwargs or {},
            ),
            sampling=_sampling(chat),
            max_tokens=_max_tokens(chat),
            stop=_stop(chat),
            ignore_eos=bool(chat.ignore_eos),
            num_choices=_in_range("n", chat.n, 1, MAX_CHOICES, default=1),
            top_logprobs=_top_logprobs(chat),
            tenant=caller.tenant(chat.cache_salt),
            keep_prefix=bool(chat.keep_prefix),
        ),
        stream=bool(chat.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
    )


def unknown_model(name: str) -> RequestError:
    """The 404 for a model that is not served, worded as OpenAI words it."""
    return RequestError(
        f"The model `{name}` does not exist or you do not have access to it.",
        param="model",
        code="model_not_found",
        status=404,
    )


def _decode(body: bytes) -> ChatBody:
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at ")
        param = re.sub(r"^\$\.?", "", path.strip("`").rsplit("`", 1)[-1]) or None
        where = f"'{param}'" if param else "the request body"
        raise RequestError(f"Invalid value for {where}: {what}.", param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The request body is not valid JSON: {error}.") from None


def _refuse(param: str, value: object, allowed: str) -> NoReturn:
    raise RequestError(f"Invalid value for '{param}': {value!r}; expected {allowed}.", param=param)


def _refuse_unserved(chat: ChatBody) -> None:
    """Options that change the answer are refused rather than dropped when nobody honours them."""
    if chat.tool_choice not in (None, "none", "auto"):
        _refuse("tool_choice", chat.tool_choice, "'auto' or 'none' (no other choice is served)")
    if chat.response_format is not None and chat.response_format.type != "text":
        _refuse("response_format.type", chat.response_format.type, "'text' (no other is served)")


def _messages(chat: ChatBody) -> list[Message]:
    """None are enough where only the tools of later requests are to be kept."""
    if not chat.messages and not (chat.tools and chat.keep_prefix and _max_tokens(chat) == 0):
        _refuse("messages", [], "at least one message")
    return chat.messages


def _message(index: int, message: Message) -> dict[str, Any]:
    """The message as the chat template gets it; `developer` is what templates call `system`."""
    where = f"messages[{index}].content"
    if message.content is None and message.role != "assistant":
        _refuse(where, None, f"text for the role {message.role!r}")
    fields = {name: value for name, value in _fields(message) if value is not None}
    fields["role"] = "system" if message.role == "developer" else message.role
    fields["content"] = _content(where, message.content)
    return fields


def _fields(message: Message) -> list[tuple[str, Any]]:
    return [(name, getattr(message, name)) for name in Message.__struct_fields__]


def _content(where: str, content: str | list[ContentPart] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        if part.type != "text":
            _refuse(f"{where}[{i}].type", part.type, "'text' (this model reads text only)")
        if part.text is None:
            _refuse(f"{where}[{i}].text", None, "text")
        texts.append(part.text)
    return "\n".join(texts)


def _sampling(chat: ChatBody) -> Sampling:
    """Absent fields mean what OpenAI says they mean, so an absent temperature is 1."""
    top_p = _in_range("top_p", chat.top_p, 0.0, 1.0, default=1.0)
    if top_p == 0:
        _refuse("top_p", top_p, "a number above 0, at most 1")
    repetition_penalty = _in_range(
        "repetition_penalty", chat.repetition_penalty, 0.0, 100.0, default=1.0
    )
    if repetition_penalty == 0:
        _refuse("repetition_penalty", repetition_penalty, "a number above 0")
    return Sampling(
        temperature=_in_range("temperature", chat.temperature, 0.0, 2.0, default=1.0),
        top_k=max(0, _in_range("top_k", chat.top_k, -1, 2**31 - 1, default=0)),
        top_p=top_p,
        min_p=_in_range("min_p", chat.min_p, 0.0, 1.0, default=0.0),
        repetition_penalty=repetition_penalty,
        frequency_penalty=_in_range(
            "frequency_penalty", chat.frequency_penalty, -2.0, 2.0, default=0.0
        ),
        presence_penalty=_in_range(
            "presence_penalty", chat.presence_penalty, -2.0, 2.0, default=0.0
        ),
        logit_bias=_logit_bias(chat),
        seed=chat.seed if chat.seed is None else _in_range("seed", chat.seed, -(2**63), 2**63 - 1),
    )


def _in_range(
    param: str, value: float | None, least: float, most: float, default: float = 0
) -> Any:
    """`value` or, when it is absent, `default`; both of the type of the field."""
    if value is None:
        return default
    if not least <= value <= most:
        _refuse(param, value, f"a number from {least} to {most}")
    return value


def _max_tokens(chat: ChatBody) -> int | None:
    """`max_completion_tokens` is the newer name and wins over `max_tokens`.

    None at all are enough where the prompt is to be kept: then it is computed, and that is all.
    """
    least = 0 if chat.keep_prefix else 1
    for param in ("max_completion_tokens", "max_tokens"):
        value = getattr(chat, param)
        if value is not None:
            return _in_range(param, value, least, 2**31 - 1)
    return None


def _stop(chat: ChatBody) -> tuple[str, ...]:
    stops = [chat.stop] if isinstance(chat.stop, str) else chat.stop or []
    if len(stops) > MAX_STOPS:
        _refuse("stop", stops, f"at most {MAX_STOPS} strings")
    if "" in stops:
        _refuse("stop", stops, "strings that are not empty")
    return tuple(stops)


def _logit_bias(chat: ChatBody) -> dict[int, float]:
    biases = {}
    for key, bias in (chat.logit_bias or {}).items():
        param = f"logit_bias.{key}"
        if re.fullmatch(r"[0-9]{1,9}", key) is None:
            _refuse(param, key, "a token id, a whole number from 0 on")
        biases[int(key)] = _in_range(param, bias, -100.0, 100.0)
    return biases


def _top_logprobs(chat: ChatBody) -> int | None:
    if chat.top_logprobs is not None:
        if not chat.logprobs:
            _refuse("top_logprobs", chat.top_logprobs, "'logprobs' to be true with it")
        return _in_range("top_logprobs", chat.top_logprobs, 0, MAX_TOP_LOGPROBS)
    return 0 if chat.logprobs else None
