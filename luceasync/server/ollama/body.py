"""The JSON bodies of Ollama's API: types, ranges, and the Requests that they become.

Source: docs.ollama.com/api. Options for loading the model have no effect, since the server was
started with its own. Options that would change an answer are honoured or refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from starlette.datastructures import Headers

from luceasync.errors import RequestError
from luceasync.request import (
    ChatPrompt,
    Constraint,
    InfillPrompt,
    ModelCard,
    Prompt,
    Request,
    Sampling,
    TextPrompt,
)
from luceasync.server.fields import (
    LEAST_TOP_P,
    MAX_INT,
    GenerationBody,
    at_most,
    check_arguments_schema,
    conversation_id_of,
    effort_tokens,
    in_range,
    in_range_or,
    pins_of,
    refuse,
    shorten,
    template_kwargs_of,
    tool_function,
)
from luceasync.server.http.auth import Caller
from luceasync.server.unserved import ABSENT, Unserved, refuse_if_used

MAX_MESSAGES = 8192
MAX_TOOLS = 1024
MAX_TOOL_CALLS = 1024  # of one message
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_SCHEMA_BYTES = 256 << 10
MAX_TOP_LOGPROBS = 20
# Ollama's defaults for models whose Modelfile does not set them.
TEMPERATURE, TOP_K, TOP_P = 0.8, 40, 0.9
NO_LIMIT = (-1, -2)  # of tokens: unlimited, or until the context is full
RANDOM_SEED = -1
WHOLE_CONTEXT = -1
DURATION = re.compile(r"-?\d+(\.\d+)?|-?(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))+")
THINK = ("low", "medium", "high", "max")

Raw = msgspec.Raw


class OllamaOptions(msgspec.Struct, kw_only=True):
    """The fields of `options` that change an answer; null is the same as absent."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    penalize_newline: bool | None = None
    num_ctx: int | None = None
    mirostat: Unserved = Raw()
    tfs_z: Unserved = Raw()
    typical_p: Unserved = Raw()


class OllamaFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(msgspec.Struct):
    function: OllamaFunction
    type: str | None = None


class CalledFunction(msgspec.Struct):
    """`arguments` is an object, kept as the client wrote it."""

    name: str
    arguments: Raw = Raw()


class OllamaPastCall(msgspec.Struct):
    function: CalledFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct):
    """One message. A tool's result refers to its call by `tool_call_id` or `tool_name`, otherwise
    by position.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Raw] | None = None
    tool_calls: list[OllamaPastCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaBody(GenerationBody, kw_only=True):
    """The fields that chat and generate share; null is the same as absent."""

    model: str
    options: OllamaOptions | None = None
    format: Raw = Raw()
    think: bool | str | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    template: Unserved = Raw()
    # Fields of other APIs, or misplaced ones.
    max_tokens: Unserved = Raw()
    min_p: Unserved = Raw()
    num_predict: Unserved = Raw()
    repeat_penalty: Unserved = Raw()
    response_format: Unserved = Raw()
    seed: Unserved = Raw()
    stop: Unserved = Raw()
    tool_choice: Unserved = Raw()
    top_k: Unserved = Raw()


class OllamaChatBody(OllamaBody, kw_only=True):
    """The fields of `POST /api/chat` that are read."""

    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """The fields of `POST /api/generate` that are read. `raw`: the chat template is not used."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Raw] | None = None
    context: list[int] | None = None


MISPLACED = ("min_p", "num_predict", "repeat_penalty", "seed", "stop", "top_k")
OTHERS = ("max_tokens", "response_format", "template", "tool_choice")


def check_model(name: str | None, card: ModelCard) -> None:
    """Raise RequestError, a 404, for a model that is not served. Clients add the tag `:latest`."""
    if not name:
        raise RequestError("'model' is missing.", param="model")
    if card.serves(name) or card.serves(name.removesuffix(":latest")):
        return
    served = " or ".join(f"'{each}'" for each in card.names)
    message = f"model '{shorten(name)}' not found; this server serves {served}"
    raise RequestError(message, param="model", code="model_not_found", status=404)


def request_of(
    body: OllamaBody, prompt: Prompt, card: ModelCard, caller: Caller, headers: Headers
) -> Request:
    """The request of `caller`. Raises RequestError, which names the field at fault."""
    refuse_unserved(body)
    options = body.options or OllamaOptions()
    return Request(
        prompt,
        sampling=_sampling(options),
        max_tokens=_max_tokens(options),
        stop=_stops(options),
        top_logprobs=_top_logprobs(body),
        pins=pins_of(body),
        constraint=_constraint(body.format),
        most_reasoning_tokens=thinking_of(body, card)[1],
        tenant=caller.tenant(None),
        client=caller.client,
        conversation=conversation_id_of(headers),
    )


