"""The items of a conversation as the messages of a chat template, and the items of recent
responses, to which later requests refer.

Source: OpenAI's OpenAPI document, `Item`. Owns which items form one message: a model's reasoning,
text and calls before a reply are one turn. Also owns how long items are kept. Independent of
events.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple, NoReturn

import msgspec

from luceasync.errors import RequestError
from luceasync.server.fields import at_most, refuse, shorten
from luceasync.server.openai.custom_tools import input_arguments

MAX_PARTS = 8192  # of one content
MAX_BYTES = 64 << 20  # of all kept conversations, as JSON
SERVED = "message, reasoning, item_reference, calls and their outputs"
CALL, OUTPUT = "_call", "_output"  # suffixes of item types
# Items that OpenAI's servers write for their own use, or encrypt.
INTERNAL_TYPES = frozenset(
    {
        "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "compaction",
        "compaction_summary", "context_compaction", "ghost_snapshot", "tool_search_output",
    }
)  # fmt: skip
# The fields of hosted tools' items that the model gets to see.
ACTION_FIELDS = ("name", "arguments", "action", "queries", "code", "input", "output", "error")

TemplateMessage = dict[str, Any]


class ItemPart(msgspec.Struct, omit_defaults=True):
    """One part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, omit_defaults=True):
    """One item of a conversation; `type` determines which fields it has. Messages may omit it."""

    type: str = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: Any = None
    input: Any = None
    output: Any = None
    action: Any = None
    queries: Any = None
    code: Any = None
    error: Any = None


Conversation = tuple[InputItem, ...]
PlacedItem = tuple[str, InputItem]  # with the path of its field


def messages_of(placed: Sequence[PlacedItem]) -> Iterator[TemplateMessage]:
    """The messages that the items form. Raises RequestError, which names the field."""
    visible = [one for one in placed if one[1].type not in INTERNAL_TYPES]
    for by_model, run in groupby(visible, lambda one: _is_by_model(one[1])):
        if by_model:
            yield from _turn(list(run))
        else:
            yield from (_message(where, item) for where, item in run)


def _is_by_model(item: InputItem) -> bool:
    is_answer = item.type == "message" and item.role == "assistant"
    return is_answer or item.type == "reasoning" or item.type.endswith(CALL)


def _turn(items: Sequence[PlacedItem]) -> Iterator[TemplateMessage]:
    """A turn of the model; text or reasoning after a call begins another message."""
    turn: TemplateMessage = {}
    for where, item in items:
        is_call = _is_call(item)
        if turn.get("tool_calls") and not is_call:
            yield turn
            turn = {}
        turn.setdefault("role", "assistant")
        turn.setdefault("content", "")
        if is_call:
            turn.setdefault("tool_calls", []).append(_call(where, item))
        elif item.type == "reasoning":
            thought = _text(f"{where}.content", item.content) or _text(
                f"{where}.summary", item.summary
            )
            _add(turn, "reasoning_content", thought)
        elif item.type == "message":
            _add(turn, "content", _text(f"{where}.content", item.content))
        else:
            _add(turn, "content", _hosted_action(item))
    yield turn


def _add(turn: TemplateMessage, field: str, text: str) -> None:
    if text:
        turn[field] = f"{turn[field]}\n{text}" if turn.get(field) else text


def _is_call(item: InputItem) -> bool:
    """Whether the item is a call that the client answers, with an id."""
    if item.type in ("function_call", "custom_tool_call"):
        return True
    return item.type.endswith(CALL) and bool(item.call_id)


def _call(where: str, item: InputItem) -> TemplateMessage:
    is_named = item.type in ("function_call", "custom_tool_call")
    for name in ("call_id", "name") if is_named else ():
        if not getattr(item, name):
            refuse(f"{where}.{name}", getattr(item, name), "text")
    if item.type == "function_call":
        arguments = item.arguments if item.arguments is not None else "{}"
    elif item.type == "custom_tool_call":
        arguments = input_arguments(_as_text(item.input))
    else:
        arguments = _json(item.action if isinstance(item.action, dict) else {})
    called = item.name if is_named else item.type.removesuffix(CALL)
    function = {
        "name": offered_name(item.namespace, called or ""),
        "arguments": _as_text(arguments),
    }
    return {"id": item.call_id, "type": "function", "function": function}


