"""Items of the Responses API as the messages that a chat template knows.

Owns which items make one message: what a model thought, said and called before somebody answers is
one turn of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NoReturn

from luceasync.errors import RequestError
from luceasync.request import ChatPrompt
from luceasync.server.checks import at_most, check_arguments, cut, refuse
from luceasync.server.effort import template_words
from luceasync.server.openai.responses.body import Item, Part, ResponsesBody, Tool, effort_of
from luceasync.server.openai.tool_choice import max_calls, must_call

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
