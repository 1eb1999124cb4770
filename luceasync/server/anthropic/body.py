"""Anthropic's messages, system text and tools as a chat template knows them.

Owns what of them is said to the model: marks of what to cache, signatures and headers of bills are
not. Text as a block or as a string is the same text. Where marks lie is told beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NoReturn

import msgspec

from luceasync.errors import RequestError
from luceasync.request import ChatPrompt
from luceasync.server.fields import AskedPins, at_most, check_arguments, refuse

# The JSON body of a messages request: its types, as far as they are read. Source:
# docs.anthropic.com, Messages. Owns the fields. Knows nothing of what they become.


class CacheControl(msgspec.Struct):
    """A mark: what ends here is worth keeping."""

    type: str
    ttl: str | None = None


class Block(msgspec.Struct):
    """One part of a message's content, or of a tool's result; `type` says which fields it has."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Content = str | list[Block]


class Message(msgspec.Struct):
    """One turn; clients put system messages between others too."""

    role: Literal["user", "assistant", "system"]
    content: Content


class Tool(msgspec.Struct):
    """A tool of the client's, or (by its `type`) one that only Anthropic's servers have."""

    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None
    cache_control: CacheControl | None = None


class ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: str
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct):
    """`schema` as it was sent."""

    type: str
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """The fields of `POST /v1/messages/count_tokens` that are read; null is the same as absent."""

    messages: list[Message]
    model: str
    system: Content | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesBody(CountBody, kw_only=True):
    """The fields of `POST /v1/messages` that are read."""

    max_tokens: int
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    kvflash_pin: AskedPins | None = None


# The marks that Anthropic's clients set where a prompt is worth keeping: `cache_control`.
# Source: docs.anthropic.com, Prompt caching. Owns how many there may be, and what they may say.


MAX_MARKS = 4
LIFETIMES = (None, "5m", "1h")

Placed = tuple[str, CacheControl]


def check_marks(body: CountBody) -> None:
    """Raise RequestError for one that is none, and for more than there may be."""
    marks = list(_all(body))
    for where, mark in marks:
        if mark.type != "ephemeral":
            refuse(f"{where}.cache_control.type", mark.type, "'ephemeral'")
        if mark.ttl not in LIFETIMES:
            refuse(f"{where}.cache_control.ttl", mark.ttl, "'5m' or '1h'")
    if len(marks) > MAX_MARKS:
        where = f"{marks[MAX_MARKS][0]}.cache_control"
        raise RequestError(
            f"{where}: A maximum of {MAX_MARKS} blocks with cache_control may be provided. "
            f"Found {len(marks)}.",
            param=where,
        )


def _all(body: CountBody) -> Iterator[Placed]:
    """In the order of the prompt: tools, system text, messages."""
    for i, tool in enumerate(body.tools or ()):
        if tool.cache_control:
            yield f"tools[{i}]", tool.cache_control
    yield from _within("system", body.system)
    for i, message in enumerate(body.messages):
        yield from _within(f"messages[{i}].content", message.content)


def _within(where: str, content: Content | None) -> Iterator[Placed]:
    for i, block in enumerate(content if isinstance(content, list) else ()):
        yield from _of_block(f"{where}[{i}]", block)


def _of_block(where: str, block: Block) -> Iterator[Placed]:
    yield from _within(f"{where}.content", block.content)
    if block.cache_control:
        yield where, block.cache_control


MAX_MESSAGES = 8192
MAX_BLOCKS = 8192  # of one content
MAX_TOOLS = 1024
JOIN = "\n"  # between the blocks of one message
# A line of Claude Code's that stands before everything and is another one in each conversation.
BILLING = "x-anthropic-billing-header:"
THINKING = {"enabled": True, "adaptive": True, "disabled": False}

Said = dict[str, Any]
Marked = tuple[Said, tuple[int, ...]]  # and after how many characters of its content marks lie


