"""Anthropic's messages, system text and tools as a chat template knows them.

Owns what of them is said to the model: marks of what to cache, signatures and headers of bills are
not. Text as a block or as a string is the same text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from luceasync.errors import RequestError
from luceasync.request import ChatPrompt
from luceasync.server.anthropic.body import Block, Content, CountBody, Message, Tool, ToolChoice
from luceasync.server.checks import at_most, refuse

MAX_MESSAGES = 8192
MAX_BLOCKS = 8192  # of one content
MAX_TOOLS = 1024
# A line of Claude Code's that stands before everything and is another one in each conversation.
BILLING = "x-anthropic-billing-header:"
THINKING = {"enabled": True, "adaptive": True, "disabled": False}

Said = dict[str, Any]


def prompt_of(body: CountBody) -> ChatPrompt:
    """What the template is given. Raises RequestError, which names the field at fault."""
    if not body.messages:
        refuse("messages", [], "at least one message")
    at_most("messages", body.messages, MAX_MESSAGES, "messages")
    if body.messages[-1].role == "assistant":
        refuse("messages[-1].role", "assistant", "'user' (answers are not continued here)")
    names: dict[str, str] = {}
    said = [one for i, m in enumerate(body.messages) for one in _turn(f"messages[{i}]", m, names)]
    system, tools = _system("system", body.system), _tools(body)
    return ChatPrompt(
        messages=[*([{"role": "system", "content": system}] if system else []), *said],
        tools=tools or None,
        template_kwargs={"enable_thinking": _thinks(body)},
        max_calls=_max_calls(body.tool_choice),
        must_call=_must_call(body.tool_choice, [tool["function"]["name"] for tool in tools]),
    )


def _max_calls(choice: ToolChoice | None) -> int | None:
    is_one = choice is not None and (choice.type == "tool" or choice.disable_parallel_tool_use)
    return 1 if is_one else None


def _must_call(choice: ToolChoice | None, names: Sequence[str]) -> tuple[str, ...]:
    """The tools of which calls must come; none where none must."""
    match None if choice is None else choice.type:
        case None | "auto" | "none":
            return ()
        case "any" if names:
            return tuple(names)
        case "any":
            refuse("tool_choice.type", "any", "'tools' beside it")
        case "tool":
            assert choice is not None
            if choice.name not in names:
                refuse("tool_choice.name", choice.name, "the name of one of 'tools'")
            return (str(choice.name),)
        case other:
            refuse("tool_choice.type", other, "'auto', 'any', 'tool' or 'none'")


def _thinks(body: CountBody) -> bool:
    """Thinking is off unless it is asked for."""
    if body.thinking is None:
        return False
    if body.thinking.type not in THINKING:
        refuse("thinking.type", body.thinking.type, "'enabled', 'adaptive' or 'disabled'")
    return THINKING[body.thinking.type]


def _tools(body: CountBody) -> list[Said]:
    """Tools that only Anthropic's servers have are left out: nobody here could run them."""
    at_most("tools", body.tools or (), MAX_TOOLS, "tools")
    if body.tool_choice is not None and body.tool_choice.type == "none":
        return []
    tools = enumerate(body.tools or ())
    return [_tool(f"tools[{i}]", t) for i, t in tools if t.type in (None, "custom")]


def _tool(where: str, tool: Tool) -> Said:
    if not tool.name:
        refuse(f"{where}.name", tool.name, "a name")
    if tool.input_schema is None:
        refuse(f"{where}.input_schema", None, "a JSON schema")
    described = {} if tool.description is None else {"description": tool.description}
    strict = {"strict": True} if tool.strict else {}
    function = {"name": tool.name, **described, "parameters": tool.input_schema, **strict}
    return {"type": "function", "function": function}


def _turn(where: str, message: Message, names: dict[str, str]) -> Iterator[Said]:
    """The messages that one of Anthropic's becomes; `names` of tools by the ids of calls so far."""
    match message.role:
        case "system":
            yield {"role": "system", "content": _system(f"{where}.content", message.content)}
        case "assistant":
            yield _answer(where, message.content, names)
        case "user":
            yield from _user(where, message.content, names)


def _user(where: str, content: Content, names: Mapping[str, str]) -> Iterator[Said]:
    """What tools have said, each a message, and then what the user says."""
    texts: list[str] = []
    for place, block in _blocks(f"{where}.content", content):
        match block.type:
            case "text":
                texts.append(_text(place, block))
            case "tool_result":
                yield _result(place, block, names)
            case _:
                _refuse_block(place, block)
    if texts or not isinstance(content, list):
        yield {"role": "user", "content": "\n".join(texts)}


def _result(where: str, block: Block, names: Mapping[str, str]) -> Said:
    call_id = block.tool_use_id
    if not call_id:
        refuse(f"{where}.tool_use_id", call_id, "the id of a call")
    said = _only_text(f"{where}.content", block.content or "")
    named = {"name": names[call_id]} if call_id in names else {}
    return {"role": "tool", "tool_call_id": call_id, **named, "content": said}


def _answer(where: str, content: Content, names: dict[str, str]) -> Said:
    said: dict[str, list[str]] = {"content": [], "reasoning_content": []}
    calls = []
    for place, block in _blocks(f"{where}.content", content):
        match block.type:
            case "text":
                said["content"].append(_text(place, block))
            case "thinking":
                said["reasoning_content"].append(block.thinking or "")
            case "tool_use":
                calls.append(_call(place, block))
                names[calls[-1]["id"]] = calls[-1]["function"]["name"]
            case "redacted_thinking":
                pass  # nobody can read it
            case _:
                _refuse_block(place, block)
    reasoning = "\n".join(said["reasoning_content"])
    answer: Said = {"role": "assistant", "content": "\n".join(said["content"])}
    return (
        answer
        | ({"reasoning_content": reasoning} if reasoning else {})
        | ({"tool_calls": calls} if calls else {})
    )


def _call(where: str, block: Block) -> Said:
    for field in ("id", "name"):
        if not getattr(block, field):
            refuse(f"{where}.{field}", getattr(block, field), "text")
    arguments = json.dumps(block.input or {}, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _system(where: str, content: Content | None) -> str:
    texts = [_text(place, block) for place, block in _blocks(where, content or "")]
    return "\n".join(text for text in texts if text and not text.startswith(BILLING))


def _only_text(where: str, content: Content) -> str:
    return "\n".join(_text(place, block) for place, block in _blocks(where, content))


def _blocks(where: str, content: Content) -> Iterable[tuple[str, Block]]:
    """The blocks of a content and where they are; a string is one."""
    if isinstance(content, str):
        return [(where, Block("text", content))] if content else []
    at_most(where, content, MAX_BLOCKS, "blocks")
    return [(f"{where}[{i}]", block) for i, block in enumerate(content)]


def _text(where: str, block: Block) -> str:
    if block.type != "text":
        _refuse_block(where, block)
    if block.text is None:
        refuse(f"{where}.text", None, "text")
    return block.text


def _refuse_block(where: str, block: Block) -> NoReturn:
    served = "text, thinking, tool_use and tool_result, each in its place"
    raise RequestError(
        f"{where}: a block of type '{block.type[:50]}' is not served here; {served}, are.",
        param=f"{where}.type",
    )
