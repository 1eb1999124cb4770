"""The JSON body of a responses request: its types, its ranges, and the Request that follows.

Source: OpenAI's OpenAPI document, `CreateResponse`. Owns which items make one message: what a model
thought, said and called before a reply is one turn of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, NoReturn

import msgspec
from starlette.datastructures import Headers

from luceasync.errors import RequestError
from luceasync.request import ChatPrompt, Constraint, ModelCard, Request, Sampling
from luceasync.server.fields import (
    MAX_INT,
    at_most,
    check_arguments_schema,
    conversation_id_of,
    decode,
    effort_tokens,
    in_range,
    pins_of,
    refuse,
    shorten,
    temperature_of,
    template_kwargs_of,
    tool_function,
    top_p_of,
)
from luceasync.server.http.auth import Caller
from luceasync.server.openai.common import check_model
from luceasync.server.openai.request_body import (
    FORMATS,
    ToolChoice,
    max_calls,
    must_call,
    priority_of,
    schema_constraint,
)
from luceasync.server.openai.unserved import OpenAiBody

MAX_ITEMS = 16384
MAX_PARTS = 8192  # of one content
MAX_TOOLS = 1024


class ItemPart(msgspec.Struct):
    """One part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct):
    """One item of a conversation; `type` says which fields it has. A message needs none."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None


class ResponsesTool(msgspec.Struct):
    """A function of the client's, or a tool of another `type`."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct):
    """`schema` is kept undecoded."""

    type: str
    name: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None


class ReasoningOptions(msgspec.Struct):
    effort: str | None = None


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None


class ResponsesBody(OpenAiBody, kw_only=True):
    """The fields of `POST /v1/responses` that are read; null is the same as absent."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    previous_response_id: str | None = None
    conversation: msgspec.Raw = msgspec.Raw()
    background: bool | None = None
    text: TextOptions | None = None
    tool_choice: ToolChoice | None = None
    tools: list[ResponsesTool] | None = None


TemplateMessage = dict[str, Any]
PlacedItem = tuple[str, InputItem]  # with the path of its field


_decoder = msgspec.json.Decoder(ResponsesBody)


def parse_responses(
    body: bytes, card: ModelCard, caller: Caller, headers: Headers
) -> tuple[ResponsesBody, Request]:
    """Check a JSON body and make the request of `caller`. Raises RequestError."""
    parsed = decode(_decoder, body)
    check_model(parsed.model, card)
    _refuse_unserved(parsed)
    return parsed, Request(
        prompt_of(parsed),
        sampling=Sampling(temperature=temperature_of(parsed), top_p=top_p_of(parsed)),
        max_tokens=_max_tokens(parsed),
        pins=pins_of(parsed),
        constraint=_constraint(parsed),
        most_reasoning_tokens=effort_tokens("reasoning.effort", _effort(parsed)),
        priority=priority_of(parsed),
        tenant=caller.tenant(None),
        client=caller.client,
        conversation=conversation_id_of(headers, parsed.prompt_cache_key),
    )


def _refuse_unserved(body: ResponsesBody) -> None:
    if body.previous_response_id is not None:
        raise RequestError(
            "'previous_response_id' is not served: responses are not stored here. Send the whole "
            "conversation as `input`; its prefix is restored from the cache.",
            param="previous_response_id",
        )
    if bytes(body.conversation) not in (b"", b"null"):
        raise RequestError("'conversation' is not served: leave it out.", param="conversation")
    if body.background:
        refuse("background", True, "false (nothing runs in the background here)")


def _max_tokens(body: ResponsesBody) -> int | None:
    most = body.max_output_tokens
    return None if most is None else in_range("max_output_tokens", most, 1, MAX_INT)


def _effort(body: ResponsesBody) -> str | None:
    return None if body.reasoning is None else body.reasoning.effort


def _constraint(body: ResponsesBody) -> Constraint | None:
    text_format = body.text.format if body.text is not None else None
    match None if text_format is None else text_format.type:
        case None | "text":
            return None
        case "json_object":
            return Constraint("json_object", "", "text.format")
        case "json_schema":
            assert text_format is not None
            strict = text_format.strict is True
            return schema_constraint(text_format.schema, "text.format.schema", strict=strict)
        case other:
            refuse("text.format.type", other, FORMATS)


def prompt_of(body: ResponsesBody) -> ChatPrompt:
    """The chat template's input. Raises RequestError, which names the field at fault."""
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages = list(_messages(body.input))
    if not messages:
        refuse("input", body.input, "at least one item")
    tools = _tools(body)
    return ChatPrompt(
        messages=[*system, *messages],
        tools=[*tools.values()] or None,
        template_kwargs=template_kwargs_of(_effort(body), None),
        max_calls=max_calls(body.tool_choice, body.parallel_tool_calls),
        must_call=must_call(body.tool_choice, [*tools.values()]),
        schema_places=tuple(f"{where}.parameters" for where in tools),
    )