def prompt_of(body: CountBody) -> ChatPrompt:
    """What the template is given. Raises RequestError, which names the field at fault."""
    if not body.messages:
        refuse("messages", [], "at least one message")
    at_most("messages", body.messages, MAX_MESSAGES, "messages")
    if body.messages[-1].role == "assistant":
        refuse("messages[-1].role", "assistant", "'user' (answers are not continued here)")
    names: dict[str, str] = {}
    check_marks(body)
    system, places = _system("system", body.system)
    said: list[Marked] = [({"role": "system", "content": system}, places)] if system else []
    for i, message in enumerate(body.messages):
        said += _turn(f"messages[{i}]", message, names)
    tools = _tools(body)
    return ChatPrompt(
        messages=[message for message, _ in said],
        tools=[*tools.values()] or None,
        template_kwargs={"enable_thinking": _thinks(body)},
        max_calls=_max_calls(body.tool_choice),
        must_call=_must_call(
            body.tool_choice, [tool["function"]["name"] for tool in tools.values()]
        ),
        schema_places=tuple(f"{place}.input_schema" for place in tools),
        marks=tuple((i, place) for i, (_, places) in enumerate(said) for place in places),
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


def _tools(body: CountBody) -> dict[str, Said]:
    """By their places. Tools that only Anthropic's servers have are left out: nobody here could run
    them.
    """
    at_most("tools", body.tools or (), MAX_TOOLS, "tools")
    if body.tool_choice is not None and body.tool_choice.type == "none":
        return {}
    tools = ((f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ()))
    return {at: _tool(at, tool) for at, tool in tools if tool.type in (None, "custom")}


def _tool(where: str, tool: Tool) -> Said:
    if not tool.name:
        refuse(f"{where}.name", tool.name, "a name")
    if tool.input_schema is None:
        refuse(f"{where}.input_schema", None, "a JSON schema")
    check_arguments(f"{where}.input_schema", tool.input_schema)
    described = {} if tool.description is None else {"description": tool.description}
    strict = {"strict": True} if tool.strict else {}
    function = {"name": tool.name, **described, "parameters": tool.input_schema, **strict}
    return {"type": "function", "function": function}


def _turn(where: str, message: Message, names: dict[str, str]) -> Iterator[Marked]:
    """The messages that one of Anthropic's becomes; `names` of tools by the ids of calls so far."""
    match message.role:
        case "system":
            text, places = _system(f"{where}.content", message.content)
            yield {"role": "system", "content": text}, places
        case "assistant":
            yield _answer(where, message.content, names), ()
        case "user":
            yield from _user(where, message.content, names)


def _user(where: str, content: Content, names: Mapping[str, str]) -> Iterator[Marked]:
    """What tools have said, each a message, and then what the user says."""
    texts: list[tuple[str, Block]] = []
    for place, block in _blocks(f"{where}.content", content):
        match block.type:
            case "text":
                texts.append((_text(place, block), block))
            case "tool_result":
                yield _result(place, block, names)
            case _:
                _refuse_block(place, block)
    if texts or not isinstance(content, list):
        text, places = _joined(texts)
        yield {"role": "user", "content": text}, places


def _result(where: str, block: Block, names: Mapping[str, str]) -> Marked:
    call_id = block.tool_use_id
    if not call_id:
        refuse(f"{where}.tool_use_id", call_id, "the id of a call")
    inside = _blocks(f"{where}.content", block.content or "")
    said, places = _joined([(_text(place, one), one) for place, one in inside])
    named = {"name": names[call_id]} if call_id in names else {}
    return {"role": "tool", "tool_call_id": call_id, **named, "content": said}, places


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


def _system(where: str, content: Content | None) -> tuple[str, tuple[int, ...]]:
    texts = [(_text(place, block), block) for place, block in _blocks(where, content or "")]
    return _joined([one for one in texts if one[0] and not one[0].startswith(BILLING)])


def _joined(texts: Sequence[tuple[str, Block]]) -> tuple[str, tuple[int, ...]]:
    """The texts of blocks as one, and after how many of its characters blocks with a mark end. At
    its own end a mark says nothing: turns are kept anyway.
    """
    ends = accumulate(len(JOIN) + len(text) for text, _ in texts)
    marked = [
        end - len(JOIN) for end, (_, one) in zip(ends, texts, strict=True) if one.cache_control
    ]
    whole = JOIN.join(text for text, _ in texts)
    return whole, tuple(end for end in marked if 0 < end < len(whole))


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
