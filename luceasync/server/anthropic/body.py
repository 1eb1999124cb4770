"""The JSON body of a messages request: its types, its ranges, and the Request that it becomes.

Source: docs.anthropic.com, Messages and Prompt caching. Signatures and billing headers are not
shown to the model. Text in a block and text in a string are rendered alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NoReturn

import msgspec
from starlette.datastructures import Headers

from luceasync.errors import RequestError
from luceasync.request import ChatPrompt, Constraint, Request, Sampling
from luceasync.server.fields import (
    MAX_INT,
    at_most,
    budget_or,
    check_arguments_schema,
    conversation_id_of,
    effort_tokens,
    in_range,
    in_range_or,
    pins_of,
    refuse,
    shorten,
    temperature_of,
    tool_function,
    top_p_of,
)
from luceasync.server.http.auth import Caller
from luceasync.server.unserved import ChatFieldsBody, refuse_unserved

MAX_MESSAGES = 8192
MAX_BLOCKS = 8192  # of one content
MAX_TOOLS = 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_SCHEMA_BYTES = 256 << 10
MAX_MARKS = 4
MARK_LIFETIMES = (None, "5m", "1h")
JOIN = "\n"  # between the blocks of one message
# A line that Claude Code puts before everything else, and that differs in each conversation.
BILLING = "x-anthropic-billing-header:"
THINKING = {"enabled": True, "adaptive": True, "disabled": False}


class CacheControl(msgspec.Struct):
    """A mark: the prompt up to this point is worth keeping."""

    type: str
    ttl: str | None = None


class ContentBlock(msgspec.Struct):
    """One block of a message's content or of a tool's result; `type` determines which fields it
    has.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Content = str | list[ContentBlock]


class AnthropicMessage(msgspec.Struct):
    """One turn; clients put system messages between others too."""

    role: Literal["user", "assistant", "system"]
    content: Content


class AnthropicTool(msgspec.Struct):
    """The client's tool, or one that runs on Anthropic's servers, depending on its `type`."""

    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None
    cache_control: CacheControl | None = None


class AnthropicToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(msgspec.Struct):
    type: str
    budget_tokens: int | None = None


class JsonOutputFormat(msgspec.Struct):
    """`schema` is kept undecoded."""

    type: str
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: JsonOutputFormat | None = None


class CountBody(ChatFieldsBody, kw_only=True):
    """The fields of `POST /v1/messages/count_tokens`.

    Fields that affect only the answer are checked, but otherwise ignored.
    """

    messages: list[AnthropicMessage]
    model: str
    system: Content | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingOptions | None = None


class MessagesBody(CountBody, kw_only=True):
    """The fields of `POST /v1/messages` that are read; null is the same as absent."""

    max_tokens: int
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = None
    stop_sequences: list[str] | None = None
    top_k: int | None = None


TemplateMessage = dict[str, Any]
# A message, and the character positions in its content that are marked.
MarkedMessage = tuple[TemplateMessage, tuple[int, ...]]


def request_of(body: MessagesBody, caller: Caller, headers: Headers) -> Request:
    """The request of `caller`. Raises RequestError, which names the field at fault."""
    return Request(
        prompt_of(body),
        sampling=Sampling(
            temperature=temperature_of(body, 1.0),
            top_k=in_range_or(0, "top_k", body.top_k, 0, MAX_INT),
            top_p=top_p_of(body),
        ),
        max_tokens=in_range("max_tokens", body.max_tokens, 1, MAX_INT),
        stop=_stops(body),
        pins=pins_of(body),
        constraint=_constraint(body),
        most_reasoning_tokens=_max_reasoning_tokens(body),
        tenant=caller.tenant(None),
        client=caller.client,
        conversation=conversation_id_of(headers),
    )


