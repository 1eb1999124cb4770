"""The JSON body of a responses request: its types, its ranges, and the Request that it becomes.

Source: OpenAI's OpenAPI document, `CreateResponse` and `Tool`. Tools in a namespace are offered to
the model under a joined name. Owns both names of each tool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.datastructures import Headers

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
    temperature_of,
    template_kwargs_of,
    tool_function,
    top_p_of,
)
from luceasync.server.http.auth import Caller
from luceasync.server.openai.common import check_model
from luceasync.server.openai.custom_tools import custom_function
from luceasync.server.openai.request_body import (
    FORMATS,
    NO_LIMIT,
    ToolChoice,
    allowed_tools,
    max_calls,
    must_call,
    priority_of,
    schema_constraint,
)
from luceasync.server.openai.responses_items import (
    Conversation,
    InputItem,
    PlacedItem,
    ResponseStore,
    messages_of,
    offered_name,
)
from luceasync.server.unserved import ChatFieldsBody, refuse_unserved

MAX_ITEMS = 16384
MAX_TOP_LOGPROBS = 20
INCLUDE_LOGPROBS = "message.output_text.logprobs"
PREVIOUS = "previous_response_id"
MAX_TOOLS = 1024
CLIENT_TOOLS = ("function", "custom", "namespace")

TemplateTool = dict[str, Any]


class CustomFormat(msgspec.Struct, omit_defaults=True):
    """The format of a custom tool's input."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class ResponsesTool(msgspec.Struct):
    """The client's function, custom tool or namespace, or a tool of another `type`."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: list[ResponsesTool] | None = None

    def echo(self) -> dict[str, Any]:
        """The tool as the response repeats it, with the fields that clients' types require."""
        fields: dict[str, Any]
        match self.type:
            case "function":
                fields = {"parameters": self.parameters, "strict": self.strict}
            case "custom":
                fields = {} if self.format is None else {"format": self.format}
            case _:
                fields = {"tools": [tool.echo() for tool in self.tools or ()]}
        described = {"name": self.name, "description": self.description or ""}
        return {"type": self.type, **described, **fields}


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


class ResponsesBody(ChatFieldsBody, kw_only=True):
    """The fields of `POST /v1/responses` that are read; null is the same as absent."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    previous_response_id: str | None = None
    priority: int | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    conversation: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()
    top_k: msgspec.Raw = msgspec.Raw()
    thinking: msgspec.Raw = msgspec.Raw()
    background: bool | None = None
    text: TextOptions | None = None
    tool_choice: ToolChoice | None = None
    tools: list[ResponsesTool] | None = None


_decoder = msgspec.json.Decoder(ResponsesBody)


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool under the client's own name; `where`: the path of its field."""

    where: str
    tool: ResponsesTool
    namespace: str | None = None

    @property
    def name(self) -> str:
        return self.tool.name or ""

    @property
    def is_custom(self) -> bool:
        return self.tool.type == "custom"

    @property
    def offered_name(self) -> str:
        return offered_name(self.namespace, self.name)

    @property
    def schema_place(self) -> str:
        return f"{self.where}.format" if self.is_custom else f"{self.where}.parameters"

    def function(self) -> TemplateTool:
        """The function that is offered to the model. Raises RequestError, which names the field."""
        tool, where = self.tool, self.where
        if not tool.name:
            refuse(f"{where}.name", tool.name, "a name")
        if self.is_custom:
            form = tool.format or CustomFormat("text")
            about = self.offered_name, tool.description
            custom = custom_function(f"{where}.format", *about, form.syntax, form.definition)
            return {"type": "function", "function": custom}
        check_arguments_schema(f"{where}.parameters", tool.parameters or {})
        fields = {"description": tool.description, "parameters": tool.parameters}
        strict = {"strict": True} if tool.strict else {}
        named = tool_function({"name": self.offered_name, **fields, **strict})
        return {"type": "function", "function": named}


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools of one request, by the names offered to the model; `functions` are those that the
    template renders.
    """

    by_name: dict[str, ClientTool] = field(default_factory=dict)
    functions: tuple[TemplateTool, ...] = ()
    max_calls: int | None = None
    must_call: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        tools: Sequence[ResponsesTool],
        choice: ToolChoice | None = None,
        parallel: bool | None = None,
    ) -> OfferedTools:
        """Collect the tools, without those that run on OpenAI's servers. Raises RequestError."""
        at_most("tools", tools, MAX_TOOLS, "tools")
        if choice == "none":
            return cls()
        listed = list(_of_client(tools))
        at_most("tools", listed, MAX_TOOLS, "tools")
        choice, allowed = allowed_tools(choice)
        if allowed is not None:
            listed = [one for one in listed if any(_is_meant(one, each) for each in allowed)]
        by_name: dict[str, ClientTool] = {}
        for one in listed:
            if by_name.setdefault(one.offered_name, one).tool != one.tool:
                refuse(f"{one.where}.name", one.name, "a name that no other tool has")
        functions = tuple(one.function() for one in by_name.values())
        choice = _offered_choice(choice, listed)
        return cls(by_name, functions, max_calls(choice, parallel), must_call(choice, functions))

    @property
    def schema_places(self) -> tuple[str, ...]:
        return tuple(one.schema_place for one in self.by_name.values())


