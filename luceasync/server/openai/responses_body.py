"""Items of the Responses API as the messages that a chat template knows.

Owns which items make one message: what a model thought, said and called before somebody answers is
one turn of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, NoReturn

import msgspec

from luceasync.errors import RequestError
from luceasync.request import ChatPrompt
from luceasync.server.fields import AskedPins, at_most, check_arguments, cut, refuse, template_words
from luceasync.server.openai.chat_body import max_calls, must_call

# The JSON body of a responses request: its types, as far as they are read. Source: OpenAI's
# OpenAPI document, `CreateResponse`. Owns the fields. Knows nothing of what they become.


class Part(msgspec.Struct):
    """One part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct):
    """One item of a conversation; `type` says which fields it has. A message needs none."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class Tool(msgspec.Struct):
    """A function of the client's, or a tool of another kind, by its `type`."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct):
    """`schema` as it was sent."""

    type: str
    name: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """The fields of `POST /v1/responses` that are read; null is the same as absent."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    priority: int | None = None
    prompt_cache_key: str | None = None
    previous_response_id: str | None = None
    conversation: msgspec.Raw = msgspec.Raw()
    background: bool | None = None
    stream: bool | None = None
    temperature: float | None = None
    text: TextOptions | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[Tool] | None = None
    top_p: float | None = None
    kvflash_pin: AskedPins | None = None


def effort_of(body: ResponsesBody) -> str | None:
    """How much the model is to think, in the client's word."""
    return None if body.reasoning is None else body.reasoning.effort


MAX_ITEMS = 16384
MAX_PARTS = 8192  # of one content
MAX_TOOLS = 1024

Said = dict[str, Any]
Placed = tuple[str, Item]


def prompt_of(body: ResponsesBody) -> ChatPrompt:
    """What the template is given. Raises RequestError, which names the field at fault."""
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    said = list(_said(body.input))
    if not said:
        refuse("input", body.input, "at least one item")
    tools = _tools(body)
    return ChatPrompt(
        messages=[*system, *said],
        tools=[*tools.values()] or None,
        template_kwargs=template_words(effort_of(body), None),
        max_calls=max_calls(body.tool_choice, body.parallel_tool_calls),
        must_call=must_call(body.tool_choice, [*tools.values()]),
        schema_places=tuple(f"{place}.parameters" for place in tools),
    )


def _said(given: str | list[Item]) -> Iterator[Said]:
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    at_most("input", given, MAX_ITEMS, "items")
    placed = [(f"input[{i}]", item) for i, item in enumerate(given)]
    for is_models, run in groupby(placed, lambda one: _is_models(one[1])):
        if is_models:
            yield from _turn(list(run))
        else:
            yield from (_message(where, item) for where, item in run)


def _is_models(item: Item) -> bool:
    is_answer = item.type == "message" and item.role == "assistant"
    return is_answer or item.type in ("reasoning", "function_call")


def _turn(items: Sequence[Placed]) -> Iterator[Said]:
    """A turn of the model's; what it says after a call begins another one."""
    turn: Said = {}
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


def _add(turn: Said, field: str, text: str) -> None:
    if text:
        turn[field] = f"{turn[field]}\n{text}" if turn.get(field) else text


def _call(where: str, item: Item) -> Said:
    for field in ("call_id", "name"):
        if not getattr(item, field):
            refuse(f"{where}.{field}", getattr(item, field), "text")
    function = {"name": item.name, "arguments": item.arguments or "{}"}
    return {"id": item.call_id, "type": "function", "function": function}


def _message(where: str, item: Item) -> Said:
    match item.type:
        case "message":
            if item.role is None:
                refuse(f"{where}.role", None, "user, assistant, system or developer")
            role = "system" if item.role == "developer" else item.role
            return {"role": role, "content": _text(f"{where}.content", item.content)}
        case "function_call_output":
            if not item.call_id:
                refuse(f"{where}.call_id", item.call_id, "the id of a call")
            said = _text(f"{where}.output", item.output)
            return {"role": "tool", "tool_call_id": item.call_id, "content": said}
        case _:
            _refuse_type(
                where, item.type, "message, reasoning, function_call, function_call_output"
            )


def _text(where: str, content: str | list[Part] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    at_most(where, content, MAX_PARTS, "parts")
    return "\n".join(_part(f"{where}[{i}]", part) for i, part in enumerate(content))


def _part(where: str, part: Part) -> str:
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
        f"Invalid value for '{where}.type': '{cut(kind)}' is not served; served: {served}.",
        param=f"{where}.type",
    )


def _tools(body: ResponsesBody) -> dict[str, Said]:
    """Functions, by their places. Tools of other kinds are left out: nobody here could run them."""
    at_most("tools", body.tools or (), MAX_TOOLS, "tools")
    if body.tool_choice == "none":
        return {}
    tools = ((f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ()))
    return {at: _function(at, tool) for at, tool in tools if tool.type == "function"}


def _function(where: str, tool: Tool) -> Said:
    if not tool.name:
        refuse(f"{where}.name", tool.name, "a name")
    described = {} if tool.description is None else {"description": tool.description}
    strict = {"strict": True} if tool.strict else {}
    check_arguments(f"{where}.parameters", tool.parameters or {})
    function = {"name": tool.name, **described, "parameters": tool.parameters or {}, **strict}
    return {"type": "function", "function": function}