def _messages(items: str | list[InputItem]) -> Iterator[TemplateMessage]:
    if isinstance(items, str):
        yield {"role": "user", "content": items}
        return
    at_most("input", items, MAX_ITEMS, "items")
    placed = [(f"input[{i}]", item) for i, item in enumerate(items)]
    for by_model, run in groupby(placed, lambda one: _is_by_model(one[1])):
        if by_model:
            yield from _turn(list(run))
        else:
            yield from (_message(where, item) for where, item in run)


def _is_by_model(item: InputItem) -> bool:
    is_answer = item.type == "message" and item.role == "assistant"
    return is_answer or item.type in ("reasoning", "function_call")


def _turn(items: Sequence[PlacedItem]) -> Iterator[TemplateMessage]:
    """A turn of the model; text or reasoning after a call begins another message."""
    turn: TemplateMessage = {}
    for where, item in items:
        if turn.get("tool_calls") and item.type != "function_call":
            yield turn
            turn = {}
        turn.setdefault("role", "assistant")
        turn.setdefault("content", "")
        match item.type:
            case "reasoning":
                thought = _text(f"{where}.content", item.content) or _text(
                    f"{where}.summary", item.summary
                )
                _add(turn, "reasoning_content", thought)
            case "message":
                _add(turn, "content", _text(f"{where}.content", item.content))
            case _:
                turn.setdefault("tool_calls", []).append(_call(where, item))
    yield turn


def _add(turn: TemplateMessage, field: str, text: str) -> None:
    if text:
        turn[field] = f"{turn[field]}\n{text}" if turn.get(field) else text


def _call(where: str, item: InputItem) -> TemplateMessage:
    for field in ("call_id", "name"):
        if not getattr(item, field):
            refuse(f"{where}.{field}", getattr(item, field), "text")
    function = {"name": item.name, "arguments": item.arguments or "{}"}
    return {"id": item.call_id, "type": "function", "function": function}


def _message(where: str, item: InputItem) -> TemplateMessage:
    match item.type:
        case "message":
            if item.role is None:
                refuse(f"{where}.role", None, "user, assistant, system or developer")
            role = "system" if item.role == "developer" else item.role
            return {"role": role, "content": _text(f"{where}.content", item.content)}
        case "function_call_output":
            if not item.call_id:
                refuse(f"{where}.call_id", item.call_id, "the id of a call")
            result = _text(f"{where}.output", item.output)
            return {"role": "tool", "tool_call_id": item.call_id, "content": result}
        case _:
            _refuse_type(
                where, item.type, "message, reasoning, function_call, function_call_output"
            )


def _text(where: str, content: str | list[ItemPart] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    at_most(where, content, MAX_PARTS, "parts")
    return "\n".join(_part(f"{where}[{i}]", part) for i, part in enumerate(content))


def _part(where: str, part: ItemPart) -> str:
    match part.type:
        case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text":
            if part.text is None:
                refuse(f"{where}.text", None, "text")
            return part.text
        case "refusal":
            return part.refusal or ""
        case _:
            _refuse_type(where, part.type, "text (this model reads text only)")


def _refuse_type(where: str, kind: str, served: str) -> NoReturn:
    raise RequestError(
        f"Invalid value for '{where}.type': '{shorten(kind)}' is not served; served: {served}.",
        param=f"{where}.type",
    )


def _tools(body: ResponsesBody) -> dict[str, TemplateMessage]:
    """Functions by the paths of their fields. Other tools are left out: they run on OpenAI's
    servers.
    """
    at_most("tools", body.tools or (), MAX_TOOLS, "tools")
    if body.tool_choice == "none":
        return {}
    tools = ((f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ()))
    return {at: _function(at, tool) for at, tool in tools if tool.type == "function"}


def _function(where: str, tool: ResponsesTool) -> TemplateMessage:
    if not tool.name:
        refuse(f"{where}.name", tool.name, "a name")
    check_arguments_schema(f"{where}.parameters", tool.parameters or {})
    described = {"description": tool.description, "parameters": tool.parameters}
    strict = {"strict": True} if tool.strict else {}
    function = tool_function({"name": tool.name, **described, **strict})
    return {"type": "function", "function": function}