@dataclass(frozen=True, slots=True)
class ParsedResponses:
    """A checked body: the engine's request, the tools that it offers, and the conversation so far,
    with all item references resolved.
    """

    body: ResponsesBody
    request: Request
    tools: OfferedTools
    items: Conversation


def parse_responses(
    body: bytes, card: ModelCard, caller: Caller, headers: Headers, store: ResponseStore
) -> ParsedResponses:
    """Check a JSON body and make the request of `caller`. Raises RequestError."""
    parsed = decode(_decoder, body)
    check_model(parsed.model, card)
    _refuse_unserved(parsed)
    tenant = caller.tenant(None)
    tools = OfferedTools.of(parsed.tools or (), parsed.tool_choice, parsed.parallel_tool_calls)
    placed = placed_items(parsed, tenant, store)
    request = Request(
        prompt_of(parsed, tools, placed),
        sampling=Sampling(temperature=temperature_of(parsed), top_p=top_p_of(parsed)),
        max_tokens=_max_tokens(parsed),
        top_logprobs=_top_logprobs(parsed),
        pins=pins_of(parsed),
        constraint=_constraint(parsed),
        most_reasoning_tokens=effort_tokens("reasoning.effort", _effort(parsed)),
        priority=priority_of(parsed.priority),
        tenant=tenant,
        client=caller.client,
        conversation=conversation_id_of(headers, parsed.prompt_cache_key),
    )
    return ParsedResponses(parsed, request, tools, tuple(item for _, item in placed))


def _refuse_unserved(body: ResponsesBody) -> None:
    refuse_unserved(body, "conversation", "prompt", "max_tokens", "top_k", "thinking")
    if body.background:
        refuse("background", True, "false (nothing runs in the background here)")


def placed_items(body: ResponsesBody, tenant: str, store: ResponseStore) -> list[PlacedItem]:
    """The items of the conversation, starting with those of the previous response, each with the
    path of its field.
    """
    before = store.conversation(tenant, body.previous_response_id)
    placed = [(PREVIOUS, item) for item in before]
    if isinstance(body.input, str):
        return [*placed, ("input", InputItem(role="user", content=body.input))]
    at_most("input", [*before, *body.input], MAX_ITEMS, "items")
    for i, item in enumerate(body.input):
        where = f"input[{i}]"
        is_reference = item.type == "item_reference"
        placed.append((where, store.item(tenant, item.id, where) if is_reference else item))
    return placed


def _top_logprobs(body: ResponsesBody) -> int | None:
    is_included = INCLUDE_LOGPROBS in (body.include or ())
    if body.top_logprobs is None:
        return 0 if is_included else None
    top = in_range("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)
    return top if top or is_included else None


def _max_tokens(body: ResponsesBody) -> int | None:
    most = body.max_output_tokens
    if most is None or most == NO_LIMIT:
        return None
    return in_range("max_output_tokens", most, 1, MAX_INT)


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


def prompt_of(body: ResponsesBody, tools: OfferedTools, placed: Sequence[PlacedItem]) -> ChatPrompt:
    """The chat template's input. Raises RequestError, which names the field at fault."""
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages = list(messages_of(placed))
    if not messages:
        refuse("input", body.input, "at least one item")
    return ChatPrompt(
        messages=[*system, *messages],
        tools=[*tools.functions] or None,
        template_kwargs=template_kwargs_of(_effort(body), None),
        max_calls=tools.max_calls,
        must_call=tools.must_call,
        schema_places=tools.schema_places,
        param="input",
    )


def _of_client(tools: Sequence[ResponsesTool]) -> Iterator[ClientTool]:
    for i, tool in enumerate(tools):
        if tool.type in ("function", "custom"):
            yield ClientTool(f"tools[{i}]", tool)
        elif tool.type == "namespace":
            for j, inner in enumerate(tool.tools or ()):
                if inner.type in ("function", "custom"):
                    yield ClientTool(f"tools[{i}].tools[{j}]", inner, tool.name)


def _is_meant(one: ClientTool, choice: Any) -> bool:
    """Whether an object that chooses a tool refers to this one."""
    if not isinstance(choice, dict) or choice.get("name") not in (one.name, one.offered_name):
        return False
    return choice.get("namespace") in (None, one.namespace)


def _offered_choice(choice: ToolChoice | None, listed: Sequence[ClientTool]) -> ToolChoice | None:
    """The choice, with the tool's name as offered to the model."""
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        return choice
    meant = next((one for one in listed if _is_meant(one, choice)), None)
    return choice if meant is None else {"type": "function", "name": meant.offered_name}