def refuse_unserved(body: OllamaBody) -> None:
    """Raise RequestError, which names the field, for a field that would change the answer and is
    not honoured.
    """
    for name in ("temperature", "top_p"):
        if getattr(body, name) is not None:
            _refuse_misplaced(name)
    for name in MISPLACED:
        if bytes(getattr(body, name)) not in ABSENT:
            _refuse_misplaced(name)
    for name in OTHERS:
        refuse_if_used(name, getattr(body, name))
    keep = body.keep_alive
    if isinstance(keep, str) and not DURATION.fullmatch(keep):
        refuse("keep_alive", keep, "a number of seconds, or a duration such as '5m'")
    options = body.options
    if options is None:
        return
    for name in ("mirostat", "tfs_z", "typical_p"):
        refuse_if_used(f"options.{name}", getattr(options, name))
    in_range_or(1, "options.num_ctx", options.num_ctx, 1, MAX_INT)


def _refuse_misplaced(name: str) -> None:
    raise RequestError(f"'{name}' belongs into 'options' in this API.", param=name)


# Options


def _sampling(options: OllamaOptions) -> Sampling:
    seed = options.seed
    repeat = in_range_or(1.0, "options.repeat_penalty", options.repeat_penalty, 0.01, 100.0)
    frequency, presence = (
        in_range_or(0.0, f"options.{name}", getattr(options, name), -2.0, 2.0)
        for name in ("frequency_penalty", "presence_penalty")
    )
    if options.repeat_last_n == 0:  # penalties consider no tokens
        repeat, frequency, presence = 1.0, 0.0, 0.0
    elif (repeat, frequency, presence) != (1.0, 0.0, 0.0):
        _check_penalised(options)
    return Sampling(
        temperature=in_range_or(TEMPERATURE, "options.temperature", options.temperature, 0.0, 2.0),
        top_k=max(0, in_range_or(TOP_K, "options.top_k", options.top_k, -1, MAX_INT)),
        top_p=max(LEAST_TOP_P, in_range_or(TOP_P, "options.top_p", options.top_p, 0.0, 1.0)),
        min_p=in_range_or(0.0, "options.min_p", options.min_p, 0.0, 1.0),
        repetition_penalty=repeat,
        frequency_penalty=frequency,
        presence_penalty=presence,
        seed=None
        if seed is None or seed == RANDOM_SEED
        else in_range("options.seed", seed, -(2**63), 2**63 - 1),
    )


def _check_penalised(options: OllamaOptions) -> None:
    """Raise RequestError unless penalties apply to all tokens of the context, as they do here."""
    if options.repeat_last_n not in (None, WHOLE_CONTEXT):
        allowed = "0, or -1 (the whole context), with a penalty"
        refuse("options.repeat_last_n", options.repeat_last_n, allowed)
    if options.penalize_newline is False:
        refuse("options.penalize_newline", False, "true, with a penalty")


def _max_tokens(options: OllamaOptions) -> int | None:
    most = options.num_predict
    if most is None or most in NO_LIMIT:
        return None
    return in_range("options.num_predict", most, 1, MAX_INT)