def offered_name(namespace: str | None, name: str) -> str:
    """The name under which a tool is offered to the model."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def _hosted_action(item: InputItem) -> str:
    """The actions of OpenAI's servers on the model's behalf, as text."""
    fields = {name: getattr(item, name) for name in ACTION_FIELDS}
    fields = {name: value for name, value in fields.items() if value is not None}
    return f"[{item.type} {_json(fields)}]" if fields else f"[{item.type}]"


def _message(where: str, item: InputItem) -> TemplateMessage:
    if item.type == "message":
        if item.role is None:
            refuse(f"{where}.role", None, "user, assistant, system or developer")
        role = "system" if item.role == "developer" else item.role
        return {"role": role, "content": _text(f"{where}.content", item.content)}
    if not item.type.endswith(OUTPUT):
        _refuse_type(where, item.type, SERVED)
    call_id = item.call_id or (None if item.type == "function_call_output" else item.id)
    if not call_id:
        refuse(f"{where}.call_id", item.call_id, "the id of a call")
    return {"role": "tool", "tool_call_id": call_id, "content": _output(where, item)}


def _output(where: str, item: InputItem) -> str:
    """The result of a call: text, parts of text, or any other value, as JSON."""
    is_ours = item.type in ("function_call_output", "custom_tool_call_output")
    if not is_ours or not isinstance(item.output, list):
        return _as_text(item.output)
    try:
        parts = msgspec.convert(item.output, list[ItemPart])
    except msgspec.ValidationError:
        return _json(item.output)
    return _text(f"{where}.output", parts)


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


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


# Items of recent responses


class _Kept(NamedTuple):
    """A conversation up to and including one response."""

    items: Conversation
    num_bytes: int


@dataclass(slots=True)
class _OfTenant:
    """The responses of one tenant by id, oldest first, and their items, each with the newest
    response that contains it.
    """

    responses: OrderedDict[str, _Kept] = field(default_factory=OrderedDict)
    items: dict[str, tuple[str, InputItem]] = field(default_factory=dict)
    num_bytes: int = 0

    def drop_oldest(self) -> int:
        """Drop the oldest response and return its bytes."""
        response_id, kept = self.responses.popitem(last=False)
        self.num_bytes -= kept.num_bytes
        for item in kept.items:
            if item.id is not None and self.items.get(item.id, ("",))[0] == response_id:
                del self.items[item.id]
        return kept.num_bytes


class ResponseStore:
    """Keeps recent responses. Beyond `max_bytes`, the tenant with the most bytes loses its oldest
    response. Thread-safe.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._tenants: dict[str, _OfTenant] = {}
        self._num_bytes = 0

    def __repr__(self) -> str:
        return f"ResponseStore({self._num_bytes} of {self._max_bytes} bytes)"

    def keep(self, tenant: str, response_id: str, items: Sequence[InputItem]) -> None:
        """Keep a conversation that ends with the response."""
        num_bytes = len(msgspec.json.encode(items))
        if num_bytes > self._max_bytes:
            return
        with self._lock:
            kept = self._tenants.setdefault(tenant, _OfTenant())
            kept.responses[response_id] = _Kept(tuple(items), num_bytes)
            kept.items.update(
                (item.id, (response_id, item)) for item in items if item.id is not None
            )
            kept.num_bytes += num_bytes
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                self._drop_one()

    def _drop_one(self) -> None:
        name, most = max(self._tenants.items(), key=lambda one: one[1].num_bytes)
        self._num_bytes -= most.drop_oldest()
        if not most.responses:
            del self._tenants[name]

    def conversation(self, tenant: str, response_id: str | None) -> Conversation:
        """The items up to and including the response; empty for None. Raises RequestError."""
        if response_id is None:
            return ()
        with self._lock:
            kept = self._tenants.get(tenant, _OfTenant()).responses.get(response_id)
        if kept is None:
            raise RequestError(
                f"Previous response with id '{response_id[:100]}' not found. Recent responses are "
                "kept in memory, unless 'store' is false: send the whole conversation as 'input'.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return kept.items

    def item(self, tenant: str, item_id: str | None, where: str) -> InputItem:
        """The item with that id. Raises RequestError, which names the field below `where`."""
        with self._lock:
            found = self._tenants.get(tenant, _OfTenant()).items.get(item_id or "")
        if found is None:
            raise RequestError(
                f"Item with id '{(item_id or '')[:100]}' not found. Items of recent responses are "
                "kept in memory, unless 'store' is false: send the item itself.",
                param=f"{where}.id",
                code="item_not_found",
            )
        return found[1]