def _stops(body: MessagesBody) -> tuple[str, ...]:
    stops = body.stop_sequences or []
    at_most("stop_sequences", stops, MAX_STOPS, "strings")
    for i, stop in enumerate(stops):
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            refuse(f"stop_sequences[{i}]", stop, f"a string of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _constraint(body: MessagesBody) -> Constraint | None:
    """The constraint of `output_config.format`, or of its older name `output_format`."""
    config = body.output_config
    output_format, where = body.output_format, "output_format"
    if config is not None and config.format is not None:
        output_format, where = config.format, "output_config.format"
    if output_format is None:
        return None
    if output_format.type != "json_schema":
        refuse(f"{where}.type", output_format.type, "'json_schema'")
    schema = bytes(output_format.schema)
    if not schema.startswith(b"{") or len(schema) > MAX_SCHEMA_BYTES:
        allowed = f"a JSON schema of at most {MAX_SCHEMA_BYTES} bytes"
        refuse(f"{where}.schema", shorten(schema.decode(errors="replace")), allowed)
    return Constraint("json_schema", schema.decode(), f"{where}.schema")


def _max_reasoning_tokens(body: MessagesBody) -> int | None:
    """The limit from the budget if there is one, otherwise from the effort."""
    effort = None if body.output_config is None else body.output_config.effort
    default = effort_tokens("output_config.effort", effort)
    tokens = None if body.thinking is None else body.thinking.budget_tokens
    return budget_or(default, "thinking.budget_tokens", tokens)


def prompt_of(body: CountBody) -> ChatPrompt:
    """The chat template's input. Raises RequestError, which names the field at fault."""
    refuse_unserved(body)
    if not body.messages:
        refuse("messages", [], "at least one message")
    at_most("messages", body.messages, MAX_MESSAGES, "messages")
    if body.messages[-1].role == "assistant":
        refuse("messages[-1].role", "assistant", "'user' (an answer is not continued here)")
    names: dict[str, str] = {}
    check_marks(body)
    system, marks = _system("system", body.system)
    messages: list[MarkedMessage] = []
    if system:
        messages.append(({"role": "system", "content": system}, marks))
    for i, message in enumerate(body.messages):
        messages += _turn(f"messages[{i}]", message, names)
    tools = _tools(body)
    return ChatPrompt(
        messages=[message for message, _ in messages],
        tools=[*tools.values()] or None,
        template_kwargs={"enable_thinking": _thinks(body)},
        max_calls=_max_calls(body.tool_choice),
        must_call=_must_call(
            body.tool_choice, [tool["function"]["name"] for tool in tools.values()]
        ),
        schema_places=tuple(f"{where}.input_schema" for where in tools),
        marks=tuple((i, mark) for i, (_, marks) in enumerate(messages) for mark in marks),
    )


def _max_calls(choice: AnthropicToolChoice | None) -> int | None:
    is_one = choice is not None and (choice.type == "tool" or choice.disable_parallel_tool_use)
    return 1 if is_one else None


def _must_call(choice: AnthropicToolChoice | None, names: Sequence[str]) -> tuple[str, ...]:
    """The tools whose calls the answer must consist of; empty: the model chooses."""
    match None if choice is None else choice.type:
        case None | "auto" | "none":
            return ()
        case "any" if names:
            return tuple(names)
        case "any":
            refuse("tool_choice.type", "any", "'tools' in the same request")
        case "tool":
            assert choice is not None
            if choice.name not in names:
                refuse("tool_choice.name", choice.name, "the name of one of 'tools'")
            return (str(choice.name),)
        case other:
            refuse("tool_choice.type", other, "'auto', 'any', 'tool' or 'none'")


def _thinks(body: CountBody) -> bool:
    """Whether the model thinks: only if requested."""
    if body.thinking is None:
        return False
    if body.thinking.type not in THINKING:
        refuse("thinking.type", body.thinking.type, "'enabled', 'adaptive' or 'disabled'")
    return THINKING[body.thinking.type]


def _tools(body: CountBody) -> dict[str, TemplateMessage]:
    """Tools by the paths of their fields, without those that run on Anthropic's servers."""
    at_most("tools", body.tools or (), MAX_TOOLS, "tools")
    if body.tool_choice is not None and body.tool_choice.type == "none":
        return {}
    tools = ((f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ()))
    found = {at: _tool(at, tool) for at, tool in tools if tool.type in (None, "custom")}
    names: set[str] = set()
    for at, each in found.items():
        if (name := each["function"]["name"]) in names:
            refuse(f"{at}.name", name, "a name that no other tool has")
        names.add(name)
    return found


def _tool(where: str, tool: AnthropicTool) -> TemplateMessage:
    if not tool.name:
        refuse(f"{where}.name", tool.name, "a name")
    if tool.input_schema is None:
        refuse(f"{where}.input_schema", None, "a JSON schema")
    check_arguments_schema(f"{where}.input_schema", tool.input_schema)
    described = {"description": tool.description, "parameters": tool.input_schema}
    strict = {"strict": True} if tool.strict else {}
    function = tool_function({"name": tool.name, **described, **strict})
    return {"type": "function", "function": function}


def _turn(where: str, message: AnthropicMessage, names: dict[str, str]) -> Iterator[MarkedMessage]:
    """The template's messages for one message of the client; `names` maps the ids of the calls so
    far to the names of their tools.
    """
    match message.role:
        case "system":
            text, marks = _system(f"{where}.content", message.content)
            yield {"role": "system", "content": text}, marks
        case "assistant":
            yield _answer(where, message.content, names), ()
        case "user":
            yield from _user(where, message.content, names)


def _user(where: str, content: Content, names: Mapping[str, str]) -> Iterator[MarkedMessage]:
    """A message for each tool result, then one for the user's text."""
    texts: list[tuple[str, ContentBlock]] = []
    for path, block in _blocks(f"{where}.content", content):
        match block.type:
            case "text":
                texts.append((_text(path, block), block))
            case "tool_result":
                yield _result(path, block, names)
            case _:
                _refuse_block(path, block)
    if texts or not isinstance(content, list):
        text, marks = _joined(texts)
        yield {"role": "user", "content": text}, marks


def _result(where: str, block: ContentBlock, names: Mapping[str, str]) -> MarkedMessage:
    call_id = block.tool_use_id
    if not call_id:
        refuse(f"{where}.tool_use_id", call_id, "the id of a call")
    inside = _blocks(f"{where}.content", block.content or "")
    text, marks = _joined([(_text(path, block), block) for path, block in inside])
    named = {"name": names[call_id]} if call_id in names else {}
    return {"role": "tool", "tool_call_id": call_id, **named, "content": text}, marks


def _answer(where: str, content: Content, names: dict[str, str]) -> TemplateMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for path, block in _blocks(f"{where}.content", content):
        match block.type:
            case "text":
                texts.append(_text(path, block))
            case "thinking":
                thoughts.append(block.thinking or "")
            case "tool_use":
                calls.append(_call(path, block))
                names[calls[-1]["id"]] = calls[-1]["function"]["name"]
            case "redacted_thinking":
                pass  # encrypted
            case _:
                _refuse_block(path, block)
    answer: TemplateMessage = {"role": "assistant", "content": JOIN.join(texts)}
    if reasoning := JOIN.join(thoughts):
        answer["reasoning_content"] = reasoning
    if calls:
        answer["tool_calls"] = calls
    return answer


def _call(where: str, block: ContentBlock) -> TemplateMessage:
    for field in ("id", "name"):
        if not getattr(block, field):
            refuse(f"{where}.{field}", getattr(block, field), "text")
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _system(where: str, content: Content | None) -> tuple[str, tuple[int, ...]]:
    texts = [(_text(path, block), block) for path, block in _blocks(where, content or "")]
    return _joined([one for one in texts if one[0] and not one[0].startswith(BILLING)])


def _joined(texts: Sequence[tuple[str, ContentBlock]]) -> tuple[str, tuple[int, ...]]:
    """The joined texts of blocks, and the character positions where marked blocks end. The end of
    the whole text needs no mark: whole turns are kept anyway.
    """
    ends = accumulate(len(JOIN) + len(text) for text, _ in texts)
    marked = [
        end - len(JOIN) for end, (_, one) in zip(ends, texts, strict=True) if one.cache_control
    ]
    whole = JOIN.join(text for text, _ in texts)
    return whole, tuple(end for end in marked if 0 < end < len(whole))


def _blocks(where: str, content: Content) -> Iterable[tuple[str, ContentBlock]]:
    """The blocks of a content with the paths of their fields; a string is one block."""
    if isinstance(content, str):
        return [(where, ContentBlock("text", content))] if content else []
    at_most(where, content, MAX_BLOCKS, "blocks")
    return [(f"{where}[{i}]", block) for i, block in enumerate(content)]


def _text(where: str, block: ContentBlock) -> str:
    if block.type != "text":
        _refuse_block(where, block)
    if block.text is None:
        refuse(f"{where}.text", None, "text")
    return block.text


def _refuse_block(where: str, block: ContentBlock) -> NoReturn:
    raise RequestError(
        f"{where}: a block of type '{block.type[:50]}' is not served here; served are text, "
        "thinking, tool_use and tool_result, each in its place.",
        param=f"{where}.type",
    )


# Marks


def check_marks(body: CountBody) -> None:
    """Raise RequestError for an invalid mark, and for more than MAX_MARKS."""
    marks = list(_marks(body))
    for where, mark in marks:
        if mark.type != "ephemeral":
            refuse(f"{where}.cache_control.type", mark.type, "'ephemeral'")
        if mark.ttl not in MARK_LIFETIMES:
            refuse(f"{where}.cache_control.ttl", mark.ttl, "'5m' or '1h'")
    if len(marks) > MAX_MARKS:
        where = f"{marks[MAX_MARKS][0]}.cache_control"
        raise RequestError(
            f"{where}: A maximum of {MAX_MARKS} blocks with cache_control may be provided. "
            f"Found {len(marks)}.",
            param=where,
        )


def _marks(body: CountBody) -> Iterator[tuple[str, CacheControl]]:
    """All marks with the paths of their fields, in the order of the prompt: tools, system text,
    messages.
    """
    for i, tool in enumerate(body.tools or ()):
        if tool.cache_control:
            yield f"tools[{i}]", tool.cache_control
    yield from _marks_within("system", body.system)
    for i, message in enumerate(body.messages):
        yield from _marks_within(f"messages[{i}].content", message.content)


def _marks_within(where: str, content: Content | None) -> Iterator[tuple[str, CacheControl]]:
    for i, block in enumerate(content if isinstance(content, list) else ()):
        yield from _marks_of_block(f"{where}[{i}]", block)


def _marks_of_block(where: str, block: ContentBlock) -> Iterator[tuple[str, CacheControl]]:
    yield from _marks_within(f"{where}.content", block.content)
    if block.cache_control:
        yield where, block.cache_control