def _stops(options: OllamaOptions) -> tuple[str, ...]:
    stops = [options.stop] if isinstance(options.stop, str) else options.stop or []
    at_most("options.stop", stops, MAX_STOPS, "strings")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            refuse("options.stop", stop, f"a string of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _top_logprobs(body: OllamaBody) -> int | None:
    if not body.top_logprobs:
        return 0 if body.logprobs else None
    if not body.logprobs:
        refuse("top_logprobs", body.top_logprobs, "'logprobs' to be true with it")
    return in_range("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)


def _constraint(sent: Raw) -> Constraint | None:
    """The constraint of `format`: "json", or a JSON schema."""
    source = bytes(sent)
    if source in ABSENT or source == b'""':
        return None
    if source == b'"json"':
        return Constraint("json_object", "", "format")
    if not source.startswith(b"{") or len(source) > MAX_SCHEMA_BYTES:
        allowed = f"'json', or a JSON schema of at most {MAX_SCHEMA_BYTES} bytes"
        refuse("format", shorten(source.decode(errors="replace")), allowed)
    return Constraint("json_schema", source.decode(), "format")


def thinking_of(body: OllamaBody, card: ModelCard) -> tuple[dict[str, Any], int | None]:
    """The chat template's variables, and the maximum number of reasoning tokens (None: unlimited).
    Raises RequestError.
    """
    think = body.think
    if think is None:
        return {}, None
    if think is False:
        return {"enable_thinking": False}, 0
    if think is not True and think not in THINK:
        refuse("think", think, f"true, false, or one of {', '.join(THINK)}")
    if not card.can_think:
        message = f"'think' is not served: '{card.name}' does not support thinking"
        raise RequestError(message, param="think")
    if think is True:
        return {"enable_thinking": True}, None
    return template_kwargs_of(think, {"enable_thinking": True}), effort_tokens("think", think)


# Prompts


def chat_prompt(body: OllamaChatBody, card: ModelCard) -> ChatPrompt:
    """The chat template's input. If the last message begins the answer, the model continues it.
    Raises RequestError, which names the invalid field.
    """
    messages = body.messages or []
    at_most("messages", messages, MAX_MESSAGES, "messages")
    tools = list(_tools(body.tools or []))
    last = messages[-1]
    return ChatPrompt(
        messages=list(_messages(messages)),
        tools=tools or None,
        template_kwargs=thinking_of(body, card)[0],
        schema_places=tuple(f"tools[{i}].function.parameters" for i in range(len(tools))),
        is_begun=last.role == "assistant" and bool(last.content) and not last.tool_calls,
    )


def generate_prompt(body: OllamaGenerateBody, card: ModelCard) -> Prompt:
    """A chat of one message, unless the prompt is `raw`, has a suffix, or the model does not
    support chats. Raises RequestError, which names the invalid field.
    """
    _refuse_images("images", body.images)
    if body.context:
        message = "'context' is not served here: send the conversation to /api/chat."
        raise RequestError(message, param="context")
    prompt = body.prompt or ""
    if body.suffix:
        if body.system:
            refuse("system", body.system, "none with a 'suffix'")
        return InfillPrompt(prompt, body.suffix)
    if body.raw or not (card.takes_chats or body.system):
        if body.system:
            refuse("system", body.system, "none with 'raw'")
        return TextPrompt(prompt)
    system = [{"role": "system", "content": body.system}] if body.system else []
    return ChatPrompt(
        messages=[*system, {"role": "user", "content": prompt}],
        template_kwargs=thinking_of(body, card)[0],
        param="prompt",
    )


def _tools(tools: Sequence[OllamaTool]) -> Iterator[dict[str, Any]]:
    at_most("tools", tools, MAX_TOOLS, "tools")
    for i, tool in enumerate(tools):
        where, function = f"tools[{i}]", tool.function
        if tool.type not in (None, "function"):
            refuse(f"{where}.type", tool.type, "'function'")
        if not function.name:
            refuse(f"{where}.function.name", function.name, "a name")
        check_arguments_schema(f"{where}.function.parameters", function.parameters or {})
        yield {"type": "function", "function": tool_function(msgspec.structs.asdict(function))}


def _messages(messages: Iterable[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """The messages in the form of chat templates. Calls without an id get one, and results the id
    of their call.
    """
    open_calls: dict[str, str] = {}  # names by id, of calls without a result
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        _refuse_images(f"{where}.images", message.images)
        if message.content is None and message.role in ("system", "user"):
            refuse(f"{where}.content", None, f"text for the role {message.role!r}")
        fields: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            fields["reasoning_content"] = message.thinking
        if message.tool_calls:
            at_most(f"{where}.tool_calls", message.tool_calls, MAX_TOOL_CALLS, "calls")
            place = f"{where}.tool_calls"
            calls = [_call(place, i, j, call) for j, call in enumerate(message.tool_calls)]
            open_calls = {call["id"]: call["function"]["name"] for call in calls}
            fields["tool_calls"] = calls
        if message.role == "tool":
            fields |= _result_of(message, open_calls)
        yield fields


def _call(place: str, message: int, index: int, call: OllamaPastCall) -> dict[str, Any]:
    where, function = f"{place}[{index}]", call.function
    if not function.name:
        refuse(f"{where}.function.name", function.name, "a name")
    arguments = bytes(function.arguments)
    if arguments in ABSENT:
        arguments = b"{}"
    if not arguments.startswith((b"{", b'"')):
        refuse(f"{where}.function.arguments", shorten(arguments.decode()), "an object")
    if arguments.startswith(b'"'):  # some clients send it as a string of JSON
        arguments = msgspec.json.decode(arguments, type=str).encode()
    return {
        "id": call.id or f"call_{message}_{index}",
        "type": "function",
        "function": {"name": function.name, "arguments": arguments.decode()},
    }


def _result_of(message: OllamaMessage, open_calls: dict[str, str]) -> Mapping[str, str]:
    """The call that the result belongs to: `tool_call_id` and `name`, as far as they are known."""
    named = (call_id for call_id, name in open_calls.items() if name == message.tool_name)
    call_id = message.tool_call_id or next(named, None) or next(iter(open_calls), None)
    name = message.tool_name or open_calls.get(call_id or "")
    open_calls.pop(call_id or "", None)
    found = {"tool_call_id": call_id, "name": name}
    return {key: value for key, value in found.items() if value}


def _refuse_images(param: str, images: Sequence[Raw] | None) -> None:
    if images:
        message = f"'{param}' is not served here: this model reads text only."
        raise RequestError(message, param=param)
